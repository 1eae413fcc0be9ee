"""The gradient estimators of the methods: peer weights and coefficients.

The gradient of one prompt, from own samples a_i and peer samples b_j, is

  g = sum_i own(r_i) s(a_i) + sum_j peer(r_j) w(b_j) s(b_j)

An estimator consists of the weight w(b), a function of the two policies, and of
the coefficients own(r) and peer(r): advantages over the number of rows, which
depend on the samples through their success counts only. SGT adds one more
term. `closed_form.py` computes the exact moments of g, `simulate.py` samples g.
Their agreement does not check the estimators, which both use: the tests also
compare these with numbers by hand and with the gradients of training.

g is the gradient of a round's first update, when the learner still is the
policy that sampled the own group. It averages over rows of equal length
(`sequence_mean`) and has no KL penalty. All papers leave details open; each
class says what is our reconstruction.
"""

import abc
import dataclasses
from typing import ClassVar, NamedTuple

import numpy as np

from mrl_jax.bandit import problem as problem_lib

_EPSILON = 1e-6  # Added to the standard deviation, as in `sharing/grpo.py`.
_MAX_LOG_RATIO = 10.0  # As in training, where a peer may claim any probability.
_LEAST_ACCURACY = 1e-8
_CAPABILITY_RATIOS = (0.1, 10.0)


class Counts(NamedTuple):
  """Success counts of the own and the peer's group, for Z pairs of groups."""

  problem: problem_lib.Problem  # Gives the group sizes G and H, and q.
  p_Z: np.ndarray  # f64, success rate of the learner; [1] if the same for all.
  own_Z: np.ndarray  # k, successes among the G own samples.
  peer_Z: np.ndarray  # l, successes among the H peer samples.


