import numpy as np
import pytest

from mrl_jax.sharing import capability
from mrl_jax.sharing import grpo
from mrl_jax.sharing import xgrpo
from tests import examples

GROUPS = [
  examples.group([1.0, 0.0, 0.0, 0.0]),
  examples.group([1.0, 1.0, 0.0, 0.0], prompt='p1'),
]


def baseline(own, peers, ratios):
  return capability.capability(
    grpo.moments(np.array([own], float)),
    {name: grpo.moments(np.array([r], float)) for name, r in peers.items()},
    None,
    ratios,
  )


def test_accuracies_of_the_last_rounds_are_kept():
  stats = xgrpo.group_stats(examples.group([1.0, 0.0], policy='b'))
  history = capability.remember({}, ('a', GROUPS), [stats], window=2)
  assert history == {'a': [3 / 8], 'b': [1 / 2]}
  history = capability.remember(history, ('a', GROUPS[:1]), [], window=2)
  assert history == {'a': [3 / 8, 1 / 4], 'b': [1 / 2]}  # b was silent.
  history = capability.remember(history, ('a', GROUPS[1:]), [stats], window=2)
  assert history == {'a': [1 / 4, 1 / 2], 'b': [1 / 2, 1 / 2]}


def test_the_accuracy_of_a_batch_is_over_all_its_samples():
  stats = [
    xgrpo.group_stats(examples.group(rewards, policy='b', prompt=prompt))
    for prompt, rewards in (('p0', [1.0]), ('p1', [0.0, 0.0, 0.0]))
  ]
  history = capability.remember({}, ('a', GROUPS), stats, window=5)
  assert history['b'] == [1 / 4]


def test_ratios_are_the_learners_over_the_peers_and_bounded():
  history = {'a': [0.2, 0.4], 'b': [0.6], 'c': [0.0], 'd': [0.01, 0.01]}
  assert capability.ratios(history, 'a') == {
    'a': 1.0,
    'b': pytest.approx(0.3 / 0.6),
    'c': 10.0,
    'd': 10.0,
  }
  assert capability.ratios(history, 'c')['a'] == 0.1
  assert capability.ratios({'a': [0.0], 'b': [0.0]}, 'a')['b'] == 1.0


def test_numbers_worked_by_hand():
  # (1 + .5 * 3) / (4 + 4) = .3125; the deviation is that of 4 of 8.
  found = baseline([1, 0, 0, 0], {'b': [1, 1, 1, 0]}, {'b': 0.5})
  np.testing.assert_allclose(found.mean_P1, [[0.3125]])
  advantage = grpo.advantages(
    np.array([[1.0, 0.0]]), found, scale='unbiased_std'
  )
  unit = np.sqrt(2 / 7) + 1e-6  # 8 * 1/4 / 7
  np.testing.assert_allclose(
    advantage, [[0.6875 / unit, -0.3125 / unit]], rtol=1e-6
  )


def test_equally_able_policies_are_pooled():
  own, peers = [1, 0, 0], {'b': [1, 1, 0], 'c': [0, 0, 0]}
  found = baseline(own, peers, {'b': 1.0, 'c': 1.0})
  np.testing.assert_allclose(found.mean_P1, [[3 / 9]])
  np.testing.assert_array_equal(found.moments_P3, [[9, 3, 3]])


def test_several_peers_have_a_ratio_each():
  found = baseline([1, 0], {'b': [1, 1], 'c': [0, 1]}, {'b': 0.5, 'c': 2.0})
  np.testing.assert_allclose(found.mean_P1, [[(1 + 1 + 2) / 6]])


def test_a_mean_that_no_reward_could_reach_is_replaced_by_ones_own():
  # (2 + 10 * 1) / 4 = 3 is above any reward.
  found = baseline([1, 1], {'b': [1, 0]}, {'b': 10.0})
  np.testing.assert_allclose(found.mean_P1, [[1.0]])


@pytest.mark.parametrize('reward', [0.0, 1.0, 0.3, 0.7, 1.2, -1.45, 1 / 3])
@pytest.mark.parametrize('peers', ['b', 'bc', 'bcd'])
def test_equal_rewards_teach_nothing_however_able_the_peers(reward, peers):
  for count in range(2, 17):
    rewards = [reward] * count
    found = baseline(
      rewards, dict.fromkeys(peers, rewards), dict.fromkeys(peers, 0.5)
    )
    advantage = grpo.advantages(
      np.array([rewards]), found, scale='unbiased_std'
    )
    assert not advantage.any()


def test_without_peers_it_is_grpo_bit_for_bit():
  rewards_PG = np.random.default_rng(0).integers(0, 2, (6, 8)).astype(float)
  own_P3 = grpo.moments(rewards_PG)
  found = capability.capability(own_P3, {}, None, {})
  for scale in grpo.SCALES:
    np.testing.assert_array_equal(
      grpo.advantages(rewards_PG, found, scale=scale),
      grpo.advantages(rewards_PG, grpo.baseline(own_P3), scale=scale),
    )
