import msgspec
import numpy as np
import pytest

from mrl_jax.sharing import grpo
from mrl_jax.sharing import xgrpo
from tests import examples


def test_what_crosses_is_the_moments_of_the_rewards():
  stats = xgrpo.group_stats(examples.group([1.0, 0.0, 0.5]))
  assert (stats.count, stats.reward_sum, stats.reward_square_sum) == (
    3,
    1.5,
    1.25,
  )
  assert stats.successes == 2
  near = msgspec.structs.replace(examples.rollout(), verdict='wrong')
  assert xgrpo.group_stats([near]).successes == 0  # Whatever its reward.
  assert stats.header.sample == -1


def test_numbers_worked_by_hand():
  # Own 1 0, peer 1 1 1 0: b = 4/6, s = sqrt(4/6 - 16/36) = .4714.
  own_P3 = grpo.moments(np.array([[1.0, 0.0]]))
  peers_P3 = grpo.moments(np.array([[1.0, 1.0, 1.0, 0.0]]))
  advantage = grpo.advantages(
    np.array([[1.0, 0.0]]), xgrpo.pooled(own_P3, peers_P3)
  )
  np.testing.assert_allclose(advantage, [[0.7071053, -1.4142106]], rtol=1e-6)


@pytest.mark.parametrize('successes', [1, 3, 8])
def test_a_group_that_fails_where_peers_succeed_is_pushed_down(successes):
  own_P3 = grpo.moments(np.zeros((1, 8)))
  peer = np.array([[1.0] * successes + [0.0] * (8 - successes)])
  baseline = xgrpo.pooled(own_P3, grpo.moments(peer))
  expected = -np.sqrt(successes / (16 - successes))
  np.testing.assert_allclose(
    grpo.advantages(np.zeros((1, 8)), baseline), expected, rtol=1e-5
  )


def test_without_peers_it_is_grpo_bit_for_bit():
  rewards_PG = np.random.default_rng(0).random((5, 8))
  own_P3 = grpo.moments(rewards_PG)
  place = {f'p{i}': i for i in range(5)}
  pooled = xgrpo.pooled(own_P3, xgrpo.peer_moments([], place))
  np.testing.assert_array_equal(pooled, own_P3)


def test_peers_add_up_at_each_prompt():
  received = [
    xgrpo.group_stats(examples.group([1.0], policy='c', prompt='p1')),
    xgrpo.group_stats(examples.group([1.0, 0.0], policy='b', prompt='p0')),
    xgrpo.group_stats(examples.group([0.5, 0.5], policy='b', prompt='p1')),
    examples.rollout(policy='b', prompt='p0'),
  ]
  np.testing.assert_array_equal(
    xgrpo.peer_moments(received, {'p0': 0, 'p1': 1, 'p2': 2}),
    [[2, 1, 1], [3, 2, 1.5], [0, 0, 0]],
  )