class Estimator(abc.ABC):
  """How a method makes a gradient of samples."""

  # Prompts in one update; those of a batch are all the same problem.
  batch: ClassVar[int] = 1

  def weights(
    self, pi_K: np.ndarray, mu_K: np.ndarray, reward_K: np.ndarray
  ) -> np.ndarray:
    """The weight w of each action where the peer samples it, [..., K].

    `pi_K` may be that of several learners, [..., K]. An action that the peer
    never takes weighs 0. A reward is also the sign of its advantage.
    """
    return np.zeros_like(pi_K)

  @abc.abstractmethod
  def coefficients(self, counts: Counts) -> tuple[np.ndarray, np.ndarray]:
    """own(r) and peer(r), f64 [Z, 2] each: of a failure and of a success."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grpo(Estimator):
  """GRPO: the own group against its mean reward.

    g = 1/G sum_i A_i s(a_i),  A = (r - b) / (std + 1e-6),  b = k / G

    without std  E g = (1 - 1/G) grad J
    with std     E g = sum_k Bin(k; G, p) sqrt(k (G - k)) / G (u_S - u_F)
    P(no signal) = p^G + (1 - p)^G

  up to the 1e-6. GRPO, https://arxiv.org/abs/2402.03300; without std,
  Dr. GRPO, https://arxiv.org/abs/2503.20783. Derivation of the sums ours.
  """

  std: bool = True  # Divide advantages by the standard deviation of rewards.

  def coefficients(self, counts):
    group = counts.problem.own_samples
    own_Z2 = _advantages(counts.own_Z, group, std=self.std) / group
    return own_Z2, np.zeros_like(own_Z2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Xgrpo(Grpo):
  """XGRPO: the own group against the mean of own and peer rewards.

    g = 1/G sum_i A_i s(a_i),  A = (r - b) / (std + 1e-6),  b = (k + l) / N

    without std  E g = (1 - 1/N) grad J
    with std     E g = c(p, q) u_S,  c >= 0

  with the standard deviation of the same N rewards. Since
  p u_S + (1 - p) u_F = 0, a baseline can change nothing but c. Mutual RL,
  https://arxiv.org/abs/2605.07244; pooled moments are our reconstruction.
  """

  def coefficients(self, counts):
    advantage_Z2 = _pooled_advantages(counts, self.std)
    own_Z2 = advantage_Z2 / counts.problem.own_samples
    return own_Z2, np.zeros_like(own_Z2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prp(Estimator):
  """PRP: one group of own and peer samples; the peer's have a ratio.

    g = 1/N (sum_i A_i s(a_i) + sum_j rho(b_j) A_j s(b_j)),  b = (k + l) / N
    rho = min(pi / mu exp(eps), C)

  With behaviour denominators and without std, truncation, clip and THL error,
  and if the peer takes every action that the learner takes (chi2 is finite),

    E g = (1 - 1/N) grad J

  Other actions are never seen among the peer's samples; their share H/N of E g
  is lost. With recomputed denominators rho = 1 (the ratio starts there), and a
  peer sample has the mean E_mu[(r - b) s], which is not grad J and does not
  vanish as p -> 0. The clip is the surrogate's of `losses/grpo.py`: no gradient
  if rho > 1 + clip_high and A > 0, or rho < 1 - clip_low and A < 0.

  Mutual RL, https://arxiv.org/abs/2605.07244; ratio, truncation and clip are
  our reconstruction. As `losses/prp.py` with one chunk per response.
  """

  std: bool = False  # Divide by the standard deviation of the N rewards.
  denominators: str = 'behaviour'  # Or 'recompute'.
  max_ratio: float = np.inf  # C.
  error_K: np.ndarray | float = 0.0  # eps, THL's error in log pi / mu, in nats.
  clip: tuple[float, float] | None = None  # (clip_low, clip_high).

  def weights(self, pi_K, mu_K, reward_K):
    if self.denominators == 'recompute':
      return np.where(mu_K > 0, np.ones_like(pi_K), 0.0)
    rho_K = problem_lib.density_ratio(pi_K, mu_K) * np.exp(self.error_K)
    rho_K = np.minimum(rho_K, self.max_ratio)
    if self.clip is None:
      return rho_K
    low, high = self.clip
    clipped_K = np.where(reward_K == 1, rho_K > 1 + high, rho_K < 1 - low)
    return np.where(clipped_K, 0.0, rho_K)

  def coefficients(self, counts):
    advantage_Z2 = _pooled_advantages(counts, self.std)
    coefficient_Z2 = advantage_Z2 / counts.problem.samples
    return coefficient_Z2, coefficient_Z2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hacpo(Estimator):
  """HACPO: own and peer samples; baseline and weights know capabilities.

    g = 1/N (sum_i A_i s(a_i) + 1/w sum_j 1[lo <= s_j <= 1] s_j^(1+a) A_j s(b_j))
    b = (k + w l) / N;  k / G if that is above 1;  (k + l) / N if all are equal
    A = (r - b) / (std + 1e-6), with the unbiased std of the N raw rewards

  where w is the learner's capability over the peer's, and s_j is `mean_ratio`.
  HACPO, https://arxiv.org/abs/2603.02604, sections 3.3 and 3.4, and its
  authors' code where the two differ. Our reduction to one prompt takes w as
  given, not from the mean accuracy of past rounds, and all responses to have L
  tokens. The KL penalty, which is 0 at the reference, is left out.
  """

  std: bool = True  # Divide advantages by the standard deviation of rewards.
  ratio: float | None = None  # w; None for `capability_ratio` of p and q.
  capability_baseline: bool = True  # If not, b = (k + l) / N.
  capability_weight: bool = True  # If not, peer samples have no factor 1/w.
  length: float = 1.0  # L, tokens per response; 1 makes s the ratio itself.
  low: float = 0.8  # lo; 1 - delta in the first mini-batch of a round.
  clip: bool = True  # Drop samples outside [lo, 1].
  alpha: float = 1.0  # a; the higher, the less responses of small s weigh.

  def weights(self, pi_K, mu_K, reward_K):
    s_K = mean_ratio(pi_K, mu_K, self.length)
    weight_K = s_K ** (1 + self.alpha)
    if not self.clip:
      return weight_K
    return np.where((s_K >= self.low) & (s_K <= 1), weight_K, 0.0)

  def coefficients(self, counts):
    problem = counts.problem
    ratio_Z = self.ratio
    if ratio_Z is None:
      ratio_Z = capability_ratio(counts.p_Z, problem.q)
    total_Z, pooled = counts.own_Z + counts.peer_Z, problem.samples
    baseline_Z = total_Z / pooled
    if self.capability_baseline:
      weighted_Z = (counts.own_Z + ratio_Z * counts.peer_Z) / pooled
      own_mean_Z = counts.own_Z / problem.own_samples
      weighted_Z = np.where(weighted_Z > 1, own_mean_Z, weighted_Z)
      mixed_Z = (total_Z > 0) & (total_Z < pooled)
      baseline_Z = np.where(mixed_Z, weighted_Z, baseline_Z)
    advantage_Z2 = _advantages(
      total_Z, pooled, baseline_Z, std=self.std, unbiased=True
    )
    own_Z2 = advantage_Z2 / pooled
    if not self.capability_weight:
      return own_Z2, own_Z2
    return own_Z2, own_Z2 / np.reshape(ratio_Z, (-1, 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Graft(Grpo):
  """GRAFT: GRPO, and the peer's group if the own group fails entirely.

  If k = 0 and 0 < l < H, with w = 1[s > f] min(s, 1) and s = `mean_ratio`,

    g = 1/H sum_j w(b_j) A_j s(b_j),  A = (r - l/H) / (std + 1e-6)

  where A and std are those of the peer's own group. Then

    E g = E g_GRPO + (1 - p)^G sum_l Bin(l; H, q) sqrt(l (H - l)) / H
                     (E_mu[w s | success] - E_mu[w s | failure])

  Whether or not `std` divides GRPO's advantages, the peer's are always divided.
  The rows of a mini-batch are the admitted samples, w > 0, and training divides
  by their number. Beside many other prompts the number hardly varies, and a
  group counts in proportion to its admitted samples: the factor 1/H, our
  reduction to one prompt. Groups are not balanced. GRAFT,
  https://arxiv.org/abs/2609.37868.
  """

  success_only: bool = False  # Leave out the peer's failures.
  length: float = 1.0  # L, tokens per response; 1 makes s the ratio itself.
  floor: float = 0.8  # f.
  gate: bool = True  # Drop samples with s <= f.
  weighted: bool = True  # Admitted samples weigh min(s, 1), not 1.

  def weights(self, pi_K, mu_K, reward_K):
    s_K = mean_ratio(pi_K, mu_K, self.length)
    weight_K = np.minimum(s_K, 1.0) if self.weighted else (s_K > 0) * 1.0
    if self.gate:
      weight_K = np.where(s_K > self.floor, weight_K, 0.0)
    return weight_K * reward_K if self.success_only else weight_K

  def coefficients(self, counts):
    own_Z2, _ = super().coefficients(counts)
    size = max(counts.problem.peer_samples, 1)
    mixed_Z = (counts.peer_Z > 0) & (counts.peer_Z < size)
    grafted_Z = (counts.own_Z == 0) & mixed_Z
    advantage_Z2 = _advantages(counts.peer_Z, size, std=True)
    return own_Z2, (grafted_Z / size)[:, None] * advantage_Z2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sgt(Grpo):
  """SGT: GRPO, and one peer success wherever the own group fails entirely.

  A prompt is rescued if k = 0 and l > 0. In a batch of B prompts, all of them
  this one, of which R are rescued,

    g = 1/B sum_x g_GRPO(x) + lambda / (B or R) sum_{x rescued} s(b_x)

  where b_x is one of the peer's successes. For the normaliser 'batch'

    E g = E g_GRPO + lambda (1 - p)^G (1 - (1 - q)^H) E_mu[s | success]

  and for 'rescue', P(R > 0) replaces the probability of a rescue. The transfer
  is not part of `coefficients`, which are GRPO's. Mutual RL,
  https://arxiv.org/abs/2605.07244, as re-implemented by GRAFT's authors. b_x is
  uniform over the peer's successful samples. Training draws from their
  distinct texts, which is the same unless samples coincide. The transfer of one
  prompt has E |n|^2 <= 2 lambda^2 P(rescue), whatever the policies are, since
  it has no ratio and |e_a - pi|^2 <= 2; derivation ours.
  """

  weight: float = 0.1  # lambda.
  normaliser: str = 'batch'  # Or 'rescue': what divides the sum of transfers.
  batch: int = 1  # B; for B = 1 both normalisers are the same.


def mean_ratio(pi_K: np.ndarray, mu_K: np.ndarray, length: float) -> np.ndarray:
  """HACPO's and GRAFT's ratio of mean log-probabilities per token, [..., K].

    s = exp(clip(log(pi / mu) / L, -10, 10));  0 if the peer never acts so

  Training divides each log-probability by the policy's own token count. Here
  both policies have L = `length` tokens for every action, our simplification.
  """
  ratio_K = problem_lib.density_ratio(pi_K, mu_K)
  with np.errstate(divide='ignore'):
    log_ratio_K = np.log(ratio_K) / length
  bounded_K = np.clip(log_ratio_K, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
  return np.where(mu_K > 0, np.exp(bounded_K), 0.0)


def capability_ratio(p, q):
  """HACPO's capability of the learner relative to the peer's.

    w(k, j) = clip(p / q, 0.1, 10)

  HACPO, https://arxiv.org/abs/2603.02604, uses mean accuracies over batches; p
  and q stand for them, as if all prompts were alike.
  """
  ratio = np.maximum(p, _LEAST_ACCURACY) / np.maximum(q, _LEAST_ACCURACY)
  return np.clip(ratio, *_CAPABILITY_RATIOS)


def _pooled_advantages(counts, std) -> np.ndarray:
  total_Z = counts.own_Z + counts.peer_Z
  return _advantages(total_Z, counts.problem.samples, std=std)


def _advantages(
  successes_Z, size, baseline_Z=None, *, std, unbiased=False
) -> np.ndarray:
  """(r - b) / (std + 1e-6) of a failure and of a success, [Z, 2].

  `successes_Z` of the group's n = `size` rewards are 1. b is their mean unless
  it is given. Equal rewards are not divided by their standard deviation. Its
  square has n - 1 in the denominator if it is `unbiased`, not n.
  """
  if baseline_Z is None:
    baseline_Z = successes_Z / size
  advantage_Z2 = np.array([0.0, 1.0]) - baseline_Z[:, None]
  # A rounding error is no signal.
  advantage_Z2 = np.where(abs(advantage_Z2) < 1e-9, 0.0, advantage_Z2)
  if not std:
    return advantage_Z2
  # Of 0/1 rewards, the sum of squared deviations is k (n - k) / n.
  product_Z = successes_Z * (size - successes_Z)
  factor = np.sqrt(size / max(size - 1, 1)) if unbiased else 1.0
  deviation_Z = factor * np.sqrt(product_Z) / size
  divisor_Z = np.where(product_Z == 0, 1.0, deviation_Z + _EPSILON)
  return advantage_Z2 / divisor_Z[:, None]
