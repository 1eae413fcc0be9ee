"""The base of every method: advantages relative to the policy's own group."""

import numpy as np

_EPSILON = 1e-6


def moments(rewards_PG: np.ndarray) -> np.ndarray:
  """Count, sum and sum of squares of every group, f64 [P, 3]."""
  count_P = np.full(len(rewards_PG), rewards_PG.shape[1], np.float64)
  sums_P, squares_P = rewards_PG.sum(1), (rewards_PG**2).sum(1)
  return np.stack([count_P, sums_P, squares_P], 1)


def own(own_P3: np.ndarray, peers_P3: np.ndarray) -> np.ndarray:
  """The baseline's moments: the policy's own group, whatever peers did."""
  del peers_P3
  return own_P3


def advantages(rewards_PG: np.ndarray, baseline_P3: np.ndarray) -> np.ndarray:
  """Rewards against the baseline's mean, in units of its deviation.

    A = (r - b) / (s + 1e-6)

  GRPO, https://arxiv.org/abs/2402.03300, sec. 4.1.2; b and s are the mean and
  the population standard deviation of the rewards behind `baseline_P3`.

  Args:
    rewards_PG: f64, of the samples of every prompt.
    baseline_P3: `moments` of the rewards to compare with.

  Returns:
    f32 [P, G]; exactly 0 where a reward is the baseline.
  """
  count_P1, sum_P1, square_P1 = np.split(baseline_P3, 3, axis=1)
  mean_P1 = sum_P1 / count_P1
  variance_P1 = np.maximum(square_P1 / count_P1 - mean_P1**2, 0.0)
  difference_PG = rewards_PG - mean_P1
  # Sums of rewards such as 0.1 are rounded; such a rest is no signal.
  difference_PG[np.isclose(rewards_PG, mean_P1, rtol=1e-9, atol=1e-9)] = 0.0
  return (difference_PG / (np.sqrt(variance_P1) + _EPSILON)).astype(np.float32)
