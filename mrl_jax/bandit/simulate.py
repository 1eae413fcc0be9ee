"""The same gradients, of groups that are sampled, and what is learnt of them.

An estimator here takes a `Draw` and gives x_MK, the sum of advantages times
weights of the samples of each action, over the number of rows; the gradient is
x - pi sum_a x(a). Actions are counted, not listed: the cost of a group does not
grow with its size.
"""

from collections.abc import Callable
import dataclasses
from typing import NamedTuple, Protocol

import numpy as np

from mrl_jax import checks
from mrl_jax.bandit import closed_form
from mrl_jax.bandit import problem as problem_lib
from mrl_jax.bandit import weights

_EPSILON = 1e-6  # Beside the deviation, as in `sharing/grpo.py`.


class Draw(NamedTuple):
  """Sampled groups.

  Attributes:
    problem: what is right, the peer, and the sizes of groups.
    pi_MK: f64, the learner of each group; or [1, K], if it is the same.
    own_MK: how often each action is in the learner's group.
    peer_MK: the same of the peer's.
    uniform_M1: f64 in [0, 1), for what a method draws by itself.
  """

  problem: problem_lib.Problem
  pi_MK: np.ndarray
  own_MK: np.ndarray
  peer_MK: np.ndarray
  uniform_M1: np.ndarray

  @property
  def p_M1(self) -> np.ndarray:
    """How often each learner succeeds."""
    return self._total(self.pi_MK)

  @property
  def k_M1(self) -> np.ndarray:
    """Successes of each own group."""
    return self._total(self.own_MK)

  @property
  def l_M1(self) -> np.ndarray:
    """Successes of each of the peer's groups."""
    return self._total(self.peer_MK)

  def _total(self, x_MK):
    return (x_MK @ self.problem.reward_K)[:, None]


class Method(Protocol):
  """A row of `methods.METHODS`."""

  closed_form: Callable[[problem_lib.Problem], closed_form.Moments]
  simulator: Callable[[Draw], np.ndarray]
  batch: int


def draw(
  problem: problem_lib.Problem,
  groups: int,
  rng: np.random.Generator,
  pi_MK: np.ndarray | None = None,
) -> Draw:
  """Samples groups of the learner and of the peer.

  Args:
    problem: the bandit.
    groups: M.
    rng: of all samples.
    pi_MK: a learner for each group; that of the problem by default.
  """
  if pi_MK is None:
    pi_MK = problem.pi_K[None]
  return Draw(
    problem,
    pi_MK,
    rng.multinomial(problem.group, pi_MK, size=(groups,))
    if len(pi_MK) == 1
    else rng.multinomial(problem.group, pi_MK),
    rng.multinomial(problem.peers, problem.mu_K, size=groups),
    rng.random((groups, 1)),
  )


def gradient(x_MK: np.ndarray, pi_MK: np.ndarray) -> np.ndarray:
  """The gradient sum_a x(a) s(a) = x - pi sum_a x(a), [M, K]."""
  return x_MK - x_MK.sum(1, keepdims=True) * pi_MK


def grpo(drawn: Draw, *, std: bool = True) -> np.ndarray:
  """Coefficients of GRPO; see `closed_form.grpo`."""
  group = drawn.problem.group
  advantage_MK = _advantages(drawn, drawn.k_M1, group, std)
  return drawn.own_MK * advantage_MK / group


def xgrpo(drawn: Draw, *, std: bool = True) -> np.ndarray:
  """Coefficients of XGRPO; see `closed_form.xgrpo`."""
  total_M1 = drawn.k_M1 + drawn.l_M1
  advantage_MK = _advantages(drawn, total_M1, drawn.problem.pooled, std)
  return drawn.own_MK * advantage_MK / drawn.problem.group


def prp(drawn: Draw, *, std: bool = False, **settings) -> np.ndarray:
  """Coefficients of PRP; see `closed_form.prp`."""
  problem = drawn.problem
  total_M1 = drawn.k_M1 + drawn.l_M1
  advantage_MK = _advantages(drawn, total_M1, problem.pooled, std)
  signed = weights.prp(drawn.pi_MK, problem.mu_K, **settings)
  weight_MK = np.where(
    problem.reward_K == 1, signed.success_K, signed.failure_K
  )
  rows_MK = drawn.own_MK + weight_MK * drawn.peer_MK
  return rows_MK * advantage_MK / problem.pooled


