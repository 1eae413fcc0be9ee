import numpy as np

from mrl_jax.sharing import context as context_lib
from tests import examples

GROUPS = [
  examples.group([1.0, 0.0, 0.0, 0.0]),
  examples.group([0.0, 0.0, 0.0, 0.5], prompt='p1'),
]


def test_moments_are_count_sum_and_sum_of_squares():
  np.testing.assert_array_equal(
    context_lib.moments(np.array([[1.0, 0.0, 2.0]])), [[3.0, 3.0, 5.0]]
  )


def test_own_groups_tell_their_success_rates():
  context = examples.context(groups=GROUPS)
  assert context.index == {'p0': 0, 'p1': 1}
  assert context.group_size == 4
  np.testing.assert_array_equal(context.rewards_PG[1], [0, 0, 0, 0.5])
  # Any reward above 0 is a success in these examples.
  np.testing.assert_array_equal(context.successes_P, [1, 1])
  np.testing.assert_array_equal(context.success_rate_P, [0.25, 0.25])
  np.testing.assert_array_equal(
    context.own_moments_P3, [[4, 1, 1], [4, 0.5, 0.25]]
  )


def test_of_several_rounds_a_peers_newest_records_count():
  old, new = (
    [
      *examples.group([reward], policy='b', round=round),
      examples.outcome((b'= %d' % round,), policy='b', round=round),
      examples.stats([reward], policy='b', round=round),
    ]
    for round, reward in ((3, 0.0), (4, 1.0))
  )
  alone = examples.group([1.0], policy='c', round=3)
  elsewhere = examples.stats([1.0], policy='b', prompt='p9', round=4)
  received = [new[0], *old, elsewhere, *new[1:], *alone]
  context = examples.context(groups=GROUPS, received=received)
  assert context.peer_records == [*new, *alone]


def test_moments_of_a_peer_are_zero_where_it_sent_nothing():
  context = examples.context(
    received=[
      examples.stats([1.0], policy='c', prompt='p1'),
      examples.stats([1.0, 0.0], policy='b', prompt='p0'),
      examples.stats([0.5, 0.5], policy='b', prompt='p1'),
      examples.rollout(policy='b', prompt='p0'),
    ]
  )
  assert context.peer_moments.keys() == {'b', 'c'}
  np.testing.assert_array_equal(
    context.peer_moments['b'], [[2, 1, 1], [2, 1, 0.5], [0, 0, 0]]
  )
  np.testing.assert_array_equal(
    context.peer_moments['c'], [[0, 0, 0], [1, 1, 1], [0, 0, 0]]
  )
