"""Packs training rows into the arrays of an update."""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import math

import jax
import ml_collections
import numpy as np

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
  peer_average: str = 'joint'  # A name in `PEER_AVERAGES`.
  # Whether own rows of zero advantage have a gradient too, from a KL penalty or
  # an entropy bonus.
  keep_all: bool = False
  reference: bool = False  # Whether rows have a reference's log-probabilities.

  def mini_batch_parts(
    self, prompt_ids: Sequence[np.ndarray], batch: rows_lib.Batch
  ) -> list[dict[str, objectives.PackedRows]]:
    """Packs own and peer rows of every mini-batch.

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
        packed[name] = self.pack(prompt_ids, live, self.lengths[name], m)
    return packed

  def pack(
    self,
    prompt_ids: Sequence[np.ndarray],
    weighed: Sequence[tuple[rows_lib.Row, float]],
    length: int,
    mini_batch: int = 0,
  ) -> objectives.PackedRows:
    """Pads rows into stacked micro-batches.

    With C = 3 and T = 4, the prompt [5, 6] and the response [7, 8, 0]:

      tokens_BS  0 5 6 7 8 0 0      valid_BS  0 1 1 1 1 1 0

    `weighed` has rows and the averaging weight of the tokens of each, `length`
    is T, and `mini_batch` the index of their mini-batch in the round.
    """
    size = self._size(len(weighed))
    arrays = {
      name: np.zeros((size, width), dtype)
      for name, (width, dtype) in self._columns(length).items()
    }
    arrays['mini_batch_B1'][:] = mini_batch
    for b, (row, weight) in enumerate(weighed):
      prompt, n = prompt_ids[row.prompt], len(row.ids)
      first = self.context - len(prompt)
      arrays['tokens_BS'][b, first : self.context] = prompt
      arrays['tokens_BS'][b, self.context : self.context + n] = row.ids
      arrays['valid_BS'][b, first : self.context + n] = True
      arrays['old_logp_BT'][b, :n] = row.old_logp
      arrays['advantage_B1'][b] = row.advantage
      arrays['weight_BT'][b, :n] = weight * row.weight * row.mask
      arrays['mask_BT'][b, :n] = row.mask
      arrays['chunk_BT'][b, :n] = row.chunk
      if self.reference and row.reference_logp is not None:
        arrays['reference_logp_BT'][b, :n] = row.reference_logp
    micro = self.train.micro_rows
    return objectives.PackedRows(
      **{
        name: x.reshape(-1, min(len(x), micro), x.shape[1])
        for name, x in arrays.items()
      }
    )

  def abstract(self, count: int, length: int) -> objectives.PackedRows:
    """Shapes and dtypes of what `pack` makes of `count` rows."""
    size = self._size(count)
    micro = min(size, self.train.micro_rows)
    return objectives.PackedRows(
      **{
        name: jax.ShapeDtypeStruct((size // micro, micro, width), dtype)
        for name, (width, dtype) in self._columns(length).items()
      }
    )

  def _size(self, count) -> int:
    """The rows that `count` are padded to: few sizes, so few compilations."""
    multiple, micro = self.train.row_multiple, self.train.micro_rows
    size = max(1, math.ceil(count / multiple)) * multiple
    return math.ceil(size / micro) * micro if size > micro else size

  def _columns(self, length) -> dict[str, tuple[int, type]]:
    """The second dimension and the dtype of every array."""
    columns = {
      'tokens_BS': (self.context + length, np.int32),
      'valid_BS': (self.context + length, bool),
      'old_logp_BT': (length, np.float32),
      'advantage_B1': (1, np.float32),
      'weight_BT': (length, np.float32),
      'mask_BT': (length, bool),
      'chunk_BT': (length, np.int32),
      'mini_batch_B1': (1, np.float32),
    }
    if self.reference:
      columns['reference_logp_BT'] = (length, np.float32)
    return columns


def _trained(row: rows_lib.Row) -> int:
  return int(np.count_nonzero(row.mask))