def hacpo(
  drawn: Draw,
  *,
  std: bool = True,
  ratio: float | None = None,
  capability_baseline: bool = True,
  capability_weight: bool = True,
  **settings,
) -> np.ndarray:
  """Coefficients of HACPO; see `closed_form.hacpo`."""
  problem = drawn.problem
  if ratio is None:
    ratio = weights.capability_ratio(drawn.p_M1, problem.q)
  pooled, total_M1 = problem.pooled, drawn.k_M1 + drawn.l_M1
  mean_M1 = total_M1 / pooled
  if capability_baseline:
    able_M1 = (drawn.k_M1 + ratio * drawn.l_M1) / pooled
    able_M1 = np.where(able_M1 > 1, drawn.k_M1 / problem.group, able_M1)
    mixed_M1 = (total_M1 > 0) & (total_M1 < pooled)
    mean_M1 = np.where(mixed_M1, able_M1, mean_M1)
  advantage_MK = _advantages(
    drawn, total_M1, pooled, std, mean_M1, unbiased=True
  )
  weight_MK = weights.hacpo(drawn.pi_MK, problem.mu_K, **settings)
  if capability_weight:
    weight_MK = weight_MK / ratio
  rows_MK = drawn.own_MK + weight_MK * drawn.peer_MK
  return rows_MK * advantage_MK / pooled


def sgt(
  drawn: Draw,
  *,
  std: bool = True,
  weight: float = 0.1,
  normaliser: str = 'batch',
  batch: int = 1,
) -> np.ndarray:
  """Coefficients of SGT, a row for each batch of groups; `closed_form.sgt`."""
  right_MK = drawn.peer_MK * drawn.problem.reward_K
  # The success of rank floor(u l) among the l, in the order of actions.
  rank_M1 = np.floor(drawn.uniform_M1 * drawn.l_M1)
  upto_MK = np.cumsum(right_MK, 1)
  one_MK = (upto_MK > rank_M1) & (upto_MK - right_MK <= rank_M1)
  rescued_M1 = (drawn.k_M1 == 0) & (drawn.l_M1 > 0)
  transfer_MK = _batches(rescued_M1 * one_MK, batch).sum(1)
  count = batch
  if normaliser == 'rescue':
    count = np.maximum(transfer_MK.sum(1, keepdims=True), 1)
  own_MK = _batches(grpo(drawn, std=std), batch).mean(1)
  return own_MK + weight * transfer_MK / count


def graft(
  drawn: Draw,
  *,
  std: bool = True,
  success_only: bool = False,
  normaliser: str = 'group',
  **settings,
) -> np.ndarray:
  """Coefficients of GRAFT; see `closed_form.graft`."""
  problem = drawn.problem
  weight_MK = weights.graft(drawn.pi_MK, problem.mu_K, **settings)
  if success_only:
    weight_MK = weight_MK * problem.reward_K
  mixed_M1 = (drawn.l_M1 > 0) & (drawn.l_M1 < problem.peers)
  rows = problem.peers
  if normaliser == 'admitted':
    admitted_MK = drawn.peer_MK * (weight_MK > 0)
    rows = np.maximum(admitted_MK.sum(1, keepdims=True), 1)
  source_MK = _advantages(drawn, drawn.l_M1, problem.peers, True)
  grafted_MK = drawn.peer_MK * weight_MK * source_MK / np.maximum(rows, 1)
  taken_M1 = (drawn.k_M1 == 0) & mixed_M1
  return grpo(drawn, std=std) + taken_M1 * grafted_MK


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Estimate:
  """What sampled gradients come to.

  Attributes:
    updates: how many gradients there are, M.
    mean_K: their mean.
    covariance_KK: their covariance.
    second: mean of |g|^2.
    second_error: its standard error.
    no_signal: the share in which no row has an advantage and a weight.
  """

  updates: int
  mean_K: np.ndarray
  covariance_KK: np.ndarray
  second: float
  second_error: float
  no_signal: float

  def error(self, direction_K: np.ndarray) -> float:
    """The standard error of the mean along a direction."""
    variance = direction_K @ self.covariance_KK @ direction_K
    return float(np.sqrt(max(variance, 0.0) / self.updates))


def estimate(
  problem: problem_lib.Problem,
  simulator: Callable[[Draw], np.ndarray],
  groups: int,
  rng: np.random.Generator,
  chunk: int = 100_000,
) -> Estimate:
  """Simulates a method.

  Args:
    problem: the bandit.
    simulator: of `methods.METHODS`, or a function above with its settings.
    groups: how many; a multiple of the method's batch, as `chunk` is.
    rng: of all samples.
    chunk: groups that are held at once.

  Raises:
    InputError: groups or a chunk cannot be divided into batches.
  """
  sums = []
  for start in range(0, groups, chunk):
    drawn = draw(problem, min(chunk, groups - start), rng)
    part = _sums(simulator(drawn), problem)
    sums = [a + b for a, b in zip(sums, part, strict=True)] if sums else part
  return _estimate(sums)


