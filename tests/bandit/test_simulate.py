"""Sampled gradients have the exact moments, and learning follows both."""

import itertools
import math

import numpy as np
import pytest

from mrl_jax import checks
from mrl_jax.bandit import closed_form
from mrl_jax.bandit import estimators
from mrl_jax.bandit import methods
from mrl_jax.bandit import simulate
from tests.bandit import problems

# The table, and settings that it leaves at their defaults.
VARIANTS = {
  **methods.METHODS,
  'PRP, cut and clipped': estimators.Prp(max_ratio=1.5, clip=(0.1, 0.1)),
  'PRP, with THL errors': estimators.Prp(error_K=np.array([0.3, -0.5, 0.1])),
  'SGT, by batch': estimators.Sgt(weight=1.0, batch=2),
  'SGT, by rescued': estimators.Sgt(
    weight=1.0, batch=2, normaliser='rescue', std=False
  ),
  'HACPO, able': estimators.Hacpo(ratio=2.5, std=False, low=0.5),
  'HACPO, bare': estimators.Hacpo(
    ratio=0.4,
    clip=False,
    alpha=0.0,
    capability_baseline=False,
    capability_weight=False,
  ),
  'GRAFT, unweighted': estimators.Graft(weighted=False, floor=0.5),
  'GRAFT, all': estimators.Graft(gate=False, std=False),
  'GRAFT, successes': estimators.Graft(success_only=True, length=5.0),
}


def groups(policy_K, size):
  """All groups of a size as action counts, with their probabilities."""
  samples = itertools.product(range(len(policy_K)), repeat=size)
  chances = {}
  for sample in samples:
    count = tuple(np.bincount(sample, minlength=len(policy_K)))
    chances[count] = chances.get(count, 0.0) + math.prod(policy_K[[*sample]])
  return chances


def every_draw(problem, batch):
  """A `Draw` of every possible outcome, and the outcomes' probabilities."""
  ranks = math.lcm(*range(1, problem.peer_samples + 1))
  outcomes = [
    (own, peer, (rank + 0.5) / ranks, chance * other / ranks)
    for (own, chance), (peer, other), rank in itertools.product(
      groups(problem.pi_K, problem.own_samples).items(),
      groups(problem.mu_K, problem.peer_samples).items(),
      range(ranks),
    )
  ]
  batches = list(itertools.product(outcomes, repeat=batch))
  own_MK, peer_MK, uniform_M, chance_M = (
    np.array([outcome[i] for outcomes in batches for outcome in outcomes])
    for i in range(4)
  )
  drawn = simulate.Draw(
    problem, problem.pi_K[None], own_MK, peer_MK, uniform_M[:, None]
  )
  return drawn, chance_M.reshape(-1, batch).prod(1)


@pytest.fixture(scope='module')
def enumerated():
  """Small problems of three actions, with every draw by size of the batch."""
  rng = np.random.default_rng(0)
  found = []
  for G, H, reward_K in ((2, 3, [1, 0, 0]), (3, 2, [1, 1, 0])):
    policies = rng.dirichlet(np.ones(3), 2)
    problem = problems.problem(*policies, reward_K, G, H)
    small = problem.replace(own_samples=2, peer_samples=2)
    found.append((problem, {1: every_draw(problem, 1)}))
    found.append((small, {b: every_draw(small, b) for b in (1, 2)}))
  return found


@pytest.mark.parametrize('name', VARIANTS)
def test_closed_forms_are_the_moments_over_all_possible_draws(name, enumerated):
  estimator = VARIANTS[name]
  for problem, by_batch in enumerated:
    if estimator.batch not in by_batch:
      continue
    drawn, chance_U = by_batch[estimator.batch]
    exact = closed_form.moments(problem, estimator)
    x_UK = simulate.coefficients(drawn, estimator)
    g_UK = simulate.gradient(x_UK, problem.pi_K)
    mean_K = chance_U @ g_UK
    off_UK = g_UK - mean_K
    covariance_KK = (chance_U[:, None] * off_UK).T @ off_UK
    np.testing.assert_allclose(exact.mean_K, mean_K, atol=1e-12)
    np.testing.assert_allclose(exact.covariance_KK, covariance_KK, atol=1e-12)


def test_draws_have_the_given_sizes_and_policies():
  rng = np.random.default_rng(0)
  problem = problems.EVEN
  pi_MK = np.repeat(rng.dirichlet(np.ones(4), 2), 4000, 0)
  drawn = simulate.draw(problem, 8000, rng, pi_MK)
  assert (drawn.own_MK.sum(1) == problem.own_samples).all()
  assert (drawn.peer_MK.sum(1) == problem.peer_samples).all()
  for half in (slice(0, 4000), slice(4000, None)):
    mean_K = drawn.own_MK[half].mean(0) / problem.own_samples
    np.testing.assert_allclose(mean_K, pi_MK[half][0], atol=0.02)
  mean_K = drawn.peer_MK.mean(0) / problem.peer_samples
  np.testing.assert_allclose(mean_K, problem.mu_K, atol=0.02)
  drawn = simulate.draw(problem, 8000, rng)
  mean_K = drawn.own_MK.mean(0) / problem.own_samples
  np.testing.assert_allclose(mean_K, problem.pi_K, atol=0.02)
  np.testing.assert_array_equal(drawn.pi_MK, [problem.pi_K])
  np.testing.assert_allclose(np.ptp(drawn.uniform_M1), 1, atol=0.01)


