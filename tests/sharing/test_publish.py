from mrl_jax import records
from mrl_jax.sharing import publish
from tests import examples

GROUPS = [
  examples.group([1.0, 0.0, 1.0]),
  examples.group([0.0, 0.0], prompt='p1'),
]


def test_records_of_the_kinds_asked_for():
  for kinds, count in (
    ((), 0),
    (('rollout',), 5),
    (('group_stats',), 2),
    (records.KINDS, 5 + 2 + 2),
  ):
    published = publish.publish(GROUPS, kinds, texts=1, verifier='exact')
    assert len(published) == count
    assert {records.kind(r) for r in published} == {*kinds}
    assert all(records.fault(r) is None for r in published)


def test_an_outcome_quotes_different_successes():
  group = [
    examples.rollout(payload, reward, sample=g)
    for g, (payload, reward) in enumerate(
      [(b'= 1', 1.0), (b'= 2', 0.0), (b'= 1', 1.0), (b'so = 1', 1.0)]
    )
  ]
  outcome = publish.outcome(group, 4, 'exact')
  assert (outcome.count, outcome.successes) == (4, 3)
  assert outcome.texts == (b'= 1', b'so = 1')
  assert outcome.verdict == 'correct'
  assert outcome.header.sample == records.WHOLE_GROUP
  assert publish.outcome(group, 1, 'exact').texts == (b'= 1',)
  assert publish.outcome(GROUPS[1], 4, 'exact').texts == ()


def test_group_stats_are_the_moments_of_the_rewards():
  stats = publish.group_stats(examples.group([1.0, 0.0, 0.5]))
  moments = (stats.count, stats.reward_sum, stats.reward_square_sum)
  assert moments == (3, 1.5, 1.25)
  assert stats.successes == 2
  assert stats.header.sample == records.WHOLE_GROUP
  # The verdict decides what is a success, whatever the reward.
  near = examples.replace(examples.rollout(), verdict='wrong')
  assert publish.group_stats([near]).successes == 0
