"""Packs training rows into the arrays of an update.

Responses have uneven lengths. Rows, each a prompt and its response, are put one
after the other into packed rows of a fixed number of slots, and packed rows are
cut into micro-batches of few sizes. So programs are compiled for few shapes, and
most of their slots have a token.
"""

import bisect
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools

import jax
import ml_collections
import numpy as np

from mrl_jax.mwra import sizes as sizes_lib
from mrl_jax.sharing import rows as rows_lib
from mrl_jax.update import objectives

# The averaging weight of each trained token of a row that has `length` such
# tokens, in an average over `rows` rows with `tokens` such tokens. A policy's own
# samples have at most `longest` tokens (a peer's response may have more), and
# `prompts` prompts have rows in the mini-batch. The weights contain the average,
# so that a loss is a plain sum.
AGGREGATIONS = {
  # A mean over all tokens: DAPO, 2503.14476, eq. 8.
  'token_mean': lambda length, tokens, **_: 1 / tokens,
  # A mean over responses of their token means: GRPO, 2402.03300, eq. 3.
  'sequence_mean': lambda length, rows, **_: 1 / (rows * length),
  # A sum over tokens by a constant: Dr. GRPO, 2503.20783.
  'constant': lambda length, rows, longest, **_: 1 / (rows * longest),
}