def test_an_estimate_has_the_moments_of_all_draws_together(monkeypatch):
  monkeypatch.setattr(simulate, '_CHUNK', 16)
  estimator, problem = methods.METHODS['SGT, by rescued'], problems.EVEN
  found = simulate.estimate(problem, estimator, 40, np.random.default_rng(0))
  rng = np.random.default_rng(0)
  drawn = [simulate.draw(problem, groups, rng) for groups in (16, 16, 8)]
  x_UK = np.concatenate([simulate.coefficients(of, estimator) for of in drawn])
  g_UK = simulate.gradient(x_UK, problem.pi_K)
  assert len(g_UK) == 10
  np.testing.assert_allclose(found.mean_K, g_UK.mean(0))
  np.testing.assert_allclose(
    found.covariance_KK, np.cov(g_UK.T, bias=True), atol=1e-12
  )
  assert found.second == pytest.approx((g_UK**2).sum(1).mean())


def test_learners_ascend_the_gradients_of_their_own_samples(monkeypatch):
  seen = []

  def draw(*arguments):
    seen.append(original(*arguments))
    return seen[-1]

  original = simulate.draw
  monkeypatch.setattr(simulate, 'draw', draw)
  estimator = estimators.Sgt(batch=2)
  curves = simulate.learn(
    problems.EVEN, estimator, updates=3, rate=0.5, seeds=4
  )
  theta_SK = np.tile(np.log(problems.EVEN.pi_K), (4, 1))
  for update, drawn in enumerate(seen):
    pi_SK = np.exp(theta_SK) / np.exp(theta_SK).sum(1, keepdims=True)
    np.testing.assert_allclose(drawn.pi_MK, np.repeat(pi_SK, 2, 0))
    np.testing.assert_allclose(
      curves.sampled_ST[:, update], pi_SK @ problems.EVEN.reward_K
    )
    x_SK = simulate.coefficients(drawn, estimator)
    theta_SK += 0.5 * simulate.gradient(x_SK, pi_SK)
  assert update == 2
  assert curves.sampled_ST.shape == (4, 4)
  assert len({*curves.sampled_ST[:, -1]}) == 4


@pytest.mark.parametrize('name', ['SGT', 'HACPO'])
def test_expected_ascent_follows_the_closed_form_at_every_step(name):
  estimator, problem = methods.METHODS[name], problems.HARD
  curves = simulate.learn(problem, estimator, updates=20, rate=1.0, seeds=1)
  for p in curves.expected_T:
    assert problem.p == pytest.approx(p)
    mean_K = closed_form.moments(problem, estimator).mean_K
    weight_K = problem.pi_K * np.exp(mean_K)
    problem = problem.replace(pi_K=weight_K / weight_K.sum())


def test_only_demonstrations_rescue_a_learner_that_fails():
  def learn(estimator):
    return simulate.learn(
      problems.HARD, estimator, updates=60, rate=0.5, seeds=50
    )

  for estimator in (estimators.Grpo(), estimators.Xgrpo(), estimators.Prp()):
    curves = learn(estimator)
    assert curves.expected_T[-1] < 0.05, estimator
    assert np.median(curves.sampled_ST[:, -1]) < 0.05, estimator
  sgt = learn(estimators.Sgt(weight=1.0))
  assert sgt.expected_T[-1] > 0.9
  assert sgt.sampled_ST[:, -1].min() > 0.5


def test_learning_is_reproducible_and_ends_at_success():
  def learn(seed):
    return simulate.learn(
      problems.EVEN,
      estimators.Grpo(),
      updates=100,
      rate=0.5,
      seeds=20,
      seed=seed,
    )

  first, same, other = learn(0), learn(0), learn(1)
  np.testing.assert_array_equal(first.sampled_ST, same.sampled_ST)
  assert (first.sampled_ST != other.sampled_ST).any()
  assert first.expected_T[-1] > 0.9
  assert first.sampled_ST[:, -1].mean() > 0.85


def test_an_action_of_probability_0_is_never_learnt():
  problem = problems.problem([0, 0.5, 0.5], [0.4, 0.4, 0.2], [1, 1, 0], 2, 2)
  curves = simulate.learn(
    problem, estimators.Sgt(), updates=3, rate=1.0, seeds=2
  )
  assert np.isfinite(curves.sampled_ST).all()
  assert np.isfinite(curves.expected_T).all()


def test_groups_that_do_not_fill_batches_are_refused():
  drawn = simulate.draw(problems.EVEN, 10, np.random.default_rng(0))
  with pytest.raises(checks.InputError, match='multiple of the batch of 4'):
    simulate.coefficients(drawn, methods.METHODS['SGT, by rescued'])
