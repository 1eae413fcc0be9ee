"""GRPO: advantages relative to a baseline, by default the own group's mean."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from mrl_jax import records
from mrl_jax.sharing import context as context_lib

_EPSILON = 1e-6


class Baseline(NamedTuple):
  """What the rewards of every prompt are compared with."""

  mean_P1: np.ndarray  # f64, subtracted from a reward.
  # f64, `context.moments` of the rewards by whose standard deviation a
  # difference is divided.
  moments_P3: np.ndarray


def baseline(moments_P3: np.ndarray) -> Baseline:
  """The baseline of the rewards with these moments: their own mean."""
  count_P1, sum_P1, _ = np.split(moments_P3, 3, axis=1)
  return Baseline(sum_P1 / count_P1, moments_P3)


def own(context: context_lib.Context) -> Baseline:
  """The mean of the policy's own group, whatever peers did."""
  return baseline(context.own_moments_P3)


def deviation(moments_P3: np.ndarray) -> np.ndarray:
  """The population standard deviation of the rewards, f64 [P, 1]."""
  count_P1, sum_P1, square_P1 = np.split(moments_P3, 3, axis=1)
  variance_P1 = np.maximum(square_P1 / count_P1 - (sum_P1 / count_P1) ** 2, 0.0)
  return np.sqrt(variance_P1)


def advantages(
  rewards_PG: np.ndarray,
  baseline: Baseline,
  *,
  scale: str = 'std',
  leave_one_out: bool = False,
  prompts: Sequence[int] | slice = slice(None),
) -> np.ndarray:
  """Differences from the baseline's mean, in standard deviations.

    A = (r - b) / (s + 1e-6)

  GRPO, https://arxiv.org/abs/2402.03300, sec. 4.1.2, for `scale` 'std'; 'none',
  s = 1, is that of Dr. GRPO, https://arxiv.org/abs/2503.20783.

  Args:
    rewards_PG: f64, rewards of the samples of every prompt, or of `prompts`.
    baseline: of all prompts of the round.
    scale: a name in `SCALES`, what s is.
    leave_one_out: b is the mean of the other n - 1 rewards, as in RLOO,
      https://arxiv.org/abs/2402.14740: A times n / (n - 1).
    prompts: indices of the prompts of `rewards_PG`, by default all.

  Returns:
    f32 [P, G]; exactly 0 where a reward equals the baseline. If all rewards of
    the baseline are equal, as where a whole group fails, s is 1: the advantage
    of a peer's reward is then in units of reward.
  """
  unit_P1 = SCALES[scale](baseline.moments_P3)
  mean_P1 = baseline.mean_P1[prompts]
  difference_PG = rewards_PG - mean_P1
  # Sums of rewards such as 0.1 are rounded; a rounding error is no signal.
  equal_PG = np.isclose(rewards_PG, mean_P1, rtol=1e-9, atol=1e-9)
  difference_PG[equal_PG] = 0.0
  if leave_one_out:
    difference_PG *= _over_one_less(baseline.moments_P3[prompts, :1])
  return (difference_PG / unit_P1[prompts]).astype(np.float32)


def judged(
  group: Sequence[records.Rollout],
  judgements: Sequence[tuple[float, records.Verdict]],
) -> list[records.Rollout]:
  """A group with these rewards and verdicts, and GRPO's advantages of them."""
  rewards_1G = np.array([[reward for reward, _ in judgements]])
  advantage_1G = advantages(
    rewards_1G, baseline(context_lib.moments(rewards_1G))
  )
  return [
    msgspec.structs.replace(
      rollout, reward=reward, verdict=verdict, advantage=float(advantage)
    )
    for rollout, (reward, verdict), advantage in zip(
      group, judgements, advantage_1G[0], strict=True
    )
  ]


def all_equal(moments_P3: np.ndarray) -> np.ndarray:
  """Whether all rewards of a prompt are equal up to rounding, bool [P, 1]."""
  size_P1 = np.abs(baseline(moments_P3).mean_P1)
  return deviation(moments_P3) < _EPSILON * np.maximum(size_P1, 1.0)


def _unit(moments_P3, factor_P1=1.0):
  unit_P1 = deviation(moments_P3) * factor_P1 + _EPSILON
  return np.where(all_equal(moments_P3), 1.0, unit_P1)


def _over_one_less(count_P1):
  """The ratio n / (n - 1); 1 for a single reward, which has no deviation."""
  return count_P1 / np.maximum(count_P1 - 1, 1)


def _unbiased(moments_P3):
  return _unit(moments_P3, np.sqrt(_over_one_less(moments_P3[:, :1])))


def _of_batch(moments_P3):
  unit_11 = _unit(moments_P3.sum(0, keepdims=True))
  return np.broadcast_to(unit_11, (len(moments_P3), 1))


# What a difference of rewards is divided by, [P, 1].
SCALES = {
  'std': _unit,
  # HACPO: with n - 1 in the denominator.
  'unbiased_std': _unbiased,
  # The deviation of all rewards of the round around their common mean.
  'batch_std': _of_batch,
  'none': lambda moments_P3: np.ones((len(moments_P3), 1)),
}
