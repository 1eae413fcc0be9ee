"""Counts the collective operations of a compiled program, from its HLO text.

What is counted is the bytes that a chip receives, in one execution, by the
least that an algorithm for the operation needs, for n chips and an array that
has x bytes in all:

  all-gather, reduce-scatter   x (n - 1) / n
  all-reduce                   2 x (n - 1) / n
  all-to-all                   x (n - 1) / n
  collective-permute           x

Operations in a loop count once a trip; of the branches of a conditional, all
count. XLA may write an all-gather as permutations around a ring: the bytes are
the same.
"""

from collections.abc import Iterable
import math
import re
from typing import NamedTuple

_BYTES = {'pred': 1, 'bf16': 2, 'f16': 2}  # Others have their bits in the name.
_HEADER = re.compile(r'(?:ENTRY )?%?(\S+) \(.*\) -> .* \{$')
_INSTRUCTION = re.compile(
  r'\s+(?:ROOT )?%?(\S+) = (\(.*?\)|\S+) ([a-z][\w-]*)\((.*)$'
)
_SHAPE = re.compile(r'([a-z]+\d*\w*)\[([\d,]*)\]')
_CALLED = re.compile(
  r'(?:calls|to_apply|true_computation|false_computation)=%?([\w.-]+)'
)
_BRANCHES = re.compile(
  r'(?:branch_computations|called_computations)=\{([^}]*)\}'
)
KINDS = {
  'all-gather': lambda x, n: x * (n - 1) / n,
  'all-reduce': lambda x, n: 2 * x * (n - 1) / n,
  'reduce-scatter': lambda x, n: x * (n - 1),  # x is what a chip keeps.
  'all-to-all': lambda x, n: x * (n - 1) / n,
  'collective-permute': lambda x, n: x,
}


class Total(NamedTuple):
  """The collectives of one kind in one execution of a program."""

  count: int
  bytes: float  # That a chip receives.


class _Instruction(NamedTuple):
  name: str
  shape: str
  op: str
  rest: str  # Operands and attributes.


class _Collective(NamedTuple):
  kind: str
  bytes: float
  times: int


def count(hlo: str) -> dict[str, Total]:
  """Counts the collectives of a program by kind.

  `hlo` is the text of the compiled program, `compiled.as_text()`.
  """
  computations, entry = _parse(hlo)
  partitions = re.search(r'num_partitions=(\d+)', hlo)
  chips = int(partitions[1]) if partitions else 1
  totals = {}
  for each in _collectives(entry, computations, chips, {}):
    total = totals.get(each.kind, Total(0, 0.0))
    totals[each.kind] = Total(
      total.count + each.times, total.bytes + each.times * each.bytes
    )
  return totals


def _parse(hlo) -> tuple[dict[str, list[_Instruction]], str]:
  """The instructions of every computation by its name, and the entry's name."""
  computations, entry, body = {}, '', []
  for line in re.sub(r'/\*.*?\*/', '', hlo).splitlines():
    if header := _HEADER.match(line):
      body = computations[header[1]] = []
      if line.startswith('ENTRY'):
        entry = header[1]
    elif instruction := _INSTRUCTION.match(line):
      body.append(_Instruction(*instruction.groups()))
  return computations, entry


def _collectives(name, computations, chips, known) -> list[_Collective]:
  """The collectives of one execution of a computation."""
  if name in known:
    return known[name]
  found = []
  for instruction in computations[name]:
    kind = instruction.op.removesuffix('-start')
    if kind in KINDS and not _is_stage(instruction, computations[name]):
      found.append(_collective(kind, name, instruction, chips))
    if instruction.op == 'while':
      body, condition = (
        re.search(rf'{part}=%?([\w.-]+)', instruction.rest)[1]
        for part in ('body', 'condition')
      )
      trips = _trips(instruction, computations[condition])
      found += [
        each._replace(times=trips * each.times)
        for repeated in (body, condition)
        for each in _collectives(repeated, computations, chips, known)
      ]
    for called in _called(instruction):
      found += _collectives(called, computations, chips, known)
  known[name] = found
  return found


def _called(instruction) -> Iterable[str]:
  if instruction.op == 'while':
    return ()
  branches = ','.join(_BRANCHES.findall(instruction.rest))
  names = [name.strip(' %') for name in branches.split(',') if name]
  return [*_CALLED.findall(instruction.rest), *names]


def _is_stage(instruction, computation) -> bool:
  """Whether this continues a collective that another instruction starts.

  TPU names a collective in every fusion that it overlaps, which may be in an
  inner loop.
  """
  return 'async_collective_fusion_config' in instruction.rest and not any(
    '"AsyncCollectiveStart"' in other.rest for other in computation
  )


def _collective(kind, computation, instruction, chips) -> _Collective:
  shapes = [_size(*shape) for shape in _SHAPE.findall(instruction.shape)]
  # The start of an asynchronous one gives its operand, its result, and flags.
  pair = instruction.op == 'all-gather-start' or kind == 'collective-permute'
  size = max(shapes[:2]) if pair and len(shapes) > 1 else sum(shapes)
  group = _group(instruction.rest, chips)
  # TPU's fused reduce-scatter has an all-reduce inside, of which a part is kept.
  if kind == 'all-reduce' and 'all-reduce-scatter' in computation:
    kind, size = 'reduce-scatter', size / group
  return _Collective(kind, KINDS[kind](size, group), times=1)


def _size(dtype: str, dims: str) -> float:
  bits = re.search(r'\d+', dtype)
  size = _BYTES.get(dtype) or int(bits[0]) / 8
  return size * math.prod(int(n) for n in dims.split(',') if n)


def _group(attributes: str, chips: int) -> int:
  """The number of chips of a group.

    {{0,1,2,3},{4,5,6,7}}   [2,4]<=[8]   mesh['a'=2,'b'=4] {'b'}

  All say 4. Of an axis, `'b':(1)2` is a part of size 2.
  """
  if listed := re.search(r'replica_groups=\{\{([\d,]*)\}', attributes):
    return len(listed[1].split(','))
  if iota := re.search(r'replica_groups=\[([\d,]+)\]', attributes):
    return int(iota[1].split(',')[-1])
  if mesh := re.search(r'replica_groups=mesh\[(.*?)\] \{(.*?)\}', attributes):
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh[1]))
    parts = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", mesh[2])
    return math.prod(int(part or sizes[axis]) for axis, part in parts)
  return chips


def _trips(loop, condition: Iterable[_Instruction]) -> int:
  """The trips of a loop; the most, if its condition may end it early.

  XLA says it, or else the condition compares a counter, which starts at 0, with
  a constant: TPU drops what XLA knew. A loop of which neither is true counts once.
  """
  if said := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest):
    return int(said[1])
  return max(_bounds(condition), default=1)


def _bounds(condition) -> list[int]:
  constants = {
    each.name: int(value[1])
    for each in condition
    if each.op == 'constant' and each.shape.startswith(('s32[]', 'u32[]'))
    for value in [re.match(r'(\d+)\)', each.rest)]
    if value
  }
  return [
    constants[name]
    for each in condition
    if 'direction=LT' in each.rest
    for name in re.findall(r'%([\w.-]+)', each.rest.split(')')[0])
    if name in constants
  ]
