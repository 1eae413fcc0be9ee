"""Reward functions, and their weighted sum."""

from collections.abc import Callable, Mapping, Sequence
import time

from mrl_jax import checks
from mrl_jax import records
from mrl_jax.rewards import mathematics
from mrl_jax.rewards import verify


def exact(verdict: records.Verdict) -> float:
  """1 if the answer is right."""
  return float(verdict == 'correct')


def format(verdict: records.Verdict) -> float:
  """1 if the completion ends by itself, with an answer behind the marker."""
  return float(verdict != 'unparsable')


REWARDS = {'exact': exact, 'format': format}


VERIFIERS = {
  'exact': lambda config: verify.Exact(config.marker),
  'math': lambda config: mathematics.Mathematics(
    config.marker, config.timeout_s
  ),
}


class Judge:
  """Judges completions, given as (payload, finish, gold answer).

      with contextlib.closing(functions.build(config.reward)) as judge:
        judged = judge.judge_all([(b'= 13', 'stop', '13'), ...])

  Payloads are bytes, of which invalid UTF-8 is replaced. A completion that was
  cut off has given no answer.

  Attributes:
    seconds: spent on it so far.
  """

  def __init__(
    self,
    verifier: verify.Exact | mathematics.Mathematics,
    weights: Mapping[Callable, float],
  ):
    """Judges by a verifier, and by weights of reward functions."""
    self._verifier, self._weights = verifier, weights
    self.seconds = 0.0

  def __call__(
    self, payload: bytes, finish: records.Finish, gold: str
  ) -> tuple[float, records.Verdict]:
    """The reward of a completion, and the verdict on its answer."""
    return self.judge_all([(payload, finish, gold)])[0]

  def judge_all(
    self, completions: Sequence[tuple[bytes, records.Finish, str]]
  ) -> list[tuple[float, records.Verdict]]:
    """The same of each; many at once are verified in parallel."""
    began = time.perf_counter()
    answers = [
      (payload.decode('utf-8', errors='replace'), gold)
      for payload, finish, gold in completions
      if finish == 'stop'
    ]
    found = iter(self._verifier.verify_all(answers))
    verdicts = [
      next(found) if finish == 'stop' else 'unparsable'
      for _, finish, _ in completions
    ]
    judged = [(self._reward(verdict), verdict) for verdict in verdicts]
    self.seconds += time.perf_counter() - began
    return judged

  def since_last(self) -> dict[str, int]:
    """What the verifier met since this was last called, if it counts that."""
    return self._verifier.since_last()

  def close(self) -> None:
    self._verifier.close()

  def _reward(self, verdict):
    return float(
      sum(weight * reward(verdict) for reward, weight in self._weights.items())
    )


def build(config) -> Judge:
  """The judge that `config.reward` describes.

  Raises:
    InputError: it names what is unknown, or not installed.
  """
  weights = {
    checks.choose(name, REWARDS, 'reward'): weight
    for name, weight in config.weights.items()
  }
  verifier = checks.choose(config.verifier, VERIFIERS, 'reward.verifier')
  return Judge(verifier(config), weights)


def overlong_penalty(length: int, longest: int, buffer: int) -> float:
  """DAPO's soft punishment of long completions, between -1 and 0.

    0 up to longest - buffer, then falling linearly to -1 at `longest`

  https://arxiv.org/abs/2503.14476, eq. 13. All are numbers of tokens; without
  a buffer there is no punishment.
  """
  if not buffer:
    return 0.0
  return -min(max(length - (longest - buffer), 0) / buffer, 1.0)
