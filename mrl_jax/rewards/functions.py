"""Reward functions: a batch of completions in, a number for each out.

A new reward is a function here and a row of `REWARDS`:

  def short(completions):
    return [float(len(c.text) < 100) for c in completions]

`config.reward.functions` names the functions of a run, `config.reward.weights`
their weights in the reward. If a row of `RANGES` bounds the numbers, peers'
rewards are held to it.
"""

from collections.abc import Callable, Sequence
import functools
from typing import NamedTuple

from mrl_jax import records


class Completion(NamedTuple):
  """A completion as reward functions see it."""

  text: str  # Bytes that are not UTF-8 are replaced.
  finish: records.Finish  # 'length' if it was cut off.
  tokens: int  # Its length, in tokens of the policy that sampled it.
  prompt: str  # The text of the prompt.
  gold: str  # The gold answer.
  # The verifier's verdict on the answer in `text`. A completion that was cut off
  # has given no answer: it is 'unparsable'.
  verdict: records.Verdict = 'unparsable'


def completion(
  payload: bytes, finish: records.Finish, tokens: int, prompt: records.Prompt
) -> Completion:
  """The completion of `prompt` with these bytes, not verified yet."""
  text = payload.decode('utf-8', errors='replace')
  return Completion(text, finish, tokens, prompt.text, prompt.answer)


Reward = Callable[[Sequence[Completion]], Sequence[float]]


def exact(completions: Sequence[Completion]) -> list[float]:
  """1 if the answer is right."""
  return [float(c.verdict == 'correct') for c in completions]


def format(completions: Sequence[Completion]) -> list[float]:
  """1 if the policy ended the completion and gave an answer that is readable."""
  return [float(c.verdict in ('correct', 'wrong')) for c in completions]


def overlong(
  completions: Sequence[Completion], *, longest: int, ramp: int
) -> list[float]:
  """DAPO's soft penalty of long completions, between -1 and 0.

    0 up to `longest - ramp` tokens, then falling linearly to -1 at `longest`

  https://arxiv.org/abs/2503.14476, eq. 13.

  Args:
    completions: the batch.
    longest: the most tokens that a completion may have.
    ramp: the number of tokens over which the penalty grows; 0 is no penalty.
  """
  if not ramp:
    return [0.0] * len(completions)
  return [
    -min(max(c.tokens - (longest - ramp), 0) / ramp, 1.0) for c in completions
  ]


# By name, what makes the reward function of a run's config.
REWARDS: dict[str, Callable[..., Reward]] = {
  'exact': lambda config: exact,
  'format': lambda config: format,
  'overlong': lambda config: functools.partial(
    overlong,
    longest=config.sample.max_tokens,
    ramp=config.reward.overlong_tokens,
  ),
}

# By name, the least and the largest number of a function. Those of other
# functions are not known.
RANGES: dict[str, tuple[float, float]] = {
  'exact': (0.0, 1.0),
  'format': (0.0, 1.0),
  'overlong': (-1.0, 0.0),
}


def reward_range(config) -> tuple[float, float]:
  """The least and the largest reward that `config.reward` allows."""
  if not {*config.functions} <= RANGES.keys():
    return -records.LARGEST, records.LARGEST
  ends = [
    sorted(weight * end for end in RANGES[name])
    for name, weight in zip(config.functions, config.weights, strict=True)
  ]
  return sum(least for least, _ in ends), sum(most for _, most in ends)
