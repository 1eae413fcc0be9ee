"""What a policy trains on, before it is packed into arrays for a device."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import NamedTuple

import numpy as np

from mrl_jax import records
from mrl_jax.thl import transfer


class Row(NamedTuple):
  """One response, own or a peer's, in the learner's tokens.

  Attributes:
    prompt: which prompt of the round it answers.
    ids: i32 [T].
    old_logp: f32 [T], of the policy that sampled it, at temperature 1.
    advantage: of the whole response.
    chunk: i32 [T], for ratios over chunks; see `losses/prp.py`.
    mask: bool [T], the tokens that are trained on.
  """

  prompt: int
  ids: np.ndarray
  old_logp: np.ndarray
  advantage: float
  chunk: np.ndarray
  mask: np.ndarray


def own_row(prompt: int, rollout: records.Rollout, advantage: float) -> Row:
  """A rollout of the learner itself: the sampled ids, each its own chunk."""
  chunk = np.arange(len(rollout.ids), dtype=np.int32)
  return Row(
    prompt, rollout.ids, rollout.policy_logp, advantage, chunk, rollout.mask
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lesson:
  """What a policy learns from in one round.

  Attributes:
    own, peer: rows by where they come from.
    residuals: what THL could not carry, by sender.
    peer_records: of peers, that were about this round's prompts.
    peer_records_unused: of peers, that were about others.
  """

  own: Sequence[Row]
  peer: Sequence[Row]
  residuals: Mapping[str, transfer.Residual]
  peer_records: int
  peer_records_unused: int
