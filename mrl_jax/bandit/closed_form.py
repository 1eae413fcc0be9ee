"""Exact moments of every estimator's gradient, and bounds on them.

Given the success counts, k of G own and l of H peer samples, every coefficient
of `estimators.py` is known and the samples are independent: own successes are
drawn from pi(. | S), own failures from pi(. | not S), the peer's from
mu(. | S) and mu(. | not S). These are four kinds c of samples, of which

  g = sum_c f_c sum_{i of kind c} w_c(a_i) s(a_i)

with coefficient f_c, weight w_c and n_c samples of kind c. With m_c and C_c the
mean and the covariance of w_c(a) s(a),

  E[g | k, l]   = sum_c f_c n_c m_c
  Cov[g | k, l] = sum_c f_c^2 n_c C_c

and the moments of g are finite sums over k ~ Bin(G, p), l ~ Bin(H, q).
Derivation ours; it reproduces the formulas in the docstrings of the estimators.
"""

import math
from typing import NamedTuple

import numpy as np

from mrl_jax.bandit import estimators
from mrl_jax.bandit import problem as problem_lib


class Moments(NamedTuple):
  """Mean and covariance of an update's gradient g."""

  problem: problem_lib.Problem
  mean_K: np.ndarray
  covariance_KK: np.ndarray

  @property
  def noise(self) -> float:
    """The trace of Cov g: how unstable a step is."""
    return float(np.trace(self.covariance_KK))

  @property
  def second(self) -> float:
    """E |g|^2."""
    return float(self.noise + self.mean_K @ self.mean_K)

  @property
  def support(self) -> float:
    """u_S . E g, which is d log p / d eta at eta = 0 for a step eta E g."""
    return float(self.problem.u_S_K @ self.mean_K)

  @property
  def context_weight(self) -> float:
    """How much the prompt counts: c, if E g = c grad J."""
    grad_K = self.problem.grad_J_K
    return float(self.mean_K @ grad_K / (grad_K @ grad_K))


def moments(
  problem: problem_lib.Problem, estimator: estimators.Estimator
) -> Moments:
  """The exact moments of an update's gradient."""
  counts, chance_Z = _cells(problem)
  own_Z2, peer_Z2 = estimator.coefficients(counts)
  ratio_K = estimator.weights(problem.pi_K, problem.mu_K, problem.reward_K)
  ones_K = np.ones_like(ratio_K)
  groups = (
    (problem.mu_K, ratio_K, problem.peer_samples, counts.peer_Z, peer_Z2),
    (problem.pi_K, ones_K, problem.own_samples, counts.own_Z, own_Z2),
  )
  mean_ZK = np.zeros((len(chance_Z), len(ratio_K)))
  within_KK = np.zeros_like(problem.score_KK)
  for reward in (0, 1):
    for policy_K, weight_K, size, successes_Z, coefficient_Z2 in groups:
      given_K = problem.given(policy_K, reward)
      sample_K, sample_KK = _sample_moments(problem, given_K, weight_K)
      count_Z = successes_Z if reward else size - successes_Z
      coefficient_Z = coefficient_Z2[:, reward]
      mean_ZK += np.outer(coefficient_Z * count_Z, sample_K)
      within_KK += (chance_Z @ (coefficient_Z**2 * count_Z)) * sample_KK
  # The law of total covariance, over the cells.
  mean_K = chance_Z @ mean_ZK
  off_ZK = mean_ZK - mean_K
  between_KK = (chance_Z[:, None] * off_ZK).T @ off_ZK
  of_prompt = Moments(problem, mean_K, within_KK + between_KK)
  if isinstance(estimator, estimators.Sgt):
    return _with_transfers(of_prompt, estimator)
  return of_prompt


def _cells(problem) -> tuple[estimators.Counts, np.ndarray]:
  """All pairs of success counts (k, l), and their probabilities [Z]."""
  G, H = problem.own_samples, problem.peer_samples
  k_Z, l_Z = np.divmod(np.arange((G + 1) * (H + 1)), H + 1)
  chance_KL = np.outer(_binomial(G, problem.p), _binomial(H, problem.q))
  counts = estimators.Counts(problem, np.array([problem.p]), k_Z, l_Z)
  return counts, chance_KL.ravel()


def _binomial(n: int, p: float) -> np.ndarray:
  """The distribution of k ~ Bin(n, p), [n + 1]."""
  k = np.arange(n + 1)
  ways = np.array([float(math.comb(n, i)) for i in k])
  return ways * p**k * (1 - p) ** (n - k)


def _sample_moments(problem, policy_K, weight_K):
  """The mean [K] and the covariance [K, K] of w(a) s(a) for a ~ policy."""
  weighted_KK = weight_K[:, None] * problem.score_KK
  mean_K = policy_K @ weighted_KK
  second_KK = (weighted_KK * policy_K[:, None]).T @ weighted_KK
  return mean_K, second_KK - np.outer(mean_K, mean_K)


