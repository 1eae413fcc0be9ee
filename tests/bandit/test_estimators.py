"""Weights and coefficients by hand; what training computes is the same."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax.bandit import estimators
from mrl_jax.bandit import methods
from mrl_jax.bandit import simulate
from mrl_jax.losses import grpo as grpo_loss
from mrl_jax.losses import gspo as gspo_loss
from mrl_jax.losses import hacpo as hacpo_loss
from mrl_jax.losses import prp as prp_loss
from mrl_jax.sharing import context as context_lib
from mrl_jax.sharing import graft
from mrl_jax.sharing import grpo
from mrl_jax.sharing import hacpo
from mrl_jax.sharing import peer_groups
from mrl_jax.sharing import xgrpo
from mrl_jax.thl import transfer
from tests import examples
from tests.bandit import problems

# The ratio is 1/2, 2 and 1; the peer never takes the last action.
PI_K = np.array([0.125, 0.5, 0.25, 0.125])
MU_K = np.array([0.25, 0.25, 0.25, 0.25]) * [1, 1, 1, 0]
SUCCESS_K, FAILURE_K = np.ones(4), np.zeros(4)


@pytest.mark.parametrize(
  ('estimator', 'success', 'failure'),
  [
    (estimators.Prp(), [0.5, 2, 1, 0], [0.5, 2, 1, 0]),
    (estimators.Prp(max_ratio=1.5), [0.5, 1.5, 1, 0], [0.5, 1.5, 1, 0]),
    (estimators.Prp(denominators='recompute'), [1, 1, 1, 0], [1, 1, 1, 0]),
    # Successes above 1.28 and failures below 0.8 have no gradient.
    (estimators.Prp(clip=(0.2, 0.28)), [0.5, 0, 1, 0], [0, 2, 1, 0]),
    # Truncation precedes the clip: a ratio truncated to within the clip stays.
    (
      estimators.Prp(clip=(0.2, 0.28), max_ratio=1.25),
      [0.5, 1.25, 1, 0],
      [0, 1.25, 1, 0],
    ),
    (estimators.Prp(error_K=np.log(2)), [1, 4, 2, 0], [1, 4, 2, 0]),
    # The erroneous ratio is what is truncated.
    (
      estimators.Prp(error_K=np.log([4, 1, 2, 9]), max_ratio=1.75),
      [1.75, 1.75, 1.75, 0],
      [1.75, 1.75, 1.75, 0],
    ),
    # Only ratios in [0.8, 1].
    (estimators.Hacpo(), [0, 0, 1, 0], [0, 0, 1, 0]),
    (estimators.Hacpo(low=0.5), [0.25, 0, 1, 0], [0.25, 0, 1, 0]),
    (estimators.Hacpo(low=0.5, alpha=0), [0.5, 0, 1, 0], [0.5, 0, 1, 0]),
    (estimators.Hacpo(clip=False), [0.25, 4, 1, 0], [0.25, 4, 1, 0]),
    (
      estimators.Hacpo(clip=False, alpha=2.0),
      [0.125, 8, 1, 0],
      [0.125, 8, 1, 0],
    ),
    (estimators.Hacpo(length=4, alpha=3), [0.5, 0, 1, 0], [0.5, 0, 1, 0]),
    (estimators.Graft(), [0, 1, 1, 0], [0, 1, 1, 0]),
    # Admitted are ratios above the floor, not at it.
    (estimators.Graft(floor=0.5), [0, 1, 1, 0], [0, 1, 1, 0]),
    (estimators.Graft(floor=0.49), [0.5, 1, 1, 0], [0.5, 1, 1, 0]),
    (
      estimators.Graft(floor=0.49, weighted=False),
      [1, 1, 1, 0],
      [1, 1, 1, 0],
    ),
    (estimators.Graft(gate=False), [0.5, 1, 1, 0], [0.5, 1, 1, 0]),
    (
      estimators.Graft(gate=False, weighted=False),
      [1, 1, 1, 0],
      [1, 1, 1, 0],
    ),
    (
      estimators.Graft(length=4, success_only=True),
      [0.5**0.25, 1, 1, 0],
      [0, 0, 0, 0],
    ),
  ],
)
def test_weights_by_hand(estimator, success, failure):
  for reward_K, expected_K in ((SUCCESS_K, success), (FAILURE_K, failure)):
    weight_K = estimator.weights(PI_K, MU_K, reward_K)
    np.testing.assert_allclose(weight_K, expected_K, rtol=1e-12)
    # Several learners at once, as in simulated learning.
    pi_MK = np.stack([PI_K[::-1], PI_K])
    weight_MK = estimator.weights(pi_MK, MU_K, reward_K)
    np.testing.assert_array_equal(weight_MK[1], weight_K)


def test_a_mean_ratio_is_per_token_and_bounded():
  for length in (1, 2):
    s_K = estimators.mean_ratio(PI_K, MU_K, length)
    expected_K = [0.5 ** (1 / length), 2 ** (1 / length), 1, 0]
    np.testing.assert_allclose(s_K, expected_K)
  s_K = estimators.mean_ratio(np.array([1e-9, 1]), np.array([1, 1e-9]), 1)
  np.testing.assert_allclose(s_K, np.exp([-10, 10]))
  # An action that the learner never takes has the least ratio there is.
  s_K = estimators.mean_ratio(np.array([0, 1]), np.array([0.5, 0.5]), 100)
  np.testing.assert_allclose(s_K, [np.exp(-10), 2**0.01])


def test_capability_ratios_are_bounded():
  p, q = np.array([0.3, 0.001, 0.9, 0, 0]), np.array([0.6, 0.6, 0.01, 0, 0.5])
  ratio = estimators.capability_ratio(p, q)
  np.testing.assert_allclose(ratio, [0.5, 0.1, 10, 1, 0.1])


def counts(own, peer):
  """Counts of one cell, for G = 2, H = 4 and p = q = 1/2."""
  problem = problems.small(2, 4)
  return estimators.Counts(
    problem, np.array([0.5]), np.array([own]), np.array([peer])
  )


@pytest.mark.parametrize(
  ('estimator', 'cell', 'own', 'peer'),
  [
    # b = 1/2, deviation 1/2, over 2 rows.
    (estimators.Grpo(), counts(1, 4), [-0.5, 0.5], [0, 0]),
    (estimators.Grpo(std=False), counts(1, 4), [-0.25, 0.25], [0, 0]),
    (estimators.Grpo(), counts(0, 4), [0, 0.5], [0, 0]),
    # b = 1/3, deviation sqrt(2) / 3, over 2 or 6 rows.
    (estimators.Xgrpo(), counts(1, 1), [-(0.5**1.5), 0.5**0.5], [0, 0]),
    (estimators.Xgrpo(std=False), counts(1, 1), [-1 / 6, 1 / 3], [0, 0]),
    (estimators.Prp(), counts(1, 1), [-1 / 18, 1 / 9], [-1 / 18, 1 / 9]),
    # The unbiased deviation of 2 successes in 6 is sqrt(4/15); w = 1.
    (
      estimators.Hacpo(),
      counts(1, 1),
      [-(15**0.5) / 36, 15**0.5 / 18],
      [-(15**0.5) / 36, 15**0.5 / 18],
    ),
    # b = (1 + 0.5) / 6 = 1/4; peer rows have 1/w = 2.
    (
      estimators.Hacpo(std=False, ratio=0.5),
      counts(1, 1),
      [-1 / 24, 1 / 8],
      [-1 / 12, 1 / 4],
    ),
    # (1 + 3 * 2) / 6 is above 1, so that b is the own mean, 1/2.
    (
      estimators.Hacpo(std=False, ratio=3, capability_weight=False),
      counts(1, 2),
      [-1 / 12, 1 / 12],
      [-1 / 12, 1 / 12],
    ),
    # All rewards are equal: b is their mean, whatever w is.
    (
      estimators.Hacpo(std=False, ratio=0.5),
      counts(2, 4),
      [-1 / 6, 0],
      [-1 / 3, 0],
    ),
    (
      estimators.Hacpo(std=False, ratio=0.5, capability_baseline=False),
      counts(1, 1),
      [-1 / 18, 1 / 9],
      [-1 / 9, 2 / 9],
    ),
    # l = 1 of 4: b = 1/4, deviation sqrt(3) / 4, by which the peer's rewards
    # are always divided.
    (
      estimators.Graft(std=False),
      counts(0, 1),
      [0, 0.5],
      [-(3**-0.5) / 4, 3**0.5 / 4],
    ),
    # Nothing is grafted if an own sample succeeds or all of the peer's agree.
    (estimators.Graft(std=False), counts(1, 1), [-0.25, 0.25], [0, 0]),
    (estimators.Graft(), counts(0, 4), [0, 0.5], [0, 0]),
    (estimators.Graft(), counts(0, 0), [0, 0.5], [0, 0]),
    (estimators.Sgt(), counts(1, 1), [-0.5, 0.5], [0, 0]),
  ],
)
def test_coefficients_of_a_failure_and_a_success_by_hand(
  estimator, cell, own, peer
):
  own_Z2, peer_Z2 = estimator.coefficients(cell)
  np.testing.assert_allclose(own_Z2, [own], atol=2e-6)
  np.testing.assert_allclose(peer_Z2, [peer], atol=2e-6)


def test_a_rounding_error_is_no_signal():
  # b = (1 + 4 w) / 6 is 1 up to rounding, which is what a success has.
  own_Z2, _ = estimators.Hacpo(ratio=1.25 - 1e-12).coefficients(counts(1, 4))
  assert own_Z2[0, 1] == 0


def test_hacpo_takes_the_capability_of_every_learner():
  two = counts(1, 1)._replace(p_Z=np.array([0.25, 1.0]))  # q is 1/2.
  found = estimators.Hacpo().coefficients(two)
  for i, ratio in enumerate((0.5, 2.0)):
    expected = estimators.Hacpo(ratio=ratio).coefficients(counts(1, 1))
    for found_22, expected_12 in zip(found, expected, strict=True):
      np.testing.assert_allclose(found_22[i], expected_12[0])


class Groups:
  """One own group of 3 and one peer group of 5, sample by sample.

  Sizes are the same for all seeds, so that JAX compiles once.
  """

  def __init__(self, seed):
    rng = np.random.default_rng(seed)
    policies = rng.dirichlet(np.ones(5), 2)
    self.problem = problems.problem(*policies, [1, 0, 1, 0, 0], 3, 5)
    self.own_G = rng.choice(5, 3, p=self.problem.pi_K)
    self.peer_H = rng.choice(5, 5, p=self.problem.mu_K)

  def advantages(self, baseline, scale, ratio=1.0):
    """What training computes for own and for peer samples."""
    rewards = [
      self.problem.reward_K[x][None] for x in (self.own_G, self.peer_H)
    ]
    own_P3, peer_P3 = map(context_lib.moments, rewards)
    seen = types.SimpleNamespace(
      own_moments_P3=own_P3,
      peer_moments={'peer': peer_P3},
      capability_ratio={'peer': ratio},
    )
    return [
      grpo.advantages(rewards_1G, baseline(seen), scale=scale)[0]
      for rewards_1G in rewards
    ]

  def gradient(self, estimator):
    """What the bandit computes, [K]."""
    own_1K, peer_1K = (
      np.bincount(x, minlength=5)[None] for x in (self.own_G, self.peer_H)
    )
    pi_1K = self.problem.pi_K[None]
    drawn = simulate.Draw(
      self.problem, pi_1K, own_1K, peer_1K, np.zeros((1, 1))
    )
    x_1K = simulate.coefficients(drawn, estimator)
    return simulate.gradient(x_1K, pi_1K)[0]


TOKENS = 3  # Of every response, each with the same log-probability.


def tokens(logp_K, actions_B):
  return jnp.tile(logp_K[actions_B][:, None] / TOKENS, (1, TOKENS))


@jax.jit
@jax.grad
def own_gradient(theta_K, own_G, advantage_G):
  logp_GT = tokens(jax.nn.log_softmax(theta_K), own_G)
  ratio_GT = jnp.exp(logp_GT - jax.lax.stop_gradient(logp_GT))
  value_GT = grpo_loss.clipped_surrogate(
    ratio_GT, advantage_G[:, None], *methods.CLIP
  )
  return value_GT.sum()


@jax.jit
@jax.grad
def prp_gradient(theta_K, mu_K, peer_H, advantage_H):
  rho_HT = prp_loss.chunk_ratio(
    tokens(jax.nn.log_softmax(theta_K), peer_H),
    tokens(jnp.log(mu_K), peer_H),
    jnp.zeros((len(peer_H), TOKENS), jnp.int32),
    methods.MAX_RATIO,
  )
  value_HT = grpo_loss.clipped_surrogate(
    rho_HT, advantage_H[:, None], *methods.CLIP
  )
  return value_HT.sum()


@jax.jit
@jax.grad
def hacpo_gradient(theta_K, mu_K, peer_H, advantage_H):
  logp_HT = tokens(jax.nn.log_softmax(theta_K), peer_H)
  s_HT = gspo_loss.sequence_ratio(
    logp_HT,
    tokens(jnp.log(mu_K), peer_H),
    jnp.ones_like(logp_HT, bool),
    jnp.ones_like(logp_HT, int),
    10.0,
  )
  low_H1 = hacpo_loss.lower_bound(0.5, 0.01, jnp.zeros((len(peer_H), 1)))
  value_HT = hacpo_loss.stepwise_surrogate(
    s_HT, advantage_H[:, None], low_H1, 1.0, 2.0
  )
  return value_HT.sum()


@pytest.mark.parametrize('seed', range(4))
def test_training_computes_these_gradients(seed):
  groups = Groups(seed)
  problem, peer_H = groups.problem, groups.peer_H
  theta_K, mu_K = jnp.log(problem.pi_K), jnp.asarray(problem.mu_K, jnp.float32)
  G, N = problem.own_samples, problem.samples

  def check(estimator, expected_K):
    np.testing.assert_allclose(
      groups.gradient(estimator), expected_K, rtol=2e-4, atol=1e-5
    )

  for std, scale in ((True, 'std'), (False, 'none')):
    for estimator, baseline in (
      (estimators.Grpo(std=std), grpo.own),
      (estimators.Xgrpo(std=std), xgrpo.pooled),
    ):
      advantage_G, _ = groups.advantages(baseline, scale)
      check(estimator, own_gradient(theta_K, groups.own_G, advantage_G) / G)

  advantage_G, advantage_H = groups.advantages(xgrpo.pooled, 'std')
  own_K = own_gradient(theta_K, groups.own_G, advantage_G)
  peer_K = prp_gradient(theta_K, mu_K, peer_H, advantage_H)
  check(methods.METHODS['PRP'], (own_K + peer_K) / N)

  for ratio in (0.6, 2.5):
    advantage_G, advantage_H = groups.advantages(
      hacpo.baseline, 'unbiased_std', ratio
    )
    own_K = own_gradient(theta_K, groups.own_G, advantage_G)
    peer_K = hacpo_gradient(theta_K, mu_K, peer_H, advantage_H / ratio)
    estimator = estimators.Hacpo(ratio=ratio, length=TOKENS, low=0.5, alpha=2.0)
    check(estimator, (own_K + peer_K) / N)


@pytest.mark.parametrize('length', [1, 4])
def test_training_grafts_these_rows(length):
  shares = set()
  for seed in range(5):
    groups = Groups(seed)
    problem = groups.problem
    groups.own_G[:] = 1  # A failure.
    rows = grafted_rows(groups, length)
    if np.ptp(problem.reward_K[groups.peer_H]) == 0:
      continue
    shares.add(len(rows))
    sum_K = np.zeros(5) + sum(
      row.weight * row.advantage * problem.score_KK[groups.peer_H[row.prompt]]
      for row in rows
    )
    gradient_K = groups.gradient(estimators.Graft(length=length))
    np.testing.assert_allclose(gradient_K, sum_K / 5, atol=1e-6)
  assert len(shares) > 2


def grafted_rows(groups, length):
  """The rows of `sharing/graft.py`; every sample is a prompt of its own."""
  problem, peer_H = groups.problem, groups.peer_H

  def logp(policy_K, h, tokens):
    value = np.log(policy_K[peer_H[h]]) / length
    return np.full(tokens, value, np.float32)

  rollouts = [
    examples.rollout(
      reward=problem.reward_K[a], logp=logp(problem.mu_K, h, 5), sample=h
    )
    for h, a in enumerate(peer_H)
  ]
  peer_group = grpo.judged(rollouts, [(r.reward, r.verdict) for r in rollouts])
  context = context_lib.Context(
    groups=(),
    received=(),
    settings=examples.run_config().method,
    tokenizer=examples.tokenizer('byte_level'),
    limits=transfer.Limits(max_tokens=20),
    judge=None,
    score=lambda rows: [
      logp(problem.pi_K, row.prompt, len(row.ids)) for row in rows
    ],
    rng=np.random.default_rng(0),
    capability_ratio={},
  )
  one_each = [
    peer_groups.PeerGroup('peer', h, 1, int(rollout.success), [rollout])
    for h, rollout in enumerate(peer_group)
  ]
  return graft.rows(one_each, context)
