import pytest

from mrl_jax import checks
from mrl_jax.mwra import topology as topology_lib
from tests import fleets

Place = topology_lib.Place


def coords(topology, devices):
  """Coordinates of devices of the first grid, in the order of `devices`."""
  grid = topology.grids[0]
  at = {}
  for position, device in enumerate(grid.devices):
    here = []
    for size in grid.shape:
      position, x = divmod(position, size)
      here.append(x)
    at[device] = tuple(here)
  return [at[device] for device in devices]


def test_devices_are_listed_as_jax_lists_them():
  # Read from jax.experimental.topologies, jax 0.10.2 and libtpu 0.0.42.
  v5e = fleets.named('v5e:4x4')
  assert [xy[1:] for xy in coords(v5e, range(10))] == [
    (0, 0), (1, 0), (0, 1), (1, 1), (2, 0),
    (3, 0), (2, 1), (3, 1), (0, 2), (1, 2),
  ]  # fmt: skip
  v5p = fleets.named('v5p:2x2x2')
  assert [xyz[1:] for xyz in coords(v5p, range(6))] == [
    (0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1), (1, 0, 1),
  ]  # fmt: skip
  tpu7x = fleets.named('tpu7x:2x2x1')
  assert coords(tpu7x, range(4)) == [
    (0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (1, 1, 0, 0),
  ]  # fmt: skip


@pytest.mark.parametrize(
  ('name', 'sizes'),
  [
    ('v5e:2x2', [1, 2, 4]),
    ('v5e:2x4', [1, 2, 3, 4, 6, 8]),  # One host of eight.
    ('v5e:4x4', [1, 2, 4, 8, 16]),
    ('v6e:2x4', [1, 2, 3, 4, 6, 8]),
    ('v5p:2x2x4', [1, 2, 4, 8, 12, 16]),
    ('tpu7x:2x2x2', [1, 2, 4, 8, 16]),
    ('cpu:3', [1, 2, 3]),
    ('h200:16', [1, 2, 3, 4, 5, 6, 7, 8, 16]),
  ],
)
def test_sizes_of_slices(name, sizes):
  assert fleets.named(name).sizes() == sizes


def test_boxes_that_span_the_grid_come_first_and_then_compact_ones():
  v5p = fleets.named('v5p:4x4x4')
  shapes = [box.shape[1:] for box in v5p.boxes(16)]
  assert shapes[0] == (4, 4, 1)
  shapes = list(dict.fromkeys(box.shape[1:] for box in v5p.boxes(8)))
  assert shapes == [(2, 4, 1), (4, 2, 1), (2, 2, 2)]
  v5e = fleets.named('v5e:8x8')
  assert v5e.boxes(24)[0].shape[1:] == (4, 6)


def test_devices_of_a_box_keep_hosts_together():
  v5e = fleets.named('v5e:4x4')
  (row,) = [
    box
    for box in v5e.boxes(8)
    if box.shape == (1, 4, 2) and box.start == (0, 0, 2)
  ]
  assert coords(v5e, v5e.devices(row)) == [
    (0, 0, 2), (0, 1, 2), (0, 0, 3), (0, 1, 3),
    (0, 2, 2), (0, 3, 2), (0, 2, 3), (0, 3, 3),
  ]  # fmt: skip
  (whole,) = v5e.boxes(16)
  assert v5e.devices(whole) == tuple(range(16))


def test_a_tpu_chip_is_divided_only_for_a_single_device():
  tpu7x = fleets.named('tpu7x:2x2x1')
  assert len(tpu7x.boxes(1)) == 8
  for n in (2, 4, 8):
    assert all(box.shape[0] == 2 for box in tpu7x.boxes(n))


def test_slices_are_separate_grids_with_coordinates_of_their_own():
  places = [
    Place(process=10 * s + y, coords=(x + 4, y, 7), slice=s)
    for s in (1, 0)
    for y in range(2)
    for x in range(2)
  ]
  topology = topology_lib.build(places)
  assert [grid.devices for grid in topology.grids] == [
    (4, 5, 6, 7),
    (0, 1, 2, 3),
  ]
  assert topology.grids[0].shape == (1, 2, 2, 1)
  assert topology.grids[0].host == (1, 2, 1, 1)
  assert topology.sizes() == [1, 2, 4]
  assert topology.describe(topology.boxes(4)[1]) == (
    '2x2x1 chips at (0, 0, 0) of slice 1'
  )


def test_devices_without_coordinates_are_a_line_host_by_host():
  topology = topology_lib.build([Place(process=p) for p in (1, 0, 1, 0)])
  assert topology.grids[0].devices == (1, 3, 0, 2)
  assert topology.grids[0].host == (1, 2)
  assert [topology.devices(b) for b in topology.boxes(2)] == [(1, 3), (0, 2)]


def test_descriptions():
  cpu = fleets.named('cpu:4')
  assert cpu.describe(cpu.boxes(3)[1]) == 'devices 1 to 3'
  assert cpu.describe(cpu.boxes(1)[2]) == 'device 2'
  tpu7x = fleets.named('tpu7x:2x2x1')
  assert tpu7x.describe(tpu7x.boxes(1)[1]) == (
    'core 1 of 1x1x1 chips at (0, 0, 0)'
  )


@pytest.mark.parametrize(
  'places',
  [
    [Place(process=0), Place(process=1), Place(process=1)],
    [Place(process=0, coords=(0, 0)), Place(process=0, coords=(1, 1))],
    [Place(process=i > 0, coords=(i, 0)) for i in range(3)],
    # Two hosts that interleave, in a line and in a square.
    [Place(process=i % 2, coords=(i, 0)) for i in range(4)],
    [Place(process=(x + y) % 2, coords=(x, y)) for x in (0, 1) for y in (0, 1)],
    [],
  ],
)
def test_hosts_that_are_no_equal_blocks_are_refused(places):
  with pytest.raises(checks.InputError):
    topology_lib.build(places)