def of_draw(drawn: Draw, simulator: Callable[[Draw], np.ndarray]) -> Estimate:
  """The same of groups that are drawn already, so that methods share them."""
  return _estimate(_sums(simulator(drawn), drawn.problem))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Curves:
  """The learner's p before each step and after the last.

  Attributes:
    expected_T: of steps along the expected gradient.
    sampled_ST: of steps along sampled gradients, by seed.
  """

  expected_T: np.ndarray
  sampled_ST: np.ndarray

  @property
  def mean_T(self) -> np.ndarray:
    """Over seeds."""
    return self.sampled_ST.mean(0)

  @property
  def spread_T(self) -> np.ndarray:
    """The standard deviation over seeds."""
    return self.sampled_ST.std(0)


def learn(
  problem: problem_lib.Problem,
  method: Method,
  rng: np.random.Generator,
  *,
  steps: int,
  rate: float,
  seeds: int,
) -> Curves:
  """Ascends expected and sampled gradients of the logits.

    theta <- theta + rate g,  pi = softmax(theta)

  The peer stays as it is. An action of probability 0 stays at 0.

  Args:
    problem: where the learner begins.
    method: a row of `methods.METHODS`.
    rng: of all seeds.
    steps: T.
    rate: the learning rate of plain gradient ascent.
    seeds: S, learners that begin alike and sample by themselves.
  """
  with np.errstate(divide='ignore'):
    start_1K = np.log(problem.pi_K)[None]

  def expected(pi_1K):
    at = dataclasses.replace(problem, pi_K=pi_1K[0])
    return method.closed_form(at).mean_K[None]

  def sampled(pi_SK):
    pi_MK = np.repeat(pi_SK, method.batch, 0)
    drawn = draw(problem, len(pi_MK), rng, pi_MK)
    return gradient(method.simulator(drawn), pi_SK)

  start_SK = np.repeat(start_1K, seeds, 0)
  return Curves(
    expected_T=_ascend(problem, start_1K, expected, steps, rate)[0],
    sampled_ST=_ascend(problem, start_SK, sampled, steps, rate),
  )


def _ascend(problem, theta_SK, of, steps, rate) -> np.ndarray:
  curve = []
  for step in range(steps + 1):
    pi_SK = _softmax(theta_SK)
    curve.append(pi_SK @ problem.reward_K)
    if step < steps:
      theta_SK = theta_SK + rate * of(pi_SK)
  return np.stack(curve, 1)


def _softmax(theta_SK):
  weight_SK = np.exp(theta_SK - theta_SK.max(1, keepdims=True))
  return weight_SK / weight_SK.sum(1, keepdims=True)


def _advantages(
  drawn, successes_M1, count, std, mean_M1=None, *, unbiased=False
) -> np.ndarray:
  """What a sample of each action has, against `count` rewards, [M, K].

  The deviation is from their first two moments, as in `sharing/grpo.py`; the
  closed forms have it from the counts.
  """
  count = max(count, 1)
  center_M1 = successes_M1 / count
  difference_MK = drawn.problem.reward_K - (
    center_M1 if mean_M1 is None else mean_M1
  )
  difference_MK = np.where(abs(difference_MK) < 1e-9, 0.0, difference_MK)
  if not std:
    return difference_MK
  variance_M1 = np.maximum(center_M1 - center_M1**2, 0.0)
  if unbiased:
    variance_M1 = variance_M1 * count / max(count - 1, 1)
  deviation_M1 = np.sqrt(variance_M1)
  equal_M1 = deviation_M1 < _EPSILON
  return difference_MK / np.where(equal_M1, 1.0, deviation_M1 + _EPSILON)


def _batches(x_MK, batch) -> np.ndarray:
  checks.require(
    len(x_MK) % batch == 0,
    f'{len(x_MK):,} groups; they must be a multiple of the batch of {batch}',
  )
  return x_MK.reshape(-1, batch, x_MK.shape[1])


def _sums(x_MK, problem) -> list:
  """Count, and sums of g, g g^T, |g|^2, |g|^4 and of updates without signal."""
  g_MK = gradient(x_MK, problem.pi_K)
  square_M = np.einsum('mk,mk->m', g_MK, g_MK)
  return [
    len(g_MK),
    g_MK.sum(0),
    g_MK.T @ g_MK,
    square_M.sum(),
    square_M @ square_M,
    (~x_MK.any(1)).sum(),
  ]


def _estimate(sums) -> Estimate:
  count, mean_K, second_KK, second, fourth, silent = (
    sums[0],
    *(total / sums[0] for total in sums[1:]),
  )
  return Estimate(
    updates=count,
    mean_K=mean_K,
    covariance_KK=second_KK - np.outer(mean_K, mean_K),
    second=float(second),
    second_error=float(np.sqrt(max(fourth - second**2, 0.0) / count)),
    no_signal=float(silent),
  )
