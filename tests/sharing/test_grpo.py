import numpy as np
import pytest

from mrl_jax.sharing import context as context_lib
from mrl_jax.sharing import grpo
from tests import examples


def advantages(rewards, **settings):
  rewards_PG = np.array(rewards, np.float64)
  baseline = grpo.baseline(context_lib.moments(rewards_PG))
  return grpo.advantages(rewards_PG, baseline, **settings)


def test_numbers_worked_by_hand():
  # Mean 1/4, deviation sqrt(1/4 - 1/16) = .4330; (1 - .25) / .4330 = 1.7320.
  expected = [[1.7320468, -0.5773490, -0.5773490, -0.5773490]]
  np.testing.assert_allclose(advantages([[1, 0, 0, 0]]), expected, rtol=1e-6)


@pytest.mark.parametrize(
  ('scale', 'unit'),
  [
    # 1 0 0 0 and 1 1 1 0: both have variance 3/16, and 4/16 with n - 1.
    ('std', np.sqrt(3 / 16)),
    ('unbiased_std', 1 / 2),
    ('batch_std', 1 / 2),  # Four of eight: mean 1/2, variance 1/4.
    ('none', 1.0),
  ],
)
def test_an_advantage_is_divided_by_the_scale(scale, unit):
  found = advantages([[1, 0, 0, 0], [1, 1, 1, 0]], scale=scale)
  plain = np.array([[3, -1, -1, -1], [1, 1, 1, -3]]) / 4
  np.testing.assert_allclose(found, plain / unit, rtol=1e-5)


def test_leave_one_out_compares_with_the_others():
  # 1 against the mean of 0 0 0, and 0 against that of 1 0 0.
  found = advantages([[1, 0, 0, 0]], scale='none', leave_one_out=True)
  np.testing.assert_allclose(found, [[1, -1 / 3, -1 / 3, -1 / 3]], rtol=1e-6)


def test_rewards_of_some_prompts_are_compared_with_the_baselines_of_those():
  rewards_PG = np.array([[1.0, 0.0], [3.0, 1.0], [0.0, 0.0]])
  baseline = grpo.baseline(context_lib.moments(rewards_PG))
  for scale in grpo.SCALES:
    whole = grpo.advantages(rewards_PG, baseline, scale=scale)
    part = grpo.advantages(
      rewards_PG[[1, 1, 0], :1], baseline, scale=scale, prompts=[1, 1, 0]
    )
    np.testing.assert_array_equal(part, whole[[1, 1, 0], :1])


@pytest.mark.parametrize('scale', grpo.SCALES)
@pytest.mark.parametrize('leave_one_out', [False, True])
def test_equal_rewards_have_zero_advantage_exactly(scale, leave_one_out):
  settings = {'scale': scale, 'leave_one_out': leave_one_out}
  for reward in (0.0, 1.0, 0.1, 0.7, 1 / 3):
    for size in range(1, 17):
      assert not advantages([[reward] * size], **settings).any()


@pytest.mark.parametrize('scale', ['std', 'unbiased_std'])
def test_a_group_without_deviation_does_not_blow_up_a_peers_reward(scale):
  # A peer's success where the policy's own group fails is worth its reward.
  baseline = grpo.baseline(context_lib.moments(np.zeros((1, 4))))
  found = grpo.advantages(np.array([[1.0, 0.0]]), baseline, scale=scale)
  np.testing.assert_array_equal(found, [[1.0, 0.0]])
  rounded = grpo.baseline(context_lib.moments(np.full((1, 7), 0.7)))
  found = grpo.advantages(np.array([[1.0]]), rounded, scale=scale)
  np.testing.assert_allclose(found, [[0.3]], rtol=1e-6)


def test_a_group_of_one_has_zero_advantage_and_not_nan():
  np.testing.assert_array_equal(advantages([[1.0], [0.5]]), [[0.0], [0.0]])


def test_the_own_baseline_ignores_peers():
  context = examples.context(
    groups=[examples.group([1.0, 0.0])],
    received=[examples.stats([1.0, 1.0], policy='b')],
  )
  baseline = grpo.own(context)
  np.testing.assert_array_equal(baseline.moments_P3, [[2, 1, 1]])
  np.testing.assert_array_equal(baseline.mean_P1, [[0.5]])
