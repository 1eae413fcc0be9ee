"""Packs rows into the arrays of an update."""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import math

import numpy as np

from mrl_jax.sharing import lesson as lesson_lib
from mrl_jax.update import update

# The weight of each token that is trained on, of a row with `length` of them,
# in a mini-batch of `rows` rows and `tokens` such tokens. A policy's own
# samples have at most `longest` tokens; a peer's response may have more. The
# weights contain the average, so that a loss is a plain sum.
AGGREGATIONS = {
  # All tokens alike: DAPO, 2503.14476, eq. 8.
  'token_mean': lambda length, rows, tokens, longest: 1 / tokens,
  # All responses alike: GRPO, 2402.03300, eq. 3.
  'sequence_mean': lambda length, rows, tokens, longest: 1 / (rows * length),
  # All tokens alike, whatever their number: Dr. GRPO, 2503.20783.
  'constant': lambda length, rows, tokens, longest: 1 / (rows * longest),
}


# The same of peers' rows, where they are averaged by themselves: SGT.
PEER_AVERAGES = {
  # Together with the policy's own rows, by `AGGREGATIONS`.
  'joint': None,
  # Means of responses, over all prompts of the mini-batch.
  'prompts': lambda length, rows, prompts: 1 / (prompts * length),
  # Means of responses, over those that peers gave.
  'rows': lambda length, rows, prompts: 1 / (rows * length),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packer:
  """The shapes that rows are packed into.

  Attributes:
    context: C, prompt positions.
    lengths: T, response positions, of each part. Peers' rollouts may be longer
      in the learner's tokens than its own can be.
    multiple: row counts are rounded up to a multiple of it, to bound the
      number of shapes that are compiled; the mesh must divide it.
    micro_rows: the most rows in a micro-batch, a multiple of `multiple`.
    mini_batches: updates a round.
    aggregation: a name in `AGGREGATIONS`.
    peer_average: a name in `PEER_AVERAGES`.
    keep_all: whether rows of zero advantage have a gradient too, from a KL
      penalty or an entropy bonus.
    reference: whether rows have log-probabilities of a reference policy.
  """

  context: int
  lengths: Mapping[str, int]
  multiple: int
  micro_rows: int
  mini_batches: int
  aggregation: str
  peer_average: str = 'joint'
  keep_all: bool = False
  reference: bool = False

  def mini_batch_parts(
    self, prompt_ids: Sequence[np.ndarray], lesson: lesson_lib.Lesson
  ) -> list[dict[str, update.Rows]]:
    """The parts of every mini-batch; a prompt's rows stay together.

    Prompts are taken in the lesson's order. Rows that have no gradient are left
    out, and counted in the weights of the others: of zero advantage (unless
    `keep_all`), of zero weight, or with every token masked.
    """
    place = {prompt: i for i, prompt in enumerate(lesson.order)}

    def of_mini_batch(rows, m):
      return [
        r
        for r in rows
        if place[r.prompt] * self.mini_batches // len(place) == m
      ]

    return [
      self._weigh_and_pack(
        prompt_ids,
        of_mini_batch(lesson.own, m),
        of_mini_batch(lesson.peer, m),
        m,
      )
      for m in range(self.mini_batches)
    ]

  def _weigh_and_pack(self, prompt_ids, own, peer, m):
    prompts = len({row.prompt for row in (*own, *peer)})
    joint = self.peer_average == 'joint'
    lengths = [_trained(row) for row in ((*own, *peer) if joint else own)]
    own_weight = functools.partial(
      AGGREGATIONS[self.aggregation],
      rows=len(lengths),
      tokens=sum(lengths),
      longest=self.lengths['own'],
    )
    peer_weight = own_weight
    if not joint:
      peer_weight = functools.partial(
        PEER_AVERAGES[self.peer_average], rows=len(peer), prompts=prompts
      )
    packed = {}
    for name, rows, weight in (
      ('own', own, own_weight),
      ('peer', peer, peer_weight),
    ):
      live = [
        (r, weight(_trained(r)))
        for r in rows
        if (r.advantage or (self.keep_all and name == 'own'))
        and _trained(r)
        and np.any(r.weight)
      ]
      if live or name == 'own':  # An update without signal is still a step.
        packed[name] = self.pack(prompt_ids, live, self.lengths[name], m)
    return packed

  def pack(
    self,
    prompt_ids: Sequence[np.ndarray],
    weighed: Sequence[tuple[lesson_lib.Row, float]],
    length: int,
    mini_batch: int = 0,
  ) -> update.Rows:
    """Pads rows, each with the weight of its tokens, to micro-batches.

    Args:
      prompt_ids: of every prompt of the round.
      weighed: rows, and what averages the tokens of each.
      length: T, response positions.
      mini_batch: which of the round they are for.
    """
    size = max(1, math.ceil(len(weighed) / self.multiple)) * self.multiple
    if size > self.micro_rows:
      size = math.ceil(size / self.micro_rows) * self.micro_rows
    slots = self.context + length
    tokens_BS = np.zeros((size, slots), np.int32)
    valid_BS = np.zeros((size, slots), bool)
    old_logp_BT = np.zeros((size, length), np.float32)
    weight_BT = np.zeros((size, length), np.float32)
    advantage_B1 = np.zeros((size, 1), np.float32)
    chunk_BT = np.zeros((size, length), np.int32)
    mask_BT = np.zeros((size, length), bool)
    reference_logp_BT = np.zeros((size, length), np.float32)
    for b, (row, weight) in enumerate(weighed):
      prompt, n = prompt_ids[row.prompt], len(row.ids)
      tokens_BS[b, self.context - len(prompt) : self.context] = prompt
      tokens_BS[b, self.context : self.context + n] = row.ids
      valid_BS[b, self.context - len(prompt) : self.context + n] = True
      old_logp_BT[b, :n] = row.old_logp
      weight_BT[b, :n] = weight * row.weight * row.mask
      advantage_B1[b] = row.advantage
      chunk_BT[b, :n] = row.chunk
      mask_BT[b, :n] = row.mask
      if row.reference_logp is not None:
        reference_logp_BT[b, :n] = row.reference_logp

    def by_micro(x):
      return x.reshape(-1, min(size, self.micro_rows), x.shape[1])

    return update.Rows(
      tokens_BS=by_micro(tokens_BS),
      valid_BS=by_micro(valid_BS),
      old_logp_BT=by_micro(old_logp_BT),
      advantage_B1=by_micro(advantage_B1),
      weight_BT=by_micro(weight_BT),
      mask_BT=by_micro(mask_BT),
      chunk_BT=by_micro(chunk_BT),
      mini_batch_B1=by_micro(np.full((size, 1), mini_batch, np.float32)),
      reference_logp_BT=by_micro(reference_logp_BT) if self.reference else None,
    )


def _trained(row: lesson_lib.Row) -> int:
  """How many of a row's tokens are trained on."""
  return int(np.count_nonzero(row.mask))
