"""The gradient of every method on a bandit: exact moments, and bounds.

All but `*_bound` is exact. What makes it so: given how many of the samples
succeed, k of G own and l of H of the peer, every advantage is known, and the
samples are independent, own successes from pi(. | S), failures from
pi(. | not S), and the peer's from mu(. | S) and mu(. | not S). A gradient is

  g = sum over kinds c of samples, f_c(k, l) sum_{i of kind c} w_c(a_i) s(a_i)

with f_c the advantage over the number of rows, w_c a weight by action
(`weights.py`) and s the score. With n_c samples of kind c, and m_c and C_c the
mean and the covariance of w_c(a) s(a),

  E[g | k, l]   = sum_c f_c n_c m_c
  Cov[g | k, l] = sum_c f_c^2 n_c C_c

and what remains is a finite sum over k ~ Bin(G, p), l ~ Bin(H, q). Derivation
ours; it gives back the formulas that the functions below name.

Gradients are those of a round's first update, of one prompt, averaged over rows
of equal length (`sequence_mean`), without a KL penalty.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import NamedTuple

import numpy as np

from mrl_jax.bandit import problem as problem_lib
from mrl_jax.bandit import weights

_EPSILON = 1e-6  # Beside the deviation, as in `sharing/grpo.py`.


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Moments:
  """What is known of a method's gradient g.

  Attributes:
    problem: whose learner it is of.
    mean_K: E g.
    covariance_KK: Cov g.
    no_signal: P(no row has an advantage and a weight).
  """

  problem: problem_lib.Problem
  mean_K: np.ndarray
  covariance_KK: np.ndarray
  no_signal: float

  @property
  def second(self) -> float:
    """E |g|^2."""
    return float(self.noise + self.mean_K @ self.mean_K)

  @property
  def noise(self) -> float:
    """The trace of Cov g: the instability of a step."""
    return float(np.trace(self.covariance_KK))

  @property
  def bias_K(self) -> np.ndarray:
    """E g - grad J, grad J = p u_S."""
    return self.mean_K - self.problem.grad_J_K

  @property
  def support(self) -> float:
    """u_S . E g: d log p / d eta of a step eta E g, at eta = 0."""
    return float(self.problem.u_S_K @ self.mean_K)

  @property
  def rescue(self) -> float:
    """P(the whole group fails, and the peer's does not)."""
    return self.problem.rescue


class _Kind(NamedTuple):
  """Samples that enter alike: drawn from one distribution, n f w(a) s(a)."""

  drawn_K: np.ndarray
  weight_K: np.ndarray
  count_Z: np.ndarray
  factor_Z: np.ndarray


class _Cells(NamedTuple):
  """Counts of successes, k own and l of the peer, and how probable."""

  k_Z: np.ndarray
  l_Z: np.ndarray
  chance_Z: np.ndarray


def grpo(problem: problem_lib.Problem, *, std: bool = True) -> Moments:
  """GRPO: own samples against their own mean.

    g = 1/G sum_i A_i s(a_i),  A = (r - b) / (std + 1e-6),  b = k / G

    without std  E g = (1 - 1/G) grad J
    with std     E g = sum_k Bin(k; G, p) sqrt(k (G - k)) / G (u_S - u_F)
    P(no signal) = p^G + (1 - p)^G

  but for the 1e-6. GRPO, https://arxiv.org/abs/2402.03300; without std,
  Dr. GRPO, https://arxiv.org/abs/2503.20783. The sums are ours.

  Args:
    problem: the bandit; its peer is not used.
    std: whether the deviation is divided by.
  """
  cells = _cells(problem)
  baseline_Z = cells.k_Z / problem.group
  unit_Z = _unit(cells.k_Z, problem.group) if std else 1.0
  own = _own(problem, cells, baseline_Z, unit_Z * problem.group)
  return _moments(problem, cells.chance_Z, own)


def xgrpo(problem: problem_lib.Problem, *, std: bool = True) -> Moments:
  """XGRPO: own samples against the mean of own and peer rewards.

    g = 1/G sum_i A_i s(a_i),  A = (r - b) / (std + 1e-6),  b = (k + l) / N

    without std  E g = (1 - 1/N) grad J
    with std     E g = c(p, q) u_S,  c >= 0

  with the deviation over the same N rewards. Since p u_S + (1 - p) u_F = 0, all
  that any baseline can change is c. Mutual RL,
  https://arxiv.org/abs/2605.07244; pooled moments are our reconstruction.

  Args:
    problem: the bandit.
    std: whether the deviation is divided by.
  """
  cells = _cells(problem)
  baseline_Z, unit_Z = _pooled(problem, cells, std)
  own = _own(problem, cells, baseline_Z, unit_Z * problem.group)
  return _moments(problem, cells.chance_Z, own)


def prp(
  problem: problem_lib.Problem,
  *,
  std: bool = False,
  own: bool = True,
  **settings,
) -> Moments:
  """PRP: own and peer samples in one group, the peer's with a ratio.

    g = 1/N (sum_i A_i s(a_i) + sum_j rho(b_j) A_j s(b_j)),  b = (k + l) / N

  Behaviour denominators, without std, truncation, clip and THL error, where
  the peer may do all that the learner does (chi2 is finite):

    E g = (1 - 1/N) grad J

  Actions that only the learner does are never seen with the peer's samples;
  their share H/N of E g is lost. Recomputed denominators: rho = 1, and a peer's
  sample has the mean E_mu[(r - b) s], which is not grad J and stays as p -> 0.
  Mutual RL, https://arxiv.org/abs/2605.07244; see `weights.prp` for what is our
  reconstruction.

  Args:
    problem: the bandit.
    std: whether the pooled deviation is divided by.
    own: whether own samples enter, or only the peer's part of g is meant.
    **settings: of `weights.prp`: denominators, max_ratio, error_K, clip.
  """
  cells = _cells(problem)
  baseline_Z, unit_Z = _pooled(problem, cells, std)
  unit_Z = unit_Z * problem.pooled
  signed = weights.prp(problem.pi_K, problem.mu_K, **settings)
  kinds = _peer(problem, cells, baseline_Z, unit_Z, signed)
  if own:
    kinds += _own(problem, cells, baseline_Z, unit_Z)
  return _moments(problem, cells.chance_Z, kinds)


def hacpo(
  problem: problem_lib.Problem,
  *,
  std: bool = True,
  ratio: float | None = None,
  capability_baseline: bool = True,
  capability_weight: bool = True,
  own: bool = True,
  **settings,
) -> Moments:
  """HACPO: own and peer samples, baseline and weights by capability.

    b = (k + w l) / N;  k / G if that is above 1;  (k + l) / N if all are equal
    A = (r - b) / (std + 1e-6), of all N raw rewards, with N - 1
    g = 1/N (sum_i A_i s(a_i) + 1/w sum_j 1[lo <= s_j <= 1] s_j^(1+a) A_j s(b_j))

  with w the learner's capability over the peer's and s_j the ratio of mean
  log-probabilities. HACPO, https://arxiv.org/abs/2603.02604, and where they
  differ its authors' code. That w is given, rather than the mean accuracy of
  rounds, and that all responses have L tokens, is our reduction to one prompt;
  the KL penalty, 0 at the reference, is left out.

  Args:
    problem: the bandit.
    std: whether the deviation is divided by.
    ratio: w; None for `weights.capability_ratio` of p and q.
    capability_baseline: without it, b = (k + l) / N.
    capability_weight: without it, a peer's rows do not have 1/w.
    own: whether own samples enter, or only the peer's part of g is meant.
    **settings: of `weights.hacpo`: length, low, clip, alpha.
  """
  if ratio is None:
    ratio = float(weights.capability_ratio(problem.p, problem.q))
  cells, pooled = _cells(problem), problem.pooled
  total_Z = cells.k_Z + cells.l_Z
  plain_Z = total_Z / pooled
  mean_Z = (cells.k_Z + ratio * cells.l_Z) / pooled
  mean_Z = np.where(mean_Z > 1, cells.k_Z / problem.group, mean_Z)
  equal_Z = (total_Z == 0) | (total_Z == pooled)
  if not capability_baseline:
    equal_Z = np.full_like(equal_Z, True)
  baseline_Z = np.where(equal_Z, plain_Z, mean_Z)
  unbiased = math.sqrt(pooled / max(pooled - 1, 1))
  unit_Z = _unit(total_Z, pooled, unbiased) if std else np.ones_like(plain_Z)
  unit_Z = unit_Z * pooled
  weight_K = weights.hacpo(problem.pi_K, problem.mu_K, **settings)
  if capability_weight:
    weight_K = weight_K / ratio
  signed = weights.Signed(weight_K, weight_K)
  kinds = _peer(problem, cells, baseline_Z, unit_Z, signed)
  if own:
    kinds += _own(problem, cells, baseline_Z, unit_Z)
  return _moments(problem, cells.chance_Z, kinds)


def sgt(
  problem: problem_lib.Problem,
  *,
  std: bool = True,
  weight: float = 0.1,
  normaliser: str = 'batch',
  batch: int = 1,
) -> Moments:
  """SGT: GRPO, and a peer's success where the whole group fails.

  Of a batch of B prompts that are all this one, R of them rescued:

    g = 1/B sum_x g_GRPO(x) + lambda / (B or R) sum_{x rescued} s(b_x)

  where b_x is one of the peer's successes, so that for the 'batch' normaliser

    E g = E g_GRPO + lambda (1 - p)^G (1 - (1 - q)^H) E_mu[s | success]

  with P(R > 0) in place of the probability of a rescue for 'rescue'. A rescued
  prompt has no GRPO gradient; over the batch the two depend on each other only
  by R. Mutual RL, https://arxiv.org/abs/2605.07244, as re-implemented by
  GRAFT's authors. The success is uniform over the peer's samples; the product
  draws from its different texts, which is the same unless samples coincide.

  Args:
    problem: the bandit.
    std: of GRPO.
    weight: lambda.
    normaliser: 'batch' or 'rescue', what the transfers are averaged over.
    batch: B, prompts of an update; for B = 1 both normalisers are the same.
  """
  base = grpo(problem, std=std)
  transfers = _transfers(problem.rescue, batch, normaliser)
  score_K, covariance_KK = _sample(problem, problem.mu_S_K, 1.0)
  mean_K = base.mean_K + weight * transfers.average * score_K
  # E g g^T, of GRPO's part, of the transfers', and of the two together.
  cross_KK = weight * transfers.beside_own * np.outer(base.mean_K, score_K)
  second_KK = (
    base.covariance_KK / batch
    + np.outer(base.mean_K, base.mean_K)
    + weight**2 * transfers.alone * covariance_KK
    + weight**2 * transfers.square * np.outer(score_K, score_K)
    + cross_KK
    + cross_KK.T
  )
  silent = base.no_signal - (problem.rescue if weight else 0.0)
  return Moments(
    problem=problem,
    mean_K=mean_K,
    covariance_KK=second_KK - np.outer(mean_K, mean_K),
    no_signal=max(silent, 0.0) ** batch,
  )


def graft(
  problem: problem_lib.Problem,
  *,
  std: bool = True,
  success_only: bool = False,
  normaliser: str = 'group',
  **settings,
) -> Moments:
  """GRAFT: GRPO, and the peer's group where the whole group fails.

  Where k = 0 and 0 < l < H,

    g = 1/H sum_{j admitted} w(b_j) A_j s(b_j),  A = (r - l/H) / (std + 1e-6)

  with A the source's own, by its group, and with 1/H = `group`

    E g = E g_GRPO + (1 - p)^G sum_l Bin(l; H, q) sqrt(l (H - l)) / H
                     (E_mu[w s | success] - E_mu[w s | failure])

  The rows of a mini-batch are those that are admitted: `admitted` divides by
  their number, as a mini-batch of this prompt alone does. Beside many others
  that number hardly varies, and a group counts in proportion: `group`, our
  reduction to one prompt. Groups are not balanced. GRAFT,
  https://arxiv.org/abs/2609.37868.

  Args:
    problem: the bandit.
    std: of GRPO; the source's advantages always have it.
    success_only: whether the group's failures are left out.
    normaliser: 'group' or 'admitted'.
    **settings: of `weights.graft`: length, floor, gate, weighted.
  """
  weight_K = weights.graft(problem.pi_K, problem.mu_K, **settings)
  taken_K = (weight_K > 0) * 1.0
  if success_only:
    taken_K = taken_K * problem.reward_K
  cells, right_Z, wrong_Z = _admitted(problem, taken_K)
  own_Z = cells.k_Z / problem.group
  unit_Z = _unit(cells.k_Z, problem.group) if std else 1.0
  kinds = _own(problem, cells, own_Z, unit_Z * problem.group)
  rows_Z = max(problem.peers, 1)
  if normaliser == 'admitted':
    rows_Z = np.maximum(right_Z + wrong_Z, 1)
  source_Z = cells.l_Z / max(problem.peers, 1)
  unit_Z = _unit(cells.l_Z, problem.peers) * rows_Z
  grafted_Z = (cells.k_Z == 0) & (cells.l_Z > 0) & (cells.l_Z < problem.peers)
  right_K = problem_lib.given(problem.mu_K, taken_K * problem.reward_K)
  wrong_K = problem_lib.given(problem.mu_K, taken_K * (1 - problem.reward_K))
  kinds += [
    _Kind(right_K, weight_K, right_Z, grafted_Z * (1 - source_Z) / unit_Z),
    _Kind(wrong_K, weight_K, wrong_Z, grafted_Z * -source_Z / unit_Z),
  ]
  return _moments(problem, cells.chance_Z, kinds)


def prp_second_moment_bound(
  problem: problem_lib.Problem, *, std: bool = False
) -> float:
  """Bounds E |g|^2 of the peer's part of PRP, not truncated.

    (H/N)^2 (1 + chi2(pi || mu)) max_a |s(a)|^2 max A^2

  where |A| is at most 1 - 1/N without std, sqrt(N - 1) with. A bound, not a
  moment: `prp(problem, own=False).second` is exact. Mutual RL,
  https://arxiv.org/abs/2605.07244, says that PRP pays for the ratio's variance;
  the bound is ours.

  Args:
    problem: the bandit.
    std: whether the pooled deviation is divided by.
  """
  pooled = problem.pooled
  largest = pooled - 1 if std else (1 - 1 / pooled) ** 2
  score = (problem.score_KK**2).sum(1).max()
  share = problem.peers / pooled
  return share**2 * (1 + problem.chi2) * float(score) * largest


def truncation_bias_bound(
  problem: problem_lib.Problem, max_ratio: float, *, std: bool = False
) -> float:
  """Bounds what PRP's truncation at C does to E g.

    |E g_C - E g| <= H/N sum_a (pi(a) - C mu(a))_+ E|A(r_a)| |s(a)|

  The mass of actions that the peer never does is in the sum: E g is that of a
  peer which does them, so that without std it is (1 - 1/N) grad J. Equality
  where a single action is truncated. Derivation ours: the triangle inequality,
  with E|A(r_a)| over the other N - 1 samples.

  Args:
    problem: the bandit.
    max_ratio: C.
    std: whether the pooled deviation is divided by.
  """
  lost_K = np.maximum(problem.pi_K - max_ratio * problem.mu_K, 0)
  return _weighed_by_advantage(problem, lost_K, std)


def thl_error_bound(
  problem: problem_lib.Problem, error: float, *, std: bool = False
) -> float:
  """Bounds what errors of THL's log ratios do to E g of PRP.

    |E g~ - E g| <= (e^E - 1) H/N sum_a pi(a) E|A(r_a)| |s(a)|

  for all errors |eps(a)| <= E, since |e^eps - 1| <= e^E - 1; without truncation
  and clip. Derivation ours.

  Args:
    problem: the bandit.
    error: E, in nats of log pi / mu.
    std: whether the pooled deviation is divided by.
  """
  seen_K = problem.pi_K * (problem.mu_K > 0)
  return math.expm1(error) * _weighed_by_advantage(problem, seen_K, std)


def sgt_second_moment_bound(
  problem: problem_lib.Problem, weight: float = 0.1
) -> float:
  """Bounds E |g|^2 of SGT's transfer alone, for a batch of one prompt.

    lambda^2 P(rescue) E_mu[|s|^2 | success] <= 2 lambda^2 P(rescue)

  since |e_a - pi|^2 <= 2: no ratio, whatever the policies. Derivation ours.
  """
  return 2 * weight**2 * problem.rescue


class _Transfers(NamedTuple):
  """Of n = sum over R transfers s_i / (B or R), what its moments take.

  Attributes:
    average: E n = average E s.
    alone: E n n^T = alone Cov s + square E s E s^T.
    square: see `alone`.
    beside_own: E g n^T = beside_own E g E s^T, with g the mean of B gradients
      of which those of rescued prompts are 0.
  """

  average: float
  alone: float
  square: float
  beside_own: float


def _transfers(rescue, batch, normaliser) -> _Transfers:
  if normaliser == 'batch':
    return _Transfers(
      average=rescue,
      alone=rescue / batch,
      square=rescue**2 + rescue * (1 - rescue) / batch,
      beside_own=rescue * (batch - 1) / batch,
    )
  rescued = np.arange(1, batch + 1)
  chance = _binomial(batch, rescue)[1:]
  some = float(chance.sum())
  return _Transfers(
    average=some,
    alone=float((chance / rescued).sum()),
    square=some,
    beside_own=1 - (1 - rescue) ** (batch - 1),
  )


def _binomial(n: int, p: float) -> np.ndarray:
  k = np.arange(n + 1)
  ways = np.array([float(math.comb(n, i)) for i in k])
  return ways * p**k * (1 - p) ** (n - k)


def _cells(problem) -> _Cells:
  k_Z, l_Z = np.divmod(
    np.arange((problem.group + 1) * (problem.peers + 1)), problem.peers + 1
  )
  chance_Z = np.outer(
    _binomial(problem.group, problem.p), _binomial(problem.peers, problem.q)
  ).ravel()
  return _Cells(k_Z, l_Z, chance_Z)


def _admitted(problem, taken_K) -> tuple[_Cells, np.ndarray, np.ndarray]:
  """Cells where k > 0, and where k = 0 with what is admitted of the peer's.

  Of l successes, i ~ Bin(l, mu(taken | S)) are taken; of the rest, j likewise.

  Returns:
    The cells, i_Z and j_Z.
  """
  H = problem.peers
  own = _binomial(problem.group, problem.p)
  chosen_2 = np.clip([problem.mu_S_K @ taken_K, problem.mu_F_K @ taken_K], 0, 1)
  right_LI, wrong_LJ = (
    np.array([np.pad(_binomial(n, rate), (0, H - n)) for n in range(H + 1)])
    for rate in chosen_2
  )
  peer_L11 = _binomial(H, problem.q)[:, None, None]
  chance_LIJ = peer_L11 * right_LI[:, :, None] * wrong_LJ[::-1, None, :]
  l_Z, i_Z, j_Z = np.nonzero(chance_LIJ)
  rest = np.zeros(problem.group, int)
  cells = _Cells(
    np.concatenate([np.arange(1, problem.group + 1), 0 * l_Z]),
    np.concatenate([rest, l_Z]),
    np.concatenate([own[1:], own[0] * chance_LIJ[l_Z, i_Z, j_Z]]),
  )
  return cells, np.concatenate([rest, i_Z]), np.concatenate([rest, j_Z])


def _unit(successes_Z, count, factor=1.0) -> np.ndarray:
  """The deviation of 0/1 rewards and the epsilon; 1 where all are equal."""
  square_Z = successes_Z * (count - successes_Z)
  deviation_Z = factor * np.sqrt(square_Z) / max(count, 1)
  return np.where(square_Z == 0, 1.0, deviation_Z + _EPSILON)


def _pooled(problem, cells, std) -> tuple[np.ndarray, np.ndarray]:
  """The mean of all N rewards, and what differences are divided by."""
  total_Z = cells.k_Z + cells.l_Z
  unit_Z = _unit(total_Z, problem.pooled) if std else np.ones(len(total_Z))
  return total_Z / problem.pooled, unit_Z


def _own(problem, cells, baseline_Z, divisor_Z) -> list[_Kind]:
  one_K = np.ones_like(problem.pi_K)
  right_Z, wrong_Z = _factors(baseline_Z, divisor_Z)
  failures_Z = problem.group - cells.k_Z
  return [
    _Kind(problem.pi_S_K, one_K, cells.k_Z, right_Z),
    _Kind(problem.pi_F_K, one_K, failures_Z, wrong_Z),
  ]


def _peer(problem, cells, baseline_Z, divisor_Z, signed) -> list[_Kind]:
  right_Z, wrong_Z = _factors(baseline_Z, divisor_Z)
  failures_Z = problem.peers - cells.l_Z
  return [
    _Kind(problem.mu_S_K, signed.success_K, cells.l_Z, right_Z),
    _Kind(problem.mu_F_K, signed.failure_K, failures_Z, wrong_Z),
  ]


def _factors(baseline_Z, divisor_Z) -> tuple[np.ndarray, np.ndarray]:
  """(r - b) / divisor of successes and failures; a rounding is no signal."""
  differences = (1 - baseline_Z, -baseline_Z)
  right_Z, wrong_Z = (np.where(abs(d) < 1e-9, 0.0, d) for d in differences)
  return right_Z / divisor_Z, wrong_Z / divisor_Z


def _sample(problem, drawn_K, weight_K) -> tuple[np.ndarray, np.ndarray]:
  """The mean [K] and the covariance [K, K] of w(a) s(a) for a drawn action."""
  weighed_KK = np.broadcast_to(weight_K, drawn_K.shape)[:, None]
  weighed_KK = weighed_KK * problem.score_KK
  mean_K = drawn_K @ weighed_KK
  second_KK = (weighed_KK * drawn_K[:, None]).T @ weighed_KK
  return mean_K, second_KK - np.outer(mean_K, mean_K)


def _moments(problem, chance_Z, kinds: Sequence[_Kind]) -> Moments:
  """The mean over cells of the moments given the cell."""
  mean_ZK = np.zeros((len(chance_Z), len(problem.pi_K)))
  covariance_KK = np.zeros_like(problem.score_KK)
  silent_Z = np.ones_like(chance_Z)
  for drawn_K, weight_K, count_Z, factor_Z in kinds:
    sample_K, sample_KK = _sample(problem, drawn_K, weight_K)
    mean_ZK += np.outer(factor_Z * count_Z, sample_K)
    covariance_KK += (chance_Z @ (factor_Z**2 * count_Z)) * sample_KK
    weightless = min(float(drawn_K @ (weight_K == 0)), 1.0)
    silent_Z *= np.where(factor_Z == 0, 1.0, weightless**count_Z)
  mean_K = chance_Z @ mean_ZK
  around_ZK = mean_ZK - mean_K
  return Moments(
    problem=problem,
    mean_K=mean_K,
    covariance_KK=covariance_KK + (chance_Z[:, None] * around_ZK).T @ around_ZK,
    no_signal=min(float(chance_Z @ silent_Z), 1.0),
  )


def _weighed_by_advantage(problem, mass_K, std) -> float:
  """H/N sum_a mass(a) E|A(r_a)| |s(a)|, over the other N - 1 samples."""
  if not problem.peers:
    return 0.0
  others = dataclasses.replace(problem, peers=problem.peers - 1)
  cells = _cells(others)
  size = []
  for reward in (0, 1):
    seen = cells._replace(l_Z=cells.l_Z + reward)
    baseline_Z, unit_Z = _pooled(problem, seen, std)
    size.append(cells.chance_Z @ (abs(reward - baseline_Z) / unit_Z))
  size_K = np.where(problem.reward_K == 1, size[1], size[0])
  length_K = np.linalg.norm(problem.score_KK, axis=1)
  return problem.peers / problem.pooled * float(mass_K @ (size_K * length_K))
