import itertools

import numpy as np
import pytest

from mrl_jax import checks
from mrl_jax.bandit import problem as problem_lib


def example(**changes):
  values = {
    'pi_K': [0.25, 0.25, 0.5],
    'mu_K': [0.5, 0.25, 0.25],
    'reward_K': [1, 0, 0],
    'group': 2,
    'peers': 3,
  }
  return problem_lib.Problem(**{**values, **changes})


def test_rates_directions_and_distance_by_hand():
  problem = example()
  assert (problem.p, problem.q, problem.pooled) == (0.25, 0.5, 5)
  np.testing.assert_allclose(problem.u_S_K, [0.75, -0.25, -0.5])
  np.testing.assert_allclose(problem.u_F_K, [-0.25, 1 / 12, 1 / 6])
  np.testing.assert_allclose(problem.grad_J_K, [3 / 16, -1 / 16, -1 / 8])
  # 1/16 / 1/2 + 1/16 / 1/4 + 1/4 / 1/4 = 11/8
  assert problem.chi2 == pytest.approx(3 / 8)
  # (3/4)^2 (1 - (1/2)^3)
  assert problem.rescue == pytest.approx(9 / 16 * 7 / 8)


def test_scores_have_no_mean_and_are_the_gradient_of_log_pi():
  rng = np.random.default_rng(0)
  for _ in range(20):
    problem = problem_lib.random(rng)
    p, u_S_K, u_F_K = problem.p, problem.u_S_K, problem.u_F_K
    np.testing.assert_allclose(problem.pi_K @ problem.score_KK, 0, atol=1e-12)
    np.testing.assert_allclose(p * u_S_K + (1 - p) * u_F_K, 0, atol=1e-12)
    theta_K, step = np.log(problem.pi_K), 1e-6
    for a in range(len(theta_K)):
      weight_K = np.exp(theta_K + step * (np.arange(len(theta_K)) == a))
      rise = weight_K @ problem.reward_K / weight_K.sum() - p
      assert rise / step == pytest.approx(problem.grad_J_K[a], abs=1e-5)


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    ({'pi_K': [0.5, 0.5, 0.5]}, 'pi_K'),
    ({'mu_K': [1.5, -0.5, 0.0]}, 'mu_K'),
    ({'mu_K': [np.nan, 0.5, 0.5]}, 'mu_K'),
    ({'pi_K': [0.5, 0.5]}, 'shape'),
    ({'reward_K': [0, 0, 0]}, 'has both'),
    ({'reward_K': [1, 1, 1]}, 'has both'),
    ({'reward_K': [1, 0, 0.5]}, '0 and 1'),
    ({'group': 0}, 'group = 0'),
    ({'peers': -1}, 'peers = -1'),
    ({'group': 1001}, 'group = 1001'),
  ],
)
def test_what_is_no_problem_is_refused(changes, words):
  with pytest.raises(checks.InputError, match=words):
    example(**changes)


def test_a_learner_that_never_or_always_succeeds_has_finite_directions():
  never = example(pi_K=[0, 0.5, 0.5])
  assert (never.p, never.u_S_K.any(), never.u_F_K.any()) == (0, False, False)
  always = example(pi_K=[1, 0, 0])
  assert (always.p, always.u_S_K.any(), always.u_F_K.any()) == (1, False, False)
  assert example(mu_K=[0, 0.5, 0.5]).rescue == 0
  assert example(mu_K=[0, 0.5, 0.5]).chi2 == np.inf
  assert example(pi_K=[0, 0.5, 0.5], mu_K=[0, 0.5, 0.5]).chi2 == 0


def test_rates_change_and_what_is_inside_does_not():
  problem = example(reward_K=[1, 1, 0]).with_rates(p=0.1, q=0.9)
  np.testing.assert_allclose(problem.pi_K, [0.05, 0.05, 0.9])
  np.testing.assert_allclose(problem.mu_K, [0.6, 0.3, 0.1])
  with pytest.raises(checks.InputError, match='no such actions'):
    example(pi_K=[0, 0.5, 0.5]).with_rates(p=0.1)
  with pytest.raises(checks.InputError, match='from 0 to 1'):
    example().with_rates(q=1.1)


def test_random_problems_are_of_all_sizes_and_reproducible():
  def sizes(seed):
    rng = np.random.default_rng(seed)
    drawn = [problem_lib.random(rng, most_actions=4) for _ in range(200)]
    assert all((p.pi_K >= 0.2 / len(p.pi_K) - 1e-12).all() for p in drawn)
    return [(len(p.pi_K), p.group, p.peers, p.reward_K.sum()) for p in drawn]

  assert sizes(0) == sizes(0) != sizes(1)
  for column, values in zip(
    zip(*sizes(0), strict=True),
    (range(2, 5), range(1, 7), range(1, 7), range(1, 4)),
    strict=True,
  ):
    assert {*column} == {*values}


def test_a_text_is_the_product_of_its_tokens():
  rng = np.random.default_rng(0)
  pi_TV, mu_TV = rng.dirichlet(np.ones(3), 4), rng.dirichlet(np.ones(3), 4)
  problem = problem_lib.text(pi_TV, mu_TV, [1, 0, 0], group=2, peers=2)
  for a, tokens in enumerate(itertools.product(range(3), repeat=4)):
    chance = np.prod([pi_TV[t, v] for t, v in enumerate(tokens)])
    assert problem.pi_K[a] == pytest.approx(chance)
    assert problem.reward_K[a] == (tokens[-1] == 0)
  assert problem.p == pytest.approx(pi_TV[-1, 0])
  assert problem.q == pytest.approx(mu_TV[-1, 0])
  assert 1 + problem.chi2 == pytest.approx(np.prod((pi_TV**2 / mu_TV).sum(1)))
