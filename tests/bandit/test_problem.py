import itertools
import math

import numpy as np
import pytest

from mrl_jax import checks
from mrl_jax.bandit import problem as problem_lib
from tests.bandit import problems


def example(**changes):
  values = {
    'pi_K': [0.25, 0.25, 0.5],
    'mu_K': [0.5, 0.25, 0.25],
    'reward_K': [1, 0, 0],
    'own_samples': 2,
    'peer_samples': 3,
  }
  return problem_lib.Problem(**{**values, **changes})


def test_rates_directions_and_divergence_by_hand():
  problem = example()
  assert (problem.p, problem.q, problem.samples) == (0.25, 0.5, 5)
  np.testing.assert_allclose(problem.u_S_K, [0.75, -0.25, -0.5])
  u_F_K = problems.failure_direction(problem)
  np.testing.assert_allclose(u_F_K, [-0.25, 1 / 12, 1 / 6])
  np.testing.assert_allclose(problem.grad_J_K, [3 / 16, -1 / 16, -1 / 8])
  # 1/16 / 1/2 + 1/16 / 1/4 + 1/4 / 1/4 = 11/8
  assert problem.chi2 == pytest.approx(3 / 8)
  # (3/4)^2 (1 - (1/2)^3)
  assert problem.rescue == pytest.approx(9 / 16 * 7 / 8)


def test_scores_have_mean_0_and_grad_j_is_the_gradient_of_p():
  for problem in problems.several():
    p, u_S_K = problem.p, problem.u_S_K
    u_F_K = problems.failure_direction(problem)
    np.testing.assert_allclose(problem.pi_K @ problem.score_KK, 0, atol=1e-12)
    np.testing.assert_allclose(p * u_S_K + (1 - p) * u_F_K, 0, atol=1e-12)
    step = 1e-6
    theta_KK = np.log(problem.pi_K) + step * np.eye(len(problem.pi_K))
    weight_KK = np.exp(theta_KK)
    rise_K = weight_KK @ problem.reward_K / weight_KK.sum(1) - p
    np.testing.assert_allclose(rise_K / step, problem.grad_J_K, atol=1e-5)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'pi_K': [0.5, 0.5, 0.5]}, 'pi_K'),
    ({'mu_K': [1.5, -0.5, 0.0]}, 'mu_K'),
    ({'mu_K': [np.nan, 0.5, 0.5]}, 'mu_K'),
    ({'pi_K': [0.5, 0.5]}, 'must be 3 probabilities'),
    ({'reward_K': [0, 0, 0]}, 'contains 0 and 1'),
    ({'reward_K': [1, 1, 1]}, 'contains 0 and 1'),
    ({'reward_K': [1, 0, 0.5]}, 'nothing else'),
    ({'own_samples': 0}, 'own_samples = 0'),
    ({'peer_samples': -1}, 'peer_samples = -1'),
    ({'own_samples': 1001}, 'own_samples = 1001'),
  ],
)
def test_invalid_problems_are_refused(changes, message):
  with pytest.raises(checks.InputError, match=message):
    example(**changes)


def test_policies_that_never_or_always_succeed_have_finite_directions():
  never = example(pi_K=[0, 0.5, 0.5])
  assert (never.p, never.u_S_K.any()) == (0, False)
  assert not problems.failure_direction(never).any()
  always = example(pi_K=[1, 0, 0])
  assert (always.p, always.u_S_K.any()) == (1, False)
  assert not problems.failure_direction(always).any()
  assert example(mu_K=[0, 0.5, 0.5]).rescue == 0
  assert example(mu_K=[0, 0.5, 0.5]).chi2 == np.inf
  assert example(pi_K=[0, 0.5, 0.5], mu_K=[0, 0.5, 0.5]).chi2 == 0


def test_replace_changes_success_rates_and_keeps_conditional_policies():
  problem = example(reward_K=[1, 1, 0]).replace(p=0.1, q=0.9, own_samples=7)
  np.testing.assert_allclose(problem.pi_K, [0.05, 0.05, 0.9])
  np.testing.assert_allclose(problem.mu_K, [0.6, 0.3, 0.1])
  assert (problem.own_samples, problem.peer_samples) == (7, 3)
  with pytest.raises(checks.InputError, match='sometimes succeeds and'):
    example(pi_K=[0, 0.5, 0.5]).replace(p=0.1)
  with pytest.raises(checks.InputError, match='from 0 to 1'):
    example().replace(q=1.1)


def test_a_text_is_the_product_of_its_tokens():
  problem = problem_lib.text(4, 0.7, own_samples=2, peer_samples=2)
  for a, tokens in enumerate(itertools.product((0, 1), repeat=4)):
    assert problem.pi_K[a] == 1 / 16
    expected = math.prod((0.7, 0.3)[token] for token in tokens)
    assert problem.mu_K[a] == pytest.approx(expected)
    assert problem.reward_K[a] == (tokens[-1] == 0)
  assert (problem.p, problem.q) == (0.5, pytest.approx(0.7))
  assert 1 + problem.chi2 == pytest.approx((0.25 / 0.7 + 0.25 / 0.3) ** 4)