# The same for peers' rows, if they are averaged by themselves: SGT.
PEER_AVERAGES = {
  # Together with the policy's own rows, by `AGGREGATIONS`.
  'joint': None,
  # Token means of responses, over all prompts of the mini-batch.
  'prompts': lambda length, prompts, **_: 1 / (prompts * length),
  # Token means of responses, over the peers' rows of the mini-batch.
  'rows': AGGREGATIONS['sequence_mean'],
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packer:
  """The shapes that rows are packed into, and how their tokens are averaged."""

  context: int  # C, prompt positions.
  # T, response positions, of 'own' and of 'peer' rows: a peer's response may be
  # longer in the learner's tokens than its own can be.
  lengths: Mapping[str, int]
  train: ml_collections.ConfigDict  # `config.train`
  ways: int = 1  # Devices that rows are sharded over; divides micro-batches.
  peer_average: str = 'joint'  # A name in `PEER_AVERAGES`.
  # Whether own rows of zero advantage have a gradient too, from a KL penalty or
  # an entropy bonus.
  keep_all: bool = False
  reference: bool = False  # Whether rows have a reference's log-probabilities.

  def mini_batch_parts(
    self, prompt_ids: Sequence[np.ndarray], batch: rows_lib.Batch
  ) -> list[dict[str, list[objectives.PackedRows]]]:
    """Packs own and peer rows of every mini-batch into micro-batches.

    Prompts are taken in the order of the batch; the rows of a prompt stay
    together. Rows without gradient are not packed, but still count in the
    average: rows of zero advantage (unless `keep_all`), of zero weight, or with
    every token masked.
    """
    count = self.train.mini_batches
    mini_batch = {  # By prompt.
      prompt: i * count // len(batch.order)
      for i, prompt in enumerate(batch.order)
    }
    return [
      self._weigh_and_pack(
        prompt_ids,
        [row for row in batch.own if mini_batch[row.prompt] == m],
        [row for row in batch.peer if mini_batch[row.prompt] == m],
        m,
      )
      for m in range(count)
    ]

  def _weigh_and_pack(self, prompt_ids, own, peer, m):
    every, aggregate = [*own, *peer], AGGREGATIONS[self.train.aggregation]
    average, packed = PEER_AVERAGES[self.peer_average], {}
    # The rows to pack, the rows that they are averaged with, and the weight.
    for name, rows, averaged, weight in (
      ('own', own, own if average else every, aggregate),
      ('peer', peer, peer if average else every, average or aggregate),
    ):
      lengths = [_trained(row) for row in averaged]
      weight = functools.partial(
        weight,
        rows=len(lengths),
        tokens=sum(lengths),
        longest=self.lengths['own'],
        prompts=len({row.prompt for row in every}),
      )
      live = [
        (row, weight(_trained(row)))
        for row in rows
        if (row.advantage or (self.keep_all and name == 'own'))
        and _trained(row)
        and np.any(row.weight)
      ]
      if live or name == 'own':  # An update without signal is still a step.
        packed[name] = self.pack(prompt_ids, live, name, m)
    return packed

  def pack(
    self,
    prompt_ids: Sequence[np.ndarray],
    weighed: Sequence[tuple[rows_lib.Row, float]],
    part: str,
    mini_batch: int = 0,
  ) -> list[objectives.PackedRows]:
    """Packs rows into micro-batches; see `objectives.PackedRows`.

    `weighed` has rows and the averaging weight of the tokens of each, `part` is
    'own' or 'peer', and `mini_batch` the index of their mini-batch in the round.
    """
    slots = self.slots(part)
    places = self._places(prompt_ids, [row for row, _ in weighed], part)
    sizes = self._sizes(1 + max((b for b, _ in places), default=-1))
    arrays = {
      name: np.zeros((sum(sizes), width), dtype)
      for name, (width, dtype) in self._columns(slots).items()
    }
    arrays['mini_batch_B1'][:] = mini_batch
    ids = np.zeros(sum(sizes), np.int32)
    placed = zip(places, weighed, strict=True)
    for (b, first), (row, weight) in sorted(placed, key=lambda pair: pair[0]):
      prompt = prompt_ids[row.prompt]
      start, end = first + len(prompt), first + len(prompt) + len(row.ids)
      ids[b] += 1
      arrays['row_BS'][b, first:end] = ids[b]
      arrays['tokens_BS'][b, first:start] = prompt
      for name, values in (
        ('tokens', row.ids),
        ('old_logp', row.old_logp),
        ('advantage', row.advantage),
        ('weight', weight * row.weight * row.mask),
        ('mask', row.mask),
        ('chunk', start + row.chunk),
      ):
        arrays[f'{name}_BS'][b, start:end] = values
      if self.reference and row.reference_logp is not None:
        arrays['reference_logp_BS'][b, start:end] = row.reference_logp
    return [
      objectives.PackedRows(
        **{name: x[end - size : end] for name, x in arrays.items()}
      )
      for size, end in zip(sizes, np.cumsum(sizes), strict=True)
    ]

  def unpack(
    self,
    prompt_ids: Sequence[np.ndarray],
    rows: Sequence[rows_lib.Row],
    part: str,
    values: Sequence[np.ndarray],
  ) -> list[np.ndarray]:
    """The values [T] of each row's response, of all its packed rows' [B, S]."""
    values_BS, found = np.concatenate(values), []
    places = self._places(prompt_ids, rows, part)
    for (b, first), row in zip(places, rows, strict=True):
      start = first + len(prompt_ids[row.prompt])
      found.append(values_BS[b, start : start + len(row.ids)])
    return found

  def slots(self, part: str) -> int:
    """S, the slots of a packed row of a part: the longest row fits."""
    longest = self.context + self.lengths[part]
    return sizes_lib.packed_slots(longest, self.train.packed_tokens)

  def part(
    self, prompt_ids: Sequence[np.ndarray], rows: Iterable[rows_lib.Row]
  ) -> str:
    """The part with the shortest packed rows that all of the rows fit in."""
    longest = max(len(prompt_ids[row.prompt]) + len(row.ids) for row in rows)
    fits = [part for part in self.lengths if self.slots(part) >= longest]
    return min(fits, key=self.slots)

  def most(self, count: int, part: str) -> list[int]:
    """The sizes of micro-batches of so many rows that are all of full length."""
    each = self.slots(part) // (self.context + self.lengths[part])
    return self._sizes(max(1, -(-count // each)))

  def abstract(
    self,
    size: int,
    part: str,
    place: jax.sharding.Sharding | None = None,
  ) -> objectives.PackedRows:
    """The shapes and dtypes of a micro-batch of this size, and its sharding."""
    columns = self._columns(self.slots(part))
    return objectives.PackedRows(
      **{
        name: jax.ShapeDtypeStruct((size, width), dtype, sharding=place)
        for name, (width, dtype) in columns.items()
      }
    )

  def _places(self, prompt_ids, rows, part):
    """The packed row, and the slot, at which each row begins."""
    lengths = [len(prompt_ids[row.prompt]) + len(row.ids) for row in rows]
    return places(lengths, self.slots(part))

  def _sizes(self, count) -> list[int]:
    """The sizes of the micro-batches that so many packed rows are cut into.

    With sizes 16 and 4, as little padding as possible, and then as few
    micro-batches:

      23 packed rows  ->  16 4 4
    """
    micro, *smaller = self.sizes
    if not smaller:
      return [micro] * -(-count // micro)
    whole, left = divmod(count, micro)
    small = -(-left // smaller[0])
    if small * smaller[0] == micro:
      whole, small = whole + 1, 0
    return [micro] * whole + smaller * small

  @property
  def sizes(self) -> list[int]:
    """The sizes that micro-batches may have: `train.micro_rows`, and a part of it.

    It is a quarter or a half, if that is a multiple of the devices.
    """
    micro = self.train.micro_rows
    parts = [micro // k for k in (4, 2) if micro % (k * self.ways) == 0]
    return [micro, *parts[:1]]

  def _columns(self, slots) -> dict[str, tuple[int, type]]:
    """The second dimension and the dtype of every array."""
    columns = {
      'tokens_BS': (slots, np.int32),
      'row_BS': (slots, np.int32),
      'old_logp_BS': (slots, np.float32),
      'advantage_BS': (slots, np.float32),
      'weight_BS': (slots, np.float32),
      'mask_BS': (slots, bool),
      'chunk_BS': (slots, np.int32),
      'mini_batch_B1': (1, np.float32),
    }
    if self.reference:
      columns['reference_logp_BS'] = (slots, np.float32)
    return columns


def places(lengths: Sequence[int], slots: int) -> list[tuple[int, int]]:
  """The packed row, and the first slot, of rows with these lengths.

  Best-fit decreasing: the longest row first, each goes where the least room is
  left that it fits in. With four slots:

    lengths 1 2 3 2  ->  places (0, 3) (1, 0) (0, 0) (1, 2)
  """
  found, free, count = [(0, 0)] * len(lengths), [], 0
  for i in np.argsort([-n for n in lengths], kind='stable').tolist():
    length = lengths[i]
    fit = bisect.bisect_left(free, (length,))
    if fit < len(free):
      room, b = free.pop(fit)
    else:
      room, b, count = slots, count, count + 1
    found[i] = b, slots - room
    bisect.insort(free, (room - length, b))
  return found


def real_slots(
  mini_batches: Iterable[Mapping[str, Sequence[objectives.PackedRows]]],
) -> dict[str, float]:
  """The share of slots that have a token, by part."""
  real, every = {}, {}
  for parts in mini_batches:
    for part, micro_batches in parts.items():
      for rows in micro_batches:
        tokens = int(np.count_nonzero(rows.row_BS))
        real[part] = real.get(part, 0) + tokens
        every[part] = every.get(part, 0) + rows.row_BS.size
  return {part: real[part] / size for part, size in every.items()}


def _trained(row: rows_lib.Row) -> int:
  return int(np.count_nonzero(row.mask))
