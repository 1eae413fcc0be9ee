import ml_collections
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


def baseline(own, peers, name='pooled', **settings):
  """Of one prompt, from rewards of the policy and of its peers."""
  return getattr(xgrpo, name)(
    grpo.moments(np.array([own], float)),
    {name: grpo.moments(np.array([r], float)) for name, r in peers.items()},
    ml_collections.ConfigDict(settings),
    {},
  )


def test_numbers_worked_by_hand():
  # Own 1 0, peer 1 1 1 0: b = 4/6, s = sqrt(4/6 - 16/36) = .4714.
  advantage = grpo.advantages(
    np.array([[1.0, 0.0]]), baseline([1, 0], {'b': [1, 1, 1, 0]})
  )
  np.testing.assert_allclose(advantage, [[0.7071053, -1.4142106]], rtol=1e-6)


@pytest.mark.parametrize('successes', [1, 3, 8])
def test_a_group_that_fails_where_peers_succeed_is_pushed_down(successes):
  peer = [1] * successes + [0] * (8 - successes)
  found = grpo.advantages(np.zeros((1, 8)), baseline([0] * 8, {'b': peer}))
  expected = -np.sqrt(successes / (16 - successes))
  np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize('name', ['pooled', 'interpolated'])
def test_without_peers_it_is_grpo_bit_for_bit(name):
  rewards_PG = np.random.default_rng(0).random((5, 8))
  own_P3 = grpo.moments(rewards_PG)
  settings = ml_collections.ConfigDict({'interpolation': 0.5})
  for peers in ({}, {'b': np.zeros((5, 3))}):
    found = getattr(xgrpo, name)(own_P3, peers, settings, {})
    np.testing.assert_array_equal(
      grpo.advantages(rewards_PG, found),
      grpo.advantages(rewards_PG, grpo.baseline(own_P3)),
    )


def test_interpolated_by_hand():
  # Own 1 0, peer 1 1 1 0, a = .2: .8 / 2 + .2 * 3/4 = .55.
  found = baseline(
    [1, 0], {'b': [1, 1, 1, 0]}, 'interpolated', interpolation=0.2
  )
  np.testing.assert_allclose(found.mean_P1, [[0.55]])
  np.testing.assert_allclose(
    grpo.deviation(found.moments_P3), [[np.sqrt(0.55 - 0.55**2)]]
  )


def test_interpolation_by_the_share_of_peers_is_pooling():
  own, peers = [1, 0.5, 0], {'b': [1, 1, 0.25], 'c': [0, 1]}
  pooled = baseline(own, peers)
  found = baseline(own, peers, 'interpolated', interpolation=5 / 8)
  np.testing.assert_allclose(found.mean_P1, pooled.mean_P1, rtol=1e-12)
  np.testing.assert_allclose(found.moments_P3, pooled.moments_P3, rtol=1e-12)


def test_peers_add_up_at_each_prompt():
  received = [
    xgrpo.group_stats(examples.group([1.0], policy='c', prompt='p1')),
    xgrpo.group_stats(examples.group([1.0, 0.0], policy='b', prompt='p0')),
    xgrpo.group_stats(examples.group([0.5, 0.5], policy='b', prompt='p1')),
    examples.rollout(policy='b', prompt='p0'),
  ]
  peers = xgrpo.peer_moments(received, {'p0': 0, 'p1': 1, 'p2': 2})
  np.testing.assert_array_equal(peers['b'], [[2, 1, 1], [2, 1, 0.5], [0, 0, 0]])
  np.testing.assert_array_equal(peers['c'], [[0, 0, 0], [1, 1, 1], [0, 0, 0]])
  own_P3 = np.ones((3, 3))
  np.testing.assert_array_equal(
    xgrpo.pooled(own_P3, peers, None, {}).moments_P3,
    [[3, 2, 2], [4, 3, 2.5], [1, 1, 1]],
  )
