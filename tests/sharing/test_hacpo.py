import numpy as np
import pytest

from mrl_jax.sharing import context as context_lib
from mrl_jax.sharing import grpo
from mrl_jax.sharing import hacpo
from tests import examples

GROUPS = [
  examples.group([1.0, 0.0, 0.0, 0.0]),
  examples.group([1.0, 1.0, 0.0, 0.0], prompt='p1'),
]
SENDER = examples.tokenizer('byte_level')
RECEIVER = examples.tokenizer('sentencepiece')
SENT = examples.rollout(b'= 10 = 13', encoder=SENDER, policy='b')


def test_accuracies_of_the_last_rounds_are_kept():
  stats = [examples.stats([1.0, 0.0], policy='b')]

  def remember(history, groups, received):
    return hacpo.remember_accuracies(history, 'a', groups, received, window=2)

  history = remember({}, GROUPS, stats)
  assert history == {'a': [3 / 8], 'b': [1 / 2]}
  history = remember(history, GROUPS[:1], [])
  assert history == {'a': [3 / 8, 1 / 4], 'b': [1 / 2]}  # b was silent.
  history = remember(history, GROUPS[1:], stats)
  assert history == {'a': [1 / 4, 1 / 2], 'b': [1 / 2, 1 / 2]}


def test_a_late_peer_has_an_entry_for_each_round_that_it_played():
  late = [
    examples.stats(rewards, policy='b', round=round)
    for round, rewards in ((8, [1.0, 1.0]), (7, [1.0, 0.0]))
  ]
  history = hacpo.remember_accuracies({}, 'a', GROUPS, late, window=5)
  assert history['b'] == [1 / 2, 1.0]


def test_the_accuracy_of_a_batch_is_over_all_its_samples():
  stats = [
    examples.stats(rewards, policy='b', prompt=prompt)
    for prompt, rewards in (('p0', [1.0]), ('p1', [0.0, 0.0, 0.0]))
  ]
  history = hacpo.remember_accuracies({}, 'a', GROUPS, stats, window=5)
  assert history['b'] == [1 / 4]


def test_capability_ratios_are_the_learners_over_the_peers_and_bounded():
  history = {'a': [0.2, 0.4], 'b': [0.6], 'c': [0.0], 'd': [0.01, 0.01]}
  assert hacpo.capability_ratios(history, 'a') == {
    'a': 1.0,
    'b': pytest.approx(0.3 / 0.6),
    'c': 10.0,
    'd': 10.0,
  }
  assert hacpo.capability_ratios(history, 'c')['a'] == 0.1
  assert hacpo.capability_ratios({'a': [0.0], 'b': [0.0]}, 'a')['b'] == 1.0


def baseline(own, peers, capability):
  """The baseline of one prompt, from rewards of the policy and its peers."""
  return hacpo.baseline(
    examples.context(
      groups=[examples.group(own)],
      received=[examples.stats(r, policy=name) for name, r in peers.items()],
      capability_ratio=capability,
    )
  )


def test_the_baseline_worked_by_hand():
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


def test_rewards_of_equally_capable_policies_are_pooled():
  own, peers = [1, 0, 0], {'b': [1, 1, 0], 'c': [0, 0, 0]}
  found = baseline(own, peers, {'b': 1.0, 'c': 1.0})
  np.testing.assert_allclose(found.mean_P1, [[3 / 9]])
  np.testing.assert_array_equal(found.moments_P3, [[9, 3, 3]])


def test_every_peer_has_a_capability_ratio_of_its_own():
  found = baseline([1, 0], {'b': [1, 1], 'c': [0, 1]}, {'b': 0.5, 'c': 2.0})
  np.testing.assert_allclose(found.mean_P1, [[(1 + 1 + 2) / 6]])


def test_a_mean_above_every_reward_is_replaced_by_the_own_mean():
  # (2 + 10 * 1) / 4 = 3 is above any reward.
  found = baseline([1, 1], {'b': [1, 0]}, {'b': 10.0})
  np.testing.assert_allclose(found.mean_P1, [[1.0]])


@pytest.mark.parametrize('reward', [0.0, 1.0, 0.3, 0.7, 1.2, -1.45, 1 / 3])
@pytest.mark.parametrize('peers', ['b', 'bc', 'bcd'])
def test_equal_rewards_teach_nothing_whatever_the_capability(reward, peers):
  for count in range(2, 17):
    rewards = [reward] * count
    found = baseline(
      rewards, dict.fromkeys(peers, rewards), dict.fromkeys(peers, 0.5)
    )
    advantage = grpo.advantages(
      np.array([rewards]), found, scale='unbiased_std'
    )
    assert not advantage.any()


def test_without_peers_the_baseline_is_grpos_bit_for_bit():
  rewards_PG = np.random.default_rng(0).integers(0, 2, (6, 8)).astype(float)
  groups = [examples.group(r, prompt=f'p{p}') for p, r in enumerate(rewards_PG)]
  found = hacpo.baseline(examples.context(groups=groups))
  expected = grpo.baseline(context_lib.moments(rewards_PG))
  for scale in grpo.SCALES:
    np.testing.assert_array_equal(
      grpo.advantages(rewards_PG, found, scale=scale),
      grpo.advantages(rewards_PG, expected, scale=scale),
    )


def rows(capability=None, advantage=-0.75, **changes):
  changes = {f'hacpo.{key}': value for key, value in changes.items()}
  context = examples.context(
    RECEIVER,
    method=examples.settings('hacpo', **changes),
    capability_ratio=capability or {'a': 1.0, 'b': 0.5},
  )
  sent = examples.replace(SENT, advantage=advantage)
  return hacpo.rows([examples.peer_group(sent)], context), context.log


def test_every_token_is_compared_with_the_peers_mean_over_its_own_tokens():
  ((row,), log) = rows()
  assert len(row.ids) != len(SENT.ids)
  np.testing.assert_allclose(row.old_logp, SENT.sampling_logp.mean(), rtol=1e-6)
  assert row.old_logp.shape == row.ids.shape
  assert row.weight == 1.0
  assert log.residuals['b'].rollouts == 1


def test_a_peer_of_twice_the_capability_counts_twice():
  # The learner's capability is half the peer's: w(j, k) = 2.
  ((row,), log) = rows()
  assert row.advantage == -1.5
  assert log.metrics == {'capability': {'b': 2.0}}
  ((row,), _) = rows(capability_weight=False)
  assert row.advantage == -0.75


def test_a_peer_of_unknown_capability_is_left_out_and_counted():
  found, log = rows(capability={'a': 1.0})
  assert not found
  assert log.refused == {'unknown_capability': 1}
