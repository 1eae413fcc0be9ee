import numpy as np
import pytest

from mrl_jax import records
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
  context = examples.context(
    groups=GROUPS,
    received=received,
    judge=lambda responses: [(1.0, 'correct')] * len(responses),
  )
  assert [*map(records.identity, context.peer_records)] == [
    records.identity(r) for r in (*new, *alone)
  ]


def judged_by(verdicts):
  """A judge that gives a reward of 1 to successes, by payload."""

  def judge(responses):
    assert all(prompt == 0 for prompt, *_ in responses)
    found = [verdicts[payload] for _, payload, _, _ in responses]
    return [(float(verdict == 'correct'), verdict) for verdict in found]

  return judge


def test_what_a_peer_claims_of_its_rollouts_is_not_believed():
  # It claims one success in three; two others are.
  group = [
    examples.replace(rollout, payload=payload)
    for rollout, payload in zip(
      examples.group([1.0, 0.0, 0.0], policy='b'),
      (b'x', b'y', b'z'),
      strict=True,
    )
  ]
  lie = examples.replace(
    examples.stats([1.0] * 3, policy='b'), reward_sum=1e6, successes=3
  )
  elsewhere = examples.stats([1.0], policy='c')
  context = examples.context(
    groups=GROUPS,
    received=[lie, *group, elsewhere],
    judge=judged_by({b'x': 'wrong', b'y': 'correct', b'z': 'correct'}),
  )
  stats, *rollouts, other = context.peer_records
  assert [r.reward for r in rollouts] == [0.0, 1.0, 1.0]
  assert [r.success for r in rollouts] == [False, True, True]
  assert context.log.refused == {'false_verdict': 3}
  # Statistics are of rollouts where they crossed, and else as claimed.
  assert (stats.count, stats.successes) == (3, 2)
  assert (stats.reward_sum, stats.reward_square_sum) == (2.0, 2.0)
  assert other == elsewhere


def test_only_chosen_groups_are_judged_and_others_are_claims():
  received = [
    *examples.group([1.0, 0.0], policy='b'),
    examples.stats([1.0, 0.0], policy='b'),
    *examples.group([1.0, 1.0], policy='c'),
    examples.stats([1.0, 1.0], policy='c'),
    examples.stats([1.0, 1.0], policy='d'),
    *examples.group([1.0], policy='b', prompt='p9'),
  ]
  offered = []

  def choose(context, places):
    assert context.successes_P[0] == 1
    offered.extend(places)
    return [(0, 'c')]

  context = examples.context(
    groups=GROUPS,
    received=received,
    choose=choose,
    judge=lambda responses: [(0.0, 'wrong')] * len(responses),
  )
  *of_b, b, first, second, c, d = context.peer_records
  assert offered == [(0, 'b'), (0, 'c')]
  assert context.log.judged == 2
  assert [r.reward for r in (*of_b, first, second)] == [1.0, 0.0, 0.0, 0.0]
  assert [s.reward_sum for s in (b, c, d)] == [1.0, 0.0, 2.0]
  assert context.log.refused == {'false_verdict': 2}


def test_false_successes_of_an_outcome_are_left_out_and_counted():
  some = examples.outcome((b'x', b'y'), policy='b')
  none = examples.outcome((b'x', b'z'), policy='c')
  context = examples.context(
    groups=GROUPS,
    received=[some, none],
    judge=judged_by({b'x': 'wrong', b'y': 'correct', b'z': 'wrong'}),
  )
  assert [(r.successes, r.texts) for r in context.peer_records] == [
    (some.successes, (b'y',)),
    (0, ()),
  ]
  assert +context.log.refused == {'false_success': 3}


@pytest.mark.parametrize('outcome', records.UNDECIDED)
def test_an_undecided_answer_is_no_success_and_disagrees_with_nobody(outcome):
  claims = zip((b'x', b'y', b'z'), ('correct', outcome, 'correct'), strict=True)
  group = [
    examples.replace(rollout, payload=payload, verdict=verdict)
    for rollout, (payload, verdict) in zip(
      examples.group([1.0, 0.0, 1.0], policy='b'), claims, strict=True
    )
  ]
  some = examples.outcome((b'x', b'y'), policy='b')
  context = examples.context(
    groups=GROUPS,
    received=[*group, some],
    judge=judged_by({b'x': outcome, b'y': 'correct', b'z': 'wrong'}),
  )
  *rollouts, successes = context.peer_records
  assert [r.success for r in rollouts] == [False, True, False]
  assert rollouts[0].reward == 0.0
  assert successes.texts == (b'y',)
  assert context.log.refused == {
    'undecided': 2,
    'false_verdict': 1,
    'false_success': 0,
  }


def test_records_about_prompts_of_other_rounds_are_late():
  elsewhere = examples.stats([1.0], policy='b', prompt='p9')
  about = examples.stats([1.0], policy='b')
  context = examples.context(groups=GROUPS, received=[elsewhere, about])
  assert context.late_records == [elsewhere]
  assert context.peer_records == [about]


def test_moments_of_a_peer_are_zero_where_it_sent_nothing():
  context = examples.context(
    received=[
      examples.stats([1.0], policy='c', prompt='p1'),
      examples.stats([1.0, 0.0], policy='b', prompt='p0'),
      examples.stats([0.5, 0.5], policy='b', prompt='p1'),
      examples.rollout(policy='d', prompt='p0'),
    ]
  )
  assert context.peer_moments.keys() == {'b', 'c'}
  np.testing.assert_array_equal(
    context.peer_moments['b'], [[2, 1, 1], [2, 1, 0.5], [0, 0, 0]]
  )
  np.testing.assert_array_equal(
    context.peer_moments['c'], [[0, 0, 0], [1, 1, 1], [0, 0, 0]]
  )
