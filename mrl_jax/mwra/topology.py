"""Where devices are, and which sets of them can be the slice of a policy.

The devices of a TPU slice form a grid; CPU and GPU devices form a line. A policy
gets a box of the grid: a rectangular part that lies inside one host's block of
devices, or consists of whole blocks. Its devices then communicate over links
between themselves only, and a policy on several hosts shares none of them.
"""

from collections.abc import Sequence
import dataclasses
import functools
import itertools
import math
import operator
from typing import NamedTuple

from mrl_jax import checks


class Place(NamedTuple):
  """Where one device is, in the words of `jax.Device`."""

  process: int  # `process_index`.
  coords: tuple[int, ...] = ()  # Of the chip; empty on CPU and GPU.
  core: int = 0  # `core_on_chip`.
  slice: int = 0  # `slice_index` of a TPU; grids are separate.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Box:
  """A rectangular part of a grid; sizes as in `Grid`."""

  grid: int  # Index in `Topology.grids`.
  start: tuple[int, ...]  # Its smallest coordinates.
  shape: tuple[int, ...]

  @property
  def size(self) -> int:
    return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
  """Devices with coordinates: first the core of a chip, then the chip's own."""

  shape: tuple[int, ...]
  host: tuple[int, ...]  # The shape of one host's block; divides `shape`.
  devices: tuple[int, ...]  # Indices of devices, the first coordinate fastest.

  def index(self, coords: Sequence[int]) -> int:
    """The position of a device in `devices`."""
    position = 0
    for x, size in zip(reversed(coords), reversed(self.shape), strict=True):
      position = position * size + x
    return position

  @functools.cached_property
  def shapes(self) -> dict[int, list[tuple[int, ...]]]:
    """The shapes of boxes by their number of devices, the best connected first.

    A box that spans the grid in a dimension can have the links that close it to
    a ring, and leaves no gap beside it; a compact box has the fewest hops. A
    chip is not divided, except that a single device can be one core of it.
    """
    inside = [range(1, host + 1) for host in self.host]
    inside[0] = [self.host[0]]
    blocks = [
      range(host, size + 1, host)
      for host, size in zip(self.host, self.shape, strict=True)
    ]
    shapes = {(1,) * len(self.shape)}
    shapes.update(itertools.product(*inside), itertools.product(*blocks))
    table = {}
    for shape in sorted(shapes, key=self._rank):
      table.setdefault(math.prod(shape), []).append(shape)
    return table

  def _rank(self, shape):
    spanned = sum(map(operator.eq, shape, self.shape))
    return -spanned, sum(shape), shape

  def starts(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Where boxes of a shape can start: no host's block is cut by two sides."""
    axes = [
      [
        x
        for x in range(size - extent + 1)
        if (x % host + extent <= host if extent < host else x % host == 0)
      ]
      for size, host, extent in zip(self.shape, self.host, shape, strict=True)
    ]
    return [_flip(start) for start in itertools.product(*_flip(axes))]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
  """All devices of a fleet.

  fleet = topology.build(places)
  for box in fleet.boxes(8):
    print(fleet.describe(box), fleet.devices(box))
  """

  grids: tuple[Grid, ...]

  @property
  def size(self) -> int:
    """Number of devices."""
    return sum(len(grid.devices) for grid in self.grids)

  def sizes(self) -> list[int]:
    """The numbers of devices that slices can have."""
    return sorted(set().union(*(grid.shapes for grid in self.grids)))

  def boxes(self, n: int) -> list[Box]:
    """All boxes of `n` devices, grid by grid, the best connected first."""
    return [
      Box(grid=i, start=start, shape=shape)
      for i, grid in enumerate(self.grids)
      for shape in grid.shapes.get(n, ())
      for start in grid.starts(shape)
    ]

  def devices(self, box: Box) -> tuple[int, ...]:
    """The indices of a box's devices, in the order for a mesh.

    Host by host, and inside a host and over hosts row by row. Consecutive
    devices are mostly neighbours; a tensor axis (the fastest of a mesh) that is
    no larger than a host stays inside it, and each host holds consecutive rows
    of a batch.
    """
    grid = self.grids[box.grid]
    block = tuple(map(min, box.shape, grid.host))
    hosts = [
      range(x, x + extent, step)
      for x, extent, step in zip(box.start, box.shape, block, strict=True)
    ]
    return tuple(
      grid.devices[
        grid.index([x + y for x, y in zip(host, local, strict=True)])
      ]
      for host in map(_flip, itertools.product(*_flip(hosts)))
      for local in map(_flip, itertools.product(*map(range, _flip(block))))
    )

  def describe(self, box: Box) -> str:
    """A box for people: '2x2x4 chips at (0, 0, 8)', or 'devices 0 to 3'."""
    grid = self.grids[box.grid]
    if len(grid.shape) == 2:
      devices = self.devices(box)
      several = f'devices {devices[0]} to {devices[-1]}'
      return several if len(devices) > 1 else f'device {devices[0]}'
    shape = 'x'.join(map(str, box.shape[1:]))
    where = f'{shape} chips at {box.start[1:]}'
    if box.shape[0] < grid.shape[0]:
      where = f'core {box.start[0]} of {where}'
    return where + (f' of slice {box.grid}' if len(self.grids) > 1 else '')


def build(places: Sequence[Place]) -> Topology:
  """The topology of devices in the order of `places`."""
  checks.require(bool(places), 'there are no devices to plan slices for')
  if not places[0].coords:
    order = sorted(range(len(places)), key=lambda i: (places[i].process, i))
    return Topology(grids=(_line(places, order),))
  slices = {}
  for i, place in enumerate(places):
    slices.setdefault(place.slice, []).append(i)
  grids = (_grid(name, places, slices[name]) for name in sorted(slices))
  return Topology(grids=tuple(grids))


def _line(places, order):
  counts = {}
  for place in places:
    counts[place.process] = counts.get(place.process, 0) + 1
  checks.require(
    len(set(counts.values())) == 1,
    'slices of whole hosts need as many devices in every process; they have '
    f'{", ".join(str(n) for _, n in sorted(counts.items()))}',
  )
  return Grid(
    shape=(1, len(places)),
    host=(1, counts[places[0].process]),
    devices=tuple(order),
  )


def _grid(name, places, indices):
  """The grid of one TPU slice; the smallest coordinates become zero."""
  coords = {i: (places[i].core, *places[i].coords) for i in indices}
  at = {coord: i for i, coord in coords.items()}
  low, shape = _bounds(coords.values())
  hosts = {}
  for i in indices:
    hosts.setdefault(places[i].process, []).append(coords[i])
  blocks = {(_bounds(host)[1], len(host)) for host in hosts.values()}
  host, count = min(blocks)
  # Blocks of one shape that fill a grid are aligned in it.
  checks.require(
    len(at) == len(indices) == math.prod(shape)
    and len(blocks) == 1
    and count == math.prod(host),
    f'the {len(indices)} devices of slice {name} are no full grid of equal '
    f'hosts: (cores, *chips) span {shape}, and those of a host '
    f'{", ".join(str(block) for block, _ in sorted(blocks))}',
  )
  inside = itertools.product(*map(range, _flip(shape)))
  devices = tuple(
    at[tuple(x + y for x, y in zip(low, _flip(here), strict=True))]
    for here in inside
  )
  return Grid(shape=shape, host=host, devices=devices)


def _bounds(coords):
  """The smallest coordinates, and the sizes, of what spans `coords`."""
  axes = list(zip(*coords, strict=True))
  low = tuple(map(min, axes))
  return low, tuple(max(x) - y + 1 for x, y in zip(axes, low, strict=True))


def _flip(values):
  return tuple(reversed(values))
