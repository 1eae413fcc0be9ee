import pytest

from mrl_jax.sharing import peer_groups
from tests import examples

GROUPS = [examples.group([0.0], prompt=p) for p in ('p0', 'p1')]


def gather(received, kind, **changes):
  context = examples.context(groups=GROUPS, received=received, **changes)
  return peer_groups.gather(context, kind), +context.log.refused


def test_rollouts_of_a_peer_and_prompt_are_one_group():
  group = examples.group([1.0, 0.0, 1.0], policy='b', prompt='p1')
  other = examples.group([0.0], policy='a', prompt='p1')
  first = examples.group([0.0, 1.0], policy='b', prompt='p0')
  stats = examples.stats([1.0], policy='b', prompt='p1')
  received = [group[0], *other, *first, *group[1:], stats]
  found, refused = gather(received, 'rollout')
  assert [(g.prompt, g.peer, g.count, g.successes) for g in found] == [
    (0, 'b', 2, 1),
    (1, 'a', 1, 0),
    (1, 'b', 3, 2),
  ]
  assert [r.header.sample for r in found[2].rollouts] == [0, 1, 2]
  assert found[2].successful_texts() == [group[0].payload, group[2].payload]
  assert not refused


def test_groups_that_were_not_chosen_are_left_out():
  received = [
    *examples.group([1.0], policy='b', prompt='p1'),
    *examples.group([1.0], policy='c', prompt='p1'),
  ]
  found, _ = gather(received, 'rollout', choose=lambda *_: [(1, 'c')])
  assert [group.peer for group in found] == ['c']


def test_an_outcome_is_a_group_of_texts():
  outcome = examples.outcome((b'= 1', b'so = 1'), policy='b', prompt='p1')
  received = [outcome, examples.rollout(policy='b', prompt='p0')]
  ((group,), _) = gather(received, 'outcome')
  assert (group.peer, group.prompt, group.count, group.successes) == (
    'b', 1, 4, 2,
  )  # fmt: skip
  assert group.successful_texts() == [b'= 1', b'so = 1']


def test_advantages_in_the_peers_group_are_of_rewards_by_the_learner():
  # It claims 1 0 0 with advantages of a million; it is 0 1 0.
  group = [
    examples.replace(rollout, advantage=1e6)
    for rollout in examples.group([1.0, 0.0, 0.0], policy='b')
  ]

  def judge(responses):
    del responses
    return [(0.0, 'wrong'), (1.0, 'correct'), (0.0, 'wrong')]

  ((found,), _) = gather(group, 'rollout', judge=judge)
  assert found.successes == 1
  # Mean 1/3, deviation sqrt(2)/3.
  assert [r.advantage for r in found.rollouts] == pytest.approx(
    [-0.7071, 1.4142, -0.7071], rel=1e-3
  )
