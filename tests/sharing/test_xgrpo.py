import numpy as np
import pytest

from mrl_jax.sharing import context as context_lib
from mrl_jax.sharing import grpo
from mrl_jax.sharing import xgrpo
from tests import examples


def baseline(own, peers, name='pooled', **settings):
  """The baseline of one prompt, from the rewards of the policy and its peers."""
  context = examples.context(
    groups=[examples.group(own)],
    received=[examples.stats(r, policy=name) for name, r in peers.items()],
    method=examples.settings('xgrpo', **settings),
  )
  return getattr(xgrpo, name)(context)


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
def test_on_prompts_without_peers_it_is_grpo_bit_for_bit(name):
  rewards_PG = np.random.default_rng(0).random((5, 8))
  groups = [
    examples.group(rewards, prompt=f'p{p}')
    for p, rewards in enumerate(rewards_PG)
  ]
  # A peer tells of the last prompt only.
  stats = [examples.stats([1.0, 0.0], policy='b', prompt='p4')]
  expected = grpo.baseline(context_lib.moments(rewards_PG))
  expected_PG = grpo.advantages(rewards_PG, expected)
  for received, same in (((), 5), (stats, 4)):
    context = examples.context(groups=groups, received=received)
    found = grpo.advantages(rewards_PG, getattr(xgrpo, name)(context))
    np.testing.assert_array_equal(found[:same], expected_PG[:same])
    assert (found[same:] != expected_PG[same:]).all()


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
  np.testing.assert_array_equal(pooled.moments_P3, [[8, 4.75, 4.3125]])
  found = baseline(own, peers, 'interpolated', interpolation=5 / 8)
  np.testing.assert_allclose(found.mean_P1, pooled.mean_P1, rtol=1e-12)
  np.testing.assert_allclose(found.moments_P3, pooled.moments_P3, rtol=1e-12)
