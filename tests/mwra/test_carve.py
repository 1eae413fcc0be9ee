import itertools
import math
import random

import pytest

from mrl_jax import checks
from mrl_jax.mwra import carve
from mrl_jax.mwra import topology as topology_lib
from tests import fleets

Place = topology_lib.Place


def grid(shape, host, slice=0):
  """Places of a grid whose hosts are numbered by the corner of their block."""
  return [
    Place(
      process=hash((slice, *(x // n for x, n in zip(at, host, strict=True)))),
      coords=at,
      slice=slice,
    )
    for at in itertools.product(*map(range, shape))
  ]


FLEETS = {
  '2x4 in one host': grid((2, 4), (2, 4)),
  '2x4 in two hosts': grid((2, 4), (2, 2)),
  '4x4': grid((4, 4), (2, 2)),
  '2x2x2': grid((2, 2, 2), (2, 2, 1)),
  '2x6': grid((2, 6), (2, 2)),
  '2x5': grid((2, 5), (2, 5)),
  'two slices of 2x5': grid((2, 5), (2, 5)) + grid((2, 5), (2, 5), slice=1),
  'two slices': grid((2, 2), (2, 1)) + grid((2, 4), (2, 2), slice=1),
  'line': [Place(process=0)] * 8,
  'line of hosts': [Place(process=i // 4) for i in range(8)],
}


def boxes_by_brute_force(places):
  """Every set of devices that can be a slice, from the definition."""
  hosts = {}
  for i, place in enumerate(places):
    hosts.setdefault(place.process, set()).add(i)
  found = set()
  for slice in {place.slice for place in places}:
    at = {
      place.coords or (i,): i
      for i, place in enumerate(places)
      if place.slice == slice
    }
    for low, high in itertools.product(at, at):
      box = {
        i
        for coords, i in at.items()
        if all(a <= x <= b for a, x, b in zip(low, coords, high, strict=True))
      }
      touched = [host for host in hosts.values() if host & box]
      if box and (len(touched) == 1 or set().union(*touched) == box):
        found.add(frozenset(box))
  return found


def best_by_brute_force(places, seconds):
  """(Least makespan, fewest devices) over all disjoint slices, or None."""
  boxes = boxes_by_brute_force(places)
  taken = {frozenset(): 0.0}  # Least makespan by the devices that are taken.
  for times in seconds.values():
    following = {}
    for devices, makespan in taken.items():
      for box in boxes:
        if len(box) in times and not box & devices:
          both = devices | box
          slowest = max(makespan, times[len(box)])
          following[both] = min(slowest, following.get(both, math.inf))
    taken = following
  return min(
    ((makespan, len(devices)) for devices, makespan in taken.items()),
    default=None,
  )


def random_seconds(rng, places):
  """Times that mostly fall with more devices, some of them equal or rising."""
  return {
    f'policy{i}': {
      n: rng.choice([round(work / n), work / n, rng.randint(1, 9)])
      for n in range(rng.randint(1, 5), len(places) + 1)
      if rng.random() < 0.7
    }
    for i, work in enumerate(rng.choices(range(1, 40), k=rng.randint(1, 4)))
  }


def check(topology, places, seconds, boxes):
  """Slices are disjoint, legal, and of sizes that have a time."""
  assert list(boxes) == list(seconds)
  devices = [topology.devices(box) for box in boxes.values()]
  assert len({*itertools.chain(*devices)}) == sum(map(len, devices))
  for name, box in boxes.items():
    assert len(topology.devices(box)) == box.size in seconds[name]
  hosts = {}
  for i, place in enumerate(places):
    hosts.setdefault(place.process, set()).add(i)
  for part in map(set, devices):
    touched = [host for host in hosts.values() if host & part]
    assert len(touched) == 1 or set().union(*touched) == part


@pytest.mark.parametrize('name', FLEETS)
def test_boxes_are_those_of_the_definition(name):
  topology = topology_lib.build(FLEETS[name])
  boxes = [box for n in topology.sizes() for box in topology.boxes(n)]
  sets = [frozenset(topology.devices(box)) for box in boxes]
  assert len(set(sets)) == len(sets)
  assert set(sets) == boxes_by_brute_force(FLEETS[name])


def test_makespan_and_devices_are_those_of_brute_force():
  rng = random.Random(0)
  impossible = 0
  for _ in range(500):
    name = rng.choice(list(FLEETS))
    places = rng.sample(FLEETS[name], len(FLEETS[name]))
    if not places[0].coords:
      places = FLEETS[name]
    topology = topology_lib.build(places)
    seconds = random_seconds(rng, places)
    best = best_by_brute_force(places, seconds)
    if best is None:
      impossible += 1
      with pytest.raises(checks.InputError):
        carve.carve(topology, seconds)
      continue
    boxes = carve.carve(topology, seconds)
    check(topology, places, seconds, boxes)
    makespan = max(seconds[p][box.size] for p, box in boxes.items())
    assert (makespan, sum(b.size for b in boxes.values())) == best, name
    assert carve.carve(topology, seconds) == boxes
  assert 50 < impossible < 250


def test_a_size_that_cannot_be_placed_beside_the_others_is_not_chosen():
  # Beside 2x3 of 2x5 chips there is room for 2x2, and not for a row of three.
  topology = topology_lib.build(grid((2, 5), (2, 5)))
  seconds = {'a': {6: 1.0, 8: 1.0}, 'b': {3: 1.0, 4: 1.0, 2: 5.0}}
  boxes = carve.carve(topology, seconds)
  assert [box.shape[1:] for box in boxes.values()] == [(2, 3), (2, 2)]


def test_of_the_combinations_that_fit_the_one_of_fewest_devices_is_chosen():
  # 6 + 3 fit nowhere; 6 + 4 and 10 + 4 do.
  places = grid((2, 5), (2, 5)) + grid((2, 2), (2, 2), slice=1)
  seconds = {'a': {6: 1.0, 10: 1.0}, 'b': {3: 1.0, 4: 1.0}}
  boxes = carve.carve(topology_lib.build(places), seconds)
  assert [box.size for box in boxes.values()] == [6, 4]


def test_every_combination_of_sizes_is_tried():
  # Only fours fit beside the sixes, so both policies have to change.
  topology = topology_lib.build(FLEETS['two slices of 2x5'])
  either = {3: 1.0, 4: 1.0}
  seconds = {'a': {6: 1.0}, 'b': either, 'c': {6: 1.0}, 'd': either}
  boxes = carve.carve(topology, seconds)
  assert [box.size for box in boxes.values()] == [6, 4, 6, 4]


def test_slices_are_placed_where_the_first_fit_leaves_no_room():
  # The first fit puts 4 and 3 in one host of 8, and 3, 2 and 2 in the other.
  topology = topology_lib.build([Place(process=i // 8) for i in range(16)])
  sizes = [4, 3, 3, 2, 2, 2]
  seconds = {f'policy{i}': {n: 1.0} for i, n in enumerate(sizes)}
  boxes = carve.carve(topology, seconds)
  assert [box.size for box in boxes.values()] == sizes


def test_devices_that_shorten_no_round_stay_free():
  topology = fleets.named('v5e:4x4')
  seconds = {'large': {4: 8.0, 8: 4.0}, 'small': {1: 4.0, 2: 2.0, 4: 1.0}}
  boxes = carve.carve(topology, seconds)
  assert {name: box.size for name, box in boxes.items()} == {
    'large': 8,
    'small': 1,
  }


@pytest.mark.parametrize('name', ['v5p:8x8x16', 'v5e:32x32'])
def test_slices_of_powers_of_two_fill_1024_chips(name):
  topology = fleets.named(name)
  sizes = [8, 512, 16, 256, 64, 8, 32, 128]
  seconds = {f'policy{i}': {n: 1.0} for i, n in enumerate(sizes)}
  boxes = carve.carve(topology, seconds)
  assert [box.size for box in boxes.values()] == sizes
  devices = [topology.devices(box) for box in boxes.values()]
  assert len({*itertools.chain(*devices)}) == 1024


@pytest.mark.parametrize('name', ['v5p:8x8x16', 'v5e:16x16'])
def test_eight_policies_on_a_large_fleet(name):
  topology = fleets.named(name)
  seconds = {
    f'policy{i}': {n: work / n for n in topology.sizes() if n >= 4}
    for i, work in enumerate([30, 20, 12, 12, 8, 5, 3, 1])
  }
  boxes = carve.carve(topology, seconds)
  devices = [topology.devices(box) for box in boxes.values()]
  assert len({*itertools.chain(*devices)}) == sum(map(len, devices))
  # A bound for slices of any form: the fewest devices that meet the makespan.
  bound = min(
    makespan
    for makespan in {t for times in seconds.values() for t in times.values()}
    if sum(
      min((n for n, t in times.items() if t <= makespan), default=math.inf)
      for times in seconds.values()
    )
    <= topology.size
  )
  slowest = max(seconds[p][box.size] for p, box in boxes.items())
  assert bound <= slowest < 1.05 * bound
  assert carve.carve(topology, seconds) == boxes


def test_the_error_for_too_few_devices_says_what_would_help():
  topology = fleets.named('cpu:2')
  with pytest.raises(checks.InputError) as error:
    carve.carve(topology, {'a': {1: 1.0}, 'b': {2: 1.0}, 'c': {1: 1.0}})
  assert str(error.value) == (
    '3 policies do not fit on 2 devices: a at least 1, b at least 2, c at '
    'least 1. Use 4 devices or more, or let policies take turns on them with '
    '--config.mwra.time_share=True'
  )


def test_the_error_names_the_policy_whose_sizes_no_slice_has():
  topology = fleets.named('v5e:4x4')
  with pytest.raises(checks.InputError, match=r'policy a fits .* 5, 7 devices'):
    carve.carve(topology, {'b': {1: 1.0}, 'a': {5: 1.0, 7: 0.5}})


def test_the_error_for_slices_that_hosts_do_not_leave_room_for():
  # One device is left in each host of four.
  topology = topology_lib.build([Place(process=i // 4) for i in range(8)])
  seconds = {'a': {3: 1.0}, 'b': {3: 1.0}, 'c': {2: 1.0}}
  with pytest.raises(checks.InputError, match='either inside one host'):
    carve.carve(topology, seconds)
