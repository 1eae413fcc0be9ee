"""Rows to train on, before they are packed into arrays for a device."""

from typing import NamedTuple

import numpy as np

from mrl_jax import records


class Row(NamedTuple):
  """One response, own or a peer's, in the learner's tokens.

  Attributes:
    prompt: which prompt of the round it answers.
    ids: i32 [T].
    old_logp: f32 [T], of the policy that sampled it, at temperature 1.
    advantage: of the whole response.
    chunk: i32 [T], for ratios over chunks; see `losses/prp.py`.
  """

  prompt: int
  ids: np.ndarray
  old_logp: np.ndarray
  advantage: float
  chunk: np.ndarray


def own(prompt: int, rollout: records.Rollout, advantage: float) -> Row:
  """A rollout of the learner itself: the sampled ids, each its own chunk."""
  chunk = np.arange(len(rollout.ids), dtype=np.int32)
  return Row(prompt, rollout.ids, rollout.policy_logp, advantage, chunk)
