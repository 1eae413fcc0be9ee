"""Gives every policy a slice: disjoint boxes with the least makespan."""

import bisect
from collections.abc import Mapping
import heapq
import itertools

from mrl_jax import checks
from mrl_jax.mwra import topology as topology_lib
from mrl_jax.mwra.topology import Box

# Bounds on the search, in overlap tests of two boxes: for one assignment of
# sizes, and for all assignments of one makespan.
_TESTS = 50_000
_MAKESPAN_TESTS = 1_500_000
_ASSIGNMENT = 200  # What an assignment costs besides, in tests.


def carve(
  topology: topology_lib.Topology, seconds: Mapping[str, Mapping[int, float]]
) -> dict[str, Box]:
  """Chooses the box of every policy.

  Minimises the makespan, the largest time of a policy; then the number of
  devices in all. A makespan admits for each policy the sizes that meet it.
  Assignments of admitted sizes are tried by increasing number of devices; each
  places the largest box first, with backtracking. The least makespan is found
  by bisection, as a longer one admits all that a shorter one does.

  The search is exact while it is exhaustive: tests compare it with brute force
  for up to four policies on up to 20 devices. Beyond its bounds an assignment
  counts as impossible, and the next one is tried: the result is valid, but a
  shorter makespan, or fewer devices, could exist. For eight policies on 1,024
  chips, with times inversely proportional to their devices, makespans were 1%
  (at most 5%) above a bound that ignores the form of slices.

  Args:
    topology: all devices.
    seconds: for every policy, the estimated time of its round by number of
      devices, for those numbers on which it fits in memory. Numbers that no box
      has are ignored.

  Raises InputError if the policies cannot all be placed.
  """
  possible = set(topology.sizes())
  for name, times in seconds.items():
    checks.require(
      not possible.isdisjoint(times),
      f'policy {name} fits in memory on {_list(times)} devices; slices of this '
      f'fleet have {_list(possible)}',
    )
  seconds = {
    name: {n: t for n, t in sorted(times.items()) if n in possible}
    for name, times in seconds.items()
  }
  search = _Search(topology)
  makespans = sorted({t for times in seconds.values() for t in times.values()})
  found = {}

  def fits(makespan):
    found[makespan] = search.assign(
      [
        [n for n, t in times.items() if t <= makespan]
        for times in seconds.values()
      ]
    )
    return found[makespan] is not None

  i = bisect.bisect_left(makespans, True, key=fits)
  if i == len(makespans):
    raise checks.InputError(_no_room(topology, seconds))
  return dict(zip(seconds, found[makespans[i]], strict=True))


class _Search:
  """Places boxes of given sizes, and remembers which sizes it has tried."""

  def __init__(self, topology):
    self._topology = topology
    lengths = [len(grid.devices) for grid in topology.grids]
    self._offsets = [0, *itertools.accumulate(lengths)]
    self._table = {}  # By number of devices.
    self._shapes = {}  # Bits by grid and shape, at the origin.
    self._placed = {}  # By sizes in decreasing order.

  def assign(self, admitted):
    """Boxes of the fewest devices in all; one list of sizes for each policy."""
    if not all(admitted):
      return None
    budget = _MAKESPAN_TESTS
    first = (0,) * len(admitted)
    # Each choice is reached once: from the one in which its last index that is
    # not zero is less by one.
    queue = [(sum(sizes[0] for sizes in admitted), first)]
    while queue and budget > 0:
      total, choice = heapq.heappop(queue)
      if total > self._topology.size:
        return None
      sizes = [sizes[i] for sizes, i in zip(admitted, choice, strict=True)]
      order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
      boxes, tests = self._place(tuple(sizes[i] for i in order))
      if boxes:
        return [boxes[order.index(i)] for i in range(len(sizes))]
      budget -= tests + _ASSIGNMENT
      last = max((i for i, index in enumerate(choice) if index), default=0)
      for i in range(last, len(choice)):
        if choice[i] + 1 < len(admitted[i]):
          more = admitted[i][choice[i] + 1] - sizes[i]
          following = (*choice[:i], choice[i] + 1, *choice[i + 1 :])
          heapq.heappush(queue, (total + more, following))
    return None

  def _place(self, sizes):
    """Disjoint boxes of decreasing `sizes` or None, and the tests it took.

    Backtracking first changes shapes only, each at the first place where it
    fits, and then also places: most packings are found by the shapes.
    """
    if sizes in self._placed:
      return self._placed[sizes], 0
    tables = [self._boxes(n) for n in sizes]
    chosen, tests = [], 0

    def extend(taken, thorough):
      nonlocal tests
      i = len(chosen)
      if i == len(sizes):
        return True
      _, bits, following = tables[i]
      # Boxes of equal size are interchangeable, so they go in one order only.
      j = chosen[-1] + 1 if i and sizes[i] == sizes[i - 1] else 0
      while j < len(bits) and tests < limit:
        tests += 1
        if bits[j] & taken:
          j += 1
          continue
        chosen.append(j)
        if extend(taken | bits[j], thorough):
          return True
        chosen.pop()
        j = j + 1 if thorough else following[j]
      return False

    limit = _TESTS
    done = extend(0, thorough=False)
    if not done:
      limit = tests + _TESTS
      done = extend(0, thorough=True)
    pairs = zip(tables, chosen, strict=done)  # Without success, none is chosen.
    self._placed[sizes] = [boxes[j] for (boxes, *_), j in pairs] or None
    return self._placed[sizes], tests

  def _boxes(self, n):
    """All boxes of `n` devices; of each, its devices as bits, and the index of
    the first box after it that has another shape.
    """
    if n not in self._table:
      boxes = self._topology.boxes(n)
      shapes = itertools.groupby(boxes, lambda box: (box.grid, box.shape))
      lengths = [len(list(group)) for _, group in shapes]
      following = []
      for length in lengths:
        following += [len(following) + length] * length
      self._table[n] = boxes, [self._bits(box) for box in boxes], following
    return self._table[n]

  def _bits(self, box):
    """A box's bits are those of its shape at the origin, shifted."""
    grid = self._topology.grids[box.grid]
    if (box.grid, box.shape) not in self._shapes:
      inside = itertools.product(*map(range, box.shape))
      bits = sum(1 << grid.index(coords) for coords in inside)
      self._shapes[box.grid, box.shape] = bits << self._offsets[box.grid]
    return self._shapes[box.grid, box.shape] << grid.index(box.start)


def _no_room(topology, seconds):
  least = {name: min(times) for name, times in seconds.items()}
  total = sum(least.values())
  needs = ', '.join(f'{name} at least {n}' for name, n in least.items())
  if total > topology.size:
    change = f'Use {total} devices or more'
  else:
    change = (
      'Slices are rectangular, and either inside one host or of whole hosts, '
      'and no such slices were found. Use a larger topology'
    )
  return (
    f'{len(least)} policies do not fit on {topology.size} devices: {needs}. '
    f'{change}, or let policies take turns on them with '
    '--config.mwra.time_share=True'
  )


def _list(sizes):
  return ', '.join(map(str, sorted(sizes))) or 'no number of'
