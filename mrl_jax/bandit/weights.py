"""What a peer's action weighs in each method: functions of pi and mu.

All take probabilities `[..., K]` and give weights `[..., K]` that multiply the
advantage and the score; at the first update of a round, where the learner is
still the policy that is asked. An action that the peer never does weighs 0.
"""

from typing import NamedTuple

import numpy as np

from mrl_jax.bandit import problem as problem_lib

_MAX_LOG_RATIO = 10.0  # As in the product: a peer may claim any probability.
_LEAST_ACCURACY = 1e-8
_RATIOS = (0.1, 10.0)


class Signed(NamedTuple):
  """Weights where the advantage is positive, and where it is negative."""

  success_K: np.ndarray
  failure_K: np.ndarray


def prp(
  pi_K: np.ndarray,
  mu_K: np.ndarray,
  *,
  denominators: str = 'behaviour',
  max_ratio: float = np.inf,
  error_K: np.ndarray | float = 0.0,
  clip: tuple[float, float] | None = None,
) -> Signed:
  """PRP's ratio: of a whole response, or 1.

    rho = min(pi / mu exp(eps), C)

  as `losses/prp.py` with one chunk a response; 1 for the denominators
  'recompute', whose ratio begins at 1. With a clip, the surrogate of
  `losses/grpo.py` has no gradient where rho > 1 + clip_high and A > 0, or
  rho < 1 - clip_low and A < 0. Mutual RL, https://arxiv.org/abs/2605.07244;
  ratio, truncation and clip are our reconstruction.

  Args:
    pi_K: the learner's probabilities.
    mu_K: the peer's.
    denominators: 'behaviour' or 'recompute'.
    max_ratio: C; infinite for none.
    error_K: eps, what THL gets wrong of log pi / mu, in nats.
    clip: (clip_low, clip_high); None for none.
  """
  if denominators == 'recompute':
    one_K = np.where(mu_K > 0, np.ones_like(pi_K), 0.0)
    return Signed(one_K, one_K)
  rho_K = problem_lib.density_ratio(pi_K, mu_K) * np.exp(error_K)
  rho_K = np.minimum(rho_K, max_ratio)
  if clip is None:
    return Signed(rho_K, rho_K)
  low, high = clip
  return Signed(
    np.where(rho_K > 1 + high, 0.0, rho_K),
    np.where(rho_K < 1 - low, 0.0, rho_K),
  )


def mean_ratio(pi_K: np.ndarray, mu_K: np.ndarray, length: float) -> np.ndarray:
  """The ratio of mean log-probabilities a token, of HACPO and GRAFT.

    s = exp(clip(log(pi / mu) / L, -10, 10))

  The product divides each log-probability by the policy's own token count; here
  both have L tokens, the same for all actions, which is our simplification.

  Args:
    pi_K: the learner's probabilities.
    mu_K: the peer's.
    length: L, tokens of a response; 1 makes s the ratio itself.
  """
  ratio_K = problem_lib.density_ratio(pi_K, mu_K)
  with np.errstate(divide='ignore'):
    log_ratio_K = np.log(ratio_K) / length
  bounded_K = np.clip(log_ratio_K, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
  return np.where(mu_K > 0, np.exp(bounded_K), 0.0)


def capability_ratio(p, q):
  """The learner's capability relative to the peer's, w(k, j).

    w(k, j) = clip(p / q, 0.1, 10)

  HACPO, https://arxiv.org/abs/2603.02604, takes mean accuracies over batches;
  p and q stand for these, as if all prompts were alike.
  """
  return np.clip(
    np.maximum(p, _LEAST_ACCURACY) / np.maximum(q, _LEAST_ACCURACY), *_RATIOS
  )


def hacpo(
  pi_K: np.ndarray,
  mu_K: np.ndarray,
  *,
  length: float = 1.0,
  low: float = 0.8,
  clip: bool = True,
  alpha: float = 1.0,
) -> np.ndarray:
  """HACPO's weight of a peer's response, without the capability.

    1[lo <= s <= 1] s^(1 + alpha)

  as `losses/hacpo.py`: s sg[s]^alpha inside the bounds, no gradient outside.
  HACPO, https://arxiv.org/abs/2603.02604, sections 3.3 and 3.4.

  Args:
    pi_K: the learner's probabilities.
    mu_K: the peer's.
    length: L of `mean_ratio`.
    low: lo; 1 - delta in a round's first mini-batch.
    clip: whether there are bounds.
    alpha: how much more a smaller ratio weighs down.
  """
  s_K = mean_ratio(pi_K, mu_K, length)
  weight_K = s_K ** (1 + alpha)
  return (
    np.where((s_K >= low) & (s_K <= 1), weight_K, 0.0) if clip else weight_K
  )


def graft(
  pi_K: np.ndarray,
  mu_K: np.ndarray,
  *,
  length: float = 1.0,
  floor: float = 0.8,
  gate: bool = True,
  weighted: bool = True,
) -> np.ndarray:
  """GRAFT's weight of a peer's response: how compatible it is.

    w = 1[s > f] min(s, 1)

  as `sharing/graft.py`. GRAFT, https://arxiv.org/abs/2609.37868.

  Args:
    pi_K: the learner's probabilities.
    mu_K: the peer's.
    length: L of `mean_ratio`.
    floor: f.
    gate: whether responses of s <= f are left out.
    weighted: whether those that are not weigh min(s, 1), or 1.
  """
  s_K = mean_ratio(pi_K, mu_K, length)
  weight_K = np.minimum(s_K, 1.0) if weighted else np.where(mu_K > 0, 1.0, 0.0)
  return np.where(s_K > floor, weight_K, 0.0) if gate else weight_K
