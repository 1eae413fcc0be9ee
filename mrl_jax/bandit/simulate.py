"""Sampled gradients of the same estimators, and learning along them.

A sampled gradient is held as x_MK, for each action the sum of coefficient times
weight over its samples; the gradient is x - pi sum_a x(a). Actions are counted,
not listed, so that the cost of a group does not grow with its size.
"""

from typing import NamedTuple

import numpy as np

from mrl_jax import checks
from mrl_jax.bandit import closed_form
from mrl_jax.bandit import estimators
from mrl_jax.bandit import problem as problem_lib

_CHUNK = 100_000  # Groups in memory at once; a multiple of the batches in use.


class Draw(NamedTuple):
  """Own and peer groups that are sampled for M prompts, all the same problem."""

  problem: problem_lib.Problem
  pi_MK: np.ndarray  # f64, each group's learner; [1, K] if the same for all.
  own_MK: np.ndarray  # How often each action is in the own group.
  peer_MK: np.ndarray  # How often each action is in the peer's group.
  uniform_M1: np.ndarray  # f64 in [0, 1); decides which success SGT transfers.


def draw(
  problem: problem_lib.Problem,
  groups: int,
  rng: np.random.Generator,
  pi_MK: np.ndarray | None = None,
) -> Draw:
  """Samples M = `groups` own groups, and as many of the peer.

  `pi_MK` is a learner per group, by default the problem's learner.
  """
  if pi_MK is None:
    pi_MK = problem.pi_K[None]
  own_MK = rng.multinomial(problem.own_samples, pi_MK, size=groups)
  peer_MK = rng.multinomial(problem.peer_samples, problem.mu_K, size=groups)
  return Draw(problem, pi_MK, own_MK, peer_MK, rng.random((groups, 1)))


def coefficients(drawn: Draw, estimator: estimators.Estimator) -> np.ndarray:
  """The sampled x of every update, f64 [M / batch, K].

  Raises InputError if M is no multiple of the estimator's batch.
  """
  problem, batch = drawn.problem, estimator.batch
  reward_K = problem.reward_K
  weight_MK = estimator.weights(drawn.pi_MK, problem.mu_K, reward_K)
  by_action = (drawn.pi_MK, drawn.own_MK, drawn.peer_MK)
  counts = estimators.Counts(problem, *(x_MK @ reward_K for x_MK in by_action))
  own_M2, peer_M2 = estimator.coefficients(counts)
  index_K = reward_K.astype(int)
  x_MK = drawn.own_MK * own_M2[:, index_K]
  x_MK += drawn.peer_MK * weight_MK * peer_M2[:, index_K]
  checks.require(
    len(x_MK) % batch == 0,
    f'{len(x_MK):,} groups; they must be a multiple of the batch of {batch}',
  )
  if not isinstance(estimator, estimators.Sgt):
    return x_MK
  transfer_MK = _transfers(drawn, counts).reshape(-1, batch, len(reward_K))
  transfer_UK = transfer_MK.sum(1)
  divisor = batch
  if estimator.normaliser == 'rescue':
    divisor = np.maximum(transfer_UK.sum(1, keepdims=True), 1)
  own_UK = x_MK.reshape(transfer_MK.shape).mean(1)
  return own_UK + estimator.weight * transfer_UK / divisor


def _transfers(drawn, counts) -> np.ndarray:
  """1 for the success that each rescued prompt transfers, else 0, [M, K].

  Peer successes are ordered by action, and the one of rank floor(u l) among l
  is transferred. Example: for successes (2, 0, 1) by action, ranks 0 and 1 are
  action 0, rank 2 is action 2; cumulative counts are (2, 2, 3).
  """
  success_MK = drawn.peer_MK * drawn.problem.reward_K
  rank_M1 = np.floor(drawn.uniform_M1 * counts.peer_Z[:, None])
  through_MK = np.cumsum(success_MK, 1)
  chosen_MK = (through_MK > rank_M1) & (through_MK - success_MK <= rank_M1)
  rescued_M = (counts.own_Z == 0) & (counts.peer_Z > 0)
  return rescued_M[:, None] * chosen_MK


def gradient(x_MK: np.ndarray, pi_MK: np.ndarray) -> np.ndarray:
  """The gradient sum_a x(a) s(a) = x - pi sum_a x(a), [M, K]."""
  return x_MK - x_MK.sum(1, keepdims=True) * pi_MK


def estimate(
  problem: problem_lib.Problem,
  estimator: estimators.Estimator,
  groups: int,
  rng: np.random.Generator,
) -> closed_form.Moments:
  """The moments of the gradients of so many sampled own and peer groups.

  Raises InputError if the groups cannot be divided into batches.
  """
  sums = []
  for start in range(0, groups, _CHUNK):
    drawn = draw(problem, min(_CHUNK, groups - start), rng)
    g_MK = gradient(coefficients(drawn, estimator), problem.pi_K)
    sums.append((len(g_MK), g_MK.sum(0), g_MK.T @ g_MK))
  count, sum_K, sum_KK = map(sum, zip(*sums, strict=True))
  mean_K = sum_K / count
  covariance_KK = sum_KK / count - np.outer(mean_K, mean_K)
  return closed_form.Moments(problem, mean_K, covariance_KK)


class Curves(NamedTuple):
  """The learner's success rate p before the first and after every update."""

  expected_T: np.ndarray  # Along the expected gradient.
  sampled_ST: np.ndarray  # Along sampled gradients, by seed.


def learn(
  problem: problem_lib.Problem,
  estimator: estimators.Estimator,
  *,
  updates: int,
  rate: float,
  seeds: int,
  seed: int = 0,
) -> Curves:
  """Ascends the expected and sampled gradients of a method.

    theta <- theta + rate g,  pi = softmax(theta)

  The peer does not learn. An action of probability 0 stays at 0. S = `seeds`
  independent learners ascend sampled gradients. Their random numbers come from
  `seed`, which should be the same for methods to compare.
  """
  rng = np.random.default_rng(seed)

  def expected(pi_1K):
    at = problem.replace(pi_K=pi_1K[0])
    return closed_form.moments(at, estimator).mean_K[None]

  def sampled(pi_SK):
    pi_MK = np.repeat(pi_SK, estimator.batch, 0)
    drawn = draw(problem, len(pi_MK), rng, pi_MK)
    return gradient(coefficients(drawn, estimator), pi_SK)

  def ascend(learners, gradient_of):
    with np.errstate(divide='ignore'):
      theta_SK = np.log(np.tile(problem.pi_K, (learners, 1)))
    curve = []
    for update in range(updates + 1):
      weight_SK = np.exp(theta_SK - theta_SK.max(1, keepdims=True))
      pi_SK = weight_SK / weight_SK.sum(1, keepdims=True)
      curve.append(pi_SK @ problem.reward_K)
      if update < updates:
        theta_SK = theta_SK + rate * gradient_of(pi_SK)
    return np.stack(curve, 1)

  return Curves(ascend(1, expected)[0], ascend(seeds, sampled))
