"""What a policy trains on, before it is packed into arrays for a device."""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import NamedTuple

import numpy as np

from mrl_jax import records
from mrl_jax.thl import byte_tokenizer
from mrl_jax.thl import transfer


class Row(NamedTuple):
  """One response, own or a peer's, in the learner's tokens.

  Attributes:
    prompt: which prompt of the round it answers.
    ids: i32 [T].
    old_logp: f32 [T], the denominators of its ratios.
    advantage: of the whole response.
    chunk: i32 [T], for ratios over chunks; see `losses/prp.py`.
    mask: bool [T], the tokens that are trained on.
    weight: of its tokens in the loss, beside what averages them; a number, or
      f32 [T].
    reference_logp: f32 [T], of the reference policy, where there is one.
  """

  prompt: int
  ids: np.ndarray
  old_logp: np.ndarray
  advantage: float
  chunk: np.ndarray
  mask: np.ndarray
  weight: float | np.ndarray = 1.0
  reference_logp: np.ndarray | None = None


def own_row(prompt: int, rollout: records.Rollout, advantage: float) -> Row:
  """A rollout of the learner itself: the sampled ids, each its own chunk."""
  chunk = np.arange(len(rollout.ids), dtype=np.int32)
  return Row(
    prompt, rollout.ids, rollout.policy_logp, advantage, chunk, rollout.mask
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learner:
  """What a policy brings to a lesson.

  Attributes:
    tokenizer: its vocabulary.
    limits: what it takes of peers' rollouts.
    judge: the reward of a rollout and the verdict on it, by its own rules,
      whatever its sender says: (prompt of the round, rollout) -> pair.
    verify: whether a text that ended by itself is right: (prompt, payload) ->
      bool.
    score: the log-probabilities that it now gives to the tokens of rows, each
      f32 [T]: (rows) -> list; with `reference`, as it gave them at first.
    rng: of what it draws in this round.
    ratios: w(k, j) of `capability.ratios`, by policy.
    refused: counts what it did not take of peers, or did not believe, by
      reason.
  """

  tokenizer: byte_tokenizer.ByteTokenizer
  limits: transfer.Limits
  judge: Callable[[int, records.Rollout], tuple[float, records.Verdict]]
  verify: Callable[[int, bytes], bool]
  score: Callable[..., list[np.ndarray]]
  rng: np.random.Generator
  ratios: Mapping[str, float]
  refused: collections.Counter = dataclasses.field(
    default_factory=collections.Counter
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Carried:
  """Peers' responses in the learner's tokens.

  Attributes:
    rows: to train on.
    residuals: what THL could not carry, by sender.
    metrics: what else there is to say of how they were taken, by name, nested.
  """

  rows: Sequence[Row] = ()
  residuals: Mapping[str, transfer.Residual] = dataclasses.field(
    default_factory=dict
  )
  metrics: Mapping = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lesson:
  """What a policy learns from in one round.

  Attributes:
    own, peer: rows by where they come from.
    order: prompts of the round that are trained on, in this order.
    residuals: what THL could not carry, by sender.
    metrics: what else there is to say of how the lesson came about, nested.
    peer_records: of peers, that were about this round's prompts.
    peer_records_unused: of peers, that were about others, or older than others
      of the same peer and prompt.
  """

  own: Sequence[Row]
  peer: Sequence[Row]
  order: Sequence[int]
  residuals: Mapping[str, transfer.Residual]
  metrics: Mapping
  peer_records: int
  peer_records_unused: int