def _with_transfers(grpo: Moments, sgt: estimators.Sgt) -> Moments:
  """Adds SGT's transfers to GRPO's moments, for a batch of B prompts.

  Given that R ~ Bin(B, P(rescue)) prompts are rescued, the transfer
  n = sum_{i <= R} s_i / D, with D = B or R, and the mean v of the B gradients
  of GRPO, which are 0 for rescued prompts, have

    E[n | R] = R/D E s,  Cov[n | R] = R/D^2 Cov s
    E[v | R] = (B - R)/B E g_GRPO / (1 - P(rescue))

  and are independent.
  """
  problem, B, chance = grpo.problem, sgt.batch, grpo.problem.rescue
  R = np.arange(B + 1)
  chance_R = _binomial(B, chance)
  D = B if sgt.normaliser == 'batch' else np.maximum(R, 1)
  score_K, score_KK = _sample_moments(
    problem, problem.given(problem.mu_K, 1), np.ones_like(problem.mu_K)
  )
  mean_K = grpo.mean_K + sgt.weight * (chance_R @ (R / D)) * score_K
  # All prompts are rescued for sure where 1 - chance is 0; v is 0 then.
  together = chance_R @ (R / D * (B - R) / B) / max(1 - chance, 1e-300)
  cross_KK = sgt.weight * together * np.outer(grpo.mean_K, score_K)
  second_KK = (
    grpo.covariance_KK / B
    + np.outer(grpo.mean_K, grpo.mean_K)
    + sgt.weight**2 * (chance_R @ (R / D**2)) * score_KK
    + sgt.weight**2 * (chance_R @ (R / D) ** 2) * np.outer(score_K, score_K)
    + cross_KK
    + cross_KK.T
  )
  return Moments(problem, mean_K, second_KK - np.outer(mean_K, mean_K))


def prp_second_moment_bound(
  problem: problem_lib.Problem, *, std: bool = False
) -> float:
  """Bounds E |g|^2 of the peer's term of PRP without truncation.

    (H/N)^2 (1 + chi2(pi || mu)) max_a |s(a)|^2 max A^2

  where |A| is at most 1 - 1/N without std and sqrt(N - 1) with std. Mutual RL,
  https://arxiv.org/abs/2605.07244, says that PRP pays for the ratio's variance;
  the bound is ours.
  """
  N = problem.samples
  largest = N - 1 if std else (1 - 1 / N) ** 2
  score = float((problem.score_KK**2).sum(1).max())
  share = problem.peer_samples / N
  return share**2 * (1 + problem.chi2) * score * largest


def truncation_bias_bound(
  problem: problem_lib.Problem, max_ratio: float
) -> float:
  """Bounds how far truncation at C = `max_ratio` moves E g of PRP without std.

    |E g_C - E g| <= H/N sum_a (pi(a) - C mu(a))_+ E|A(r_a)| |s(a)|

  The sum includes actions that the peer never takes: E g is that of a peer
  that takes them, so that it is (1 - 1/N) grad J. Equality holds if a single
  action is truncated. Derivation ours: the triangle inequality, with E|A(r_a)|
  over the other N - 1 samples.
  """
  lost_K = np.maximum(problem.pi_K - max_ratio * problem.mu_K, 0)
  return _weighted_by_advantage(problem, lost_K)


def thl_error_bound(problem: problem_lib.Problem, error: float) -> float:
  """Bounds how far errors of THL's log ratios move E g of PRP without std.

    |E g~ - E g| <= (e^E - 1) H/N sum_a pi(a) E|A(r_a)| |s(a)|

  for all errors |eps(a)| <= E = `error`, in nats of log pi / mu, since
  |e^eps - 1| <= e^E - 1, without truncation and clip. Derivation ours.
  """
  sampled_K = problem.pi_K * (problem.mu_K > 0)
  return math.expm1(error) * _weighted_by_advantage(problem, sampled_K)


def _weighted_by_advantage(problem, mass_K) -> float:
  """H/N sum_a mass(a) E|A(r_a)| |s(a)|, for a peer sample a among N."""
  if not problem.peer_samples:
    return 0.0
  others, chance_Z = _cells(
    problem.replace(peer_samples=problem.peer_samples - 1)
  )
  size_2 = np.zeros(2)  # E|A(r)| / N.
  for reward in (0, 1):
    counts = others._replace(problem=problem, peer_Z=others.peer_Z + reward)
    _, peer_Z2 = estimators.Prp().coefficients(counts)
    size_2[reward] = chance_Z @ abs(peer_Z2[:, reward])
  length_K = np.linalg.norm(problem.score_KK, axis=1)
  size_K = size_2[problem.reward_K.astype(int)]
  return problem.peer_samples * float(mass_K @ (size_K * length_K))
