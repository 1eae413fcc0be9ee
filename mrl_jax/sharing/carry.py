"""Peers' rollouts in the learner's tokens, through THL."""

from collections.abc import Sequence
from typing import NamedTuple

from mrl_jax import records
from mrl_jax.sharing import lesson
from mrl_jax.thl import transfer


class Selected(NamedTuple):
  """A rollout of a peer that was selected, with its advantage."""

  prompt: int
  rollout: records.Rollout
  advantage: float


def rows(
  selected: Sequence[Selected], learner: lesson.Learner
) -> tuple[list[tuple[lesson.Row, records.Rollout]], lesson.Carried]:
  """A row for each rollout that THL carries, and the rollout itself.

  Their denominators are the peer's own log-probabilities, on the learner's
  tokens. The second result has these rows, and the residual of each sender.
  """
  carried, residuals = [], {}
  for prompt, rollout, advantage in selected:
    residual = residuals.setdefault(rollout.header.policy, transfer.Residual())
    moved = transfer.transfer(
      rollout, learner.tokenizer, learner.limits, residual
    )
    if moved is not None:
      row = lesson.Row(
        prompt,
        moved.ids,
        moved.behaviour_logp,
        advantage,
        moved.chunk,
        moved.mask,
      )
      carried.append((row, rollout))
  return carried, lesson.Carried(
    rows=[row for row, _ in carried], residuals=residuals
  )
