"""Reward functions, and their weighted sum."""

from collections.abc import Mapping

from mrl_jax import checks
from mrl_jax import records
from mrl_jax.rewards import verify


def exact(verdict: records.Verdict) -> float:
  """1 if the answer is right."""
  return float(verdict == 'correct')


def format(verdict: records.Verdict) -> float:
  """1 if the completion ends by itself, with an answer behind the marker."""
  return float(verdict != 'unparsable')


REWARDS = {'exact': exact, 'format': format}


def judge(
  payload: bytes,
  finish: records.Finish,
  gold: str,
  marker: str,
  weights: Mapping[str, float],
) -> tuple[float, records.Verdict]:
  """The reward of a completion, and the verdict on its answer.

  A completion that was cut off has given no answer.

  Args:
    payload: its bytes; those that are no UTF-8 are replaced for reading.
    finish: whether it ended by itself.
    gold: the right answer.
    marker: what the answer stands behind.
    weights: of each reward function, by its name in `REWARDS`.
  """
  verdict = 'unparsable'
  if finish == 'stop':
    text = payload.decode('utf-8', errors='replace')
    verdict = verify.verify(text, gold, marker)
  reward = sum(
    weight * checks.choose(name, REWARDS, 'reward')(verdict)
    for name, weight in weights.items()
  )
  return float(reward), verdict
