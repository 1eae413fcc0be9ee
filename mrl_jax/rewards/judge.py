"""The judge of a policy: verifies answers, and sums weighted rewards."""

import collections
from collections.abc import Sequence
import time
from typing import NamedTuple

from mrl_jax import records
from mrl_jax.rewards import functions
from mrl_jax.rewards import mathematics
from mrl_jax.rewards import verify

Verifier = verify.Exact | mathematics.Mathematics
# By name, what makes the verifier of `config.reward`; it raises InputError if a
# package that it needs is not installed.
VERIFIERS = {
  'exact': lambda config: verify.Exact(config.marker),
  'math': lambda config: mathematics.Mathematics(
    config.marker, config.timeout_s, config.processes
  ),
}


class Judgement(NamedTuple):
  """The reward of a completion, and the verdict on its answer."""

  reward: float
  verdict: records.Verdict


class Judge:
  """Judges completions for one policy.

  verifier = judge.VERIFIERS['exact'](config.reward)
  judges = {name: judge.build(config, verifier) for name in policies}
  judgements = judges['llama'](completions)
  ...
  verifier.close()
  """

  def __init__(
    self,
    verifier: Verifier,
    rewards: Sequence[tuple[functions.Reward, float]],
  ):
    """Judges by a verifier, which judges may share, and weighted rewards."""
    self._verifier, self._rewards = verifier, rewards
    self._counts = collections.Counter()
    self.seconds = 0.0  # Time spent so far.

  def __call__(
    self, completions: Sequence[functions.Completion]
  ) -> list[Judgement]:
    """Judges each completion; answers are verified in parallel."""
    began = time.perf_counter()
    ended = [(c.text, c.gold) for c in completions if c.finish in records.ENDED]
    results = self._verifier.verify_all(ended)
    if self._verifier.counted:
      self._counts.update(results)
    verdicts = iter(results)
    completions = [
      c._replace(verdict=next(verdicts)) if c.finish in records.ENDED else c
      for c in completions
    ]
    rewards = [0.0] * len(completions)
    for function, weight in self._rewards:
      values = function(completions)
      rewards = [r + weight * v for r, v in zip(rewards, values, strict=True)]
    self.seconds += time.perf_counter() - began
    return [
      Judgement(float(reward), c.verdict)
      for reward, c in zip(rewards, completions, strict=True)
    ]

  def since_last(self) -> dict[str, int]:
    """Numbers of answers by result since the last call, if they are counted."""
    counts, self._counts = self._counts, collections.Counter()
    return dict(sorted(counts.items()))


def build(config, verifier: Verifier) -> Judge:
  """A judge with the reward functions and weights of a run's config."""
  names, weights = config.reward.functions, config.reward.weights
  rewards = [functions.REWARDS[name](config) for name in names]
  return Judge(verifier, list(zip(rewards, weights, strict=True)))
