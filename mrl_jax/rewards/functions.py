"""Reward functions, and their weighted sum."""

from collections.abc import Callable, Mapping
import functools

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


# (payload, finish, gold answer) -> (reward, verdict)
Judge = Callable[[bytes, records.Finish, str], tuple[float, records.Verdict]]


def build(config) -> Judge:
  """The function that judges completions, from `config.reward`."""
  weights = {
    checks.choose(name, REWARDS, 'reward'): weight
    for name, weight in config.weights.items()
  }
  return functools.partial(judge, marker=config.marker, weights=weights)


def overlong_penalty(length: int, longest: int, buffer: int) -> float:
  """DAPO's soft punishment of long completions, between -1 and 0.

    0 up to longest - buffer, then falling linearly to -1 at `longest`

  https://arxiv.org/abs/2503.14476, eq. 13. All are numbers of tokens; without
  a buffer there is no punishment.
  """
  if not buffer:
    return 0.0
  return -min(max(length - (longest - buffer), 0) / buffer, 1.0)


def judge(
  payload: bytes,
  finish: records.Finish,
  gold: str,
  marker: str,
  weights: Mapping[Callable, float],
) -> tuple[float, records.Verdict]:
  """The reward of a completion, and the verdict on its answer.

  A completion that was cut off has given no answer.

  Args:
    payload: its bytes; invalid UTF-8 is replaced.
    finish: whether it ended by itself.
    gold: the right answer.
    marker: what the answer stands behind.
    weights: of each reward function.
  """
  verdict = 'unparsable'
  if finish == 'stop':
    text = payload.decode('utf-8', errors='replace')
    verdict = verify.verify(text, gold, marker)
  reward = sum(weight * reward(verdict) for reward, weight in weights.items())
  return float(reward), verdict
