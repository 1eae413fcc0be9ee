import numpy as np

from mrl_jax.sharing import grpo


def advantages(rewards):
  rewards_PG = np.array(rewards, np.float64)
  return grpo.advantages(rewards_PG, grpo.moments(rewards_PG))


def test_moments():
  np.testing.assert_array_equal(
    grpo.moments(np.array([[1.0, 0.0, 2.0]])), [[3.0, 3.0, 5.0]]
  )


def test_numbers_worked_by_hand():
  # Mean 1/4, deviation sqrt(1/4 - 1/16) = .4330; (1 - .25) / .4330 = 1.7320.
  expected = [[1.7320468, -0.5773490, -0.5773490, -0.5773490]]
  np.testing.assert_allclose(advantages([[1, 0, 0, 0]]), expected, rtol=1e-6)


def test_equal_rewards_have_no_advantage_at_all():
  for reward in (0.0, 1.0, 0.1, 0.7, 1 / 3):
    for size in range(2, 17):
      assert not advantages([[reward] * size]).any()


def test_a_group_of_one_has_none_and_is_not_nan():
  np.testing.assert_array_equal(advantages([[1.0], [0.5]]), [[0.0], [0.0]])


def test_own_baseline_ignores_peers():
  own_P3 = grpo.moments(np.array([[1.0, 0.0]]))
  np.testing.assert_array_equal(grpo.own(own_P3, np.ones((1, 3))), own_P3)
