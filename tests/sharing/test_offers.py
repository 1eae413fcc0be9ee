import msgspec
import pytest

from mrl_jax.sharing import offers
from mrl_jax.sharing import xgrpo
from tests import examples

PLACE = {'p0': 0, 'p1': 1}


def gather(received, kind, **changes):
  learner = examples.learner(None, **changes)
  return offers.gather(received, PLACE, kind, learner), learner


def test_rollouts_of_a_group_are_one_offer():
  group = examples.group([1.0, 0.0, 1.0], policy='b', prompt='p1')
  other = examples.group([0.0], policy='a', prompt='p1')
  first = examples.group([0.0, 1.0], policy='b', prompt='p0')
  received = [group[0], *other, *first, *group[1:], xgrpo.group_stats(group)]
  found, learner = gather(received, 'rollout')
  assert [(o.prompt, o.peer, o.count, o.successes) for o in found] == [
    (0, 'b', 2, 1),
    (1, 'a', 1, 0),
    (1, 'b', 3, 2),
  ]
  assert [r.header.sample for r in found[2].rollouts] == [0, 1, 2]
  assert found[2].right() == [group[0].payload, group[2].payload]
  assert not learner.refused


def test_an_outcome_offers_its_texts():
  outcome = examples.outcome((b'= 1', b'so = 1'), policy='b', prompt='p1')
  received = [outcome, examples.rollout(policy='b', prompt='p0')]
  ((offer,), _) = gather(received, 'outcome')
  assert (offer.peer, offer.prompt, offer.count, offer.successes) == (
    'b', 1, 4, 2,
  )  # fmt: skip
  assert offer.right() == [b'= 1', b'so = 1']


def test_what_a_peer_says_of_its_rollouts_is_not_believed():
  # It says 1 0 0 with advantages of a million, and it is 0 1 0.
  group = [
    msgspec.structs.replace(rollout, advantage=1e6)
    for rollout in examples.group([1.0, 0.0, 0.0], policy='b')
  ]

  def judge(prompt, rollout):
    assert prompt == 0
    right = rollout.header.sample == 1
    return (1.0, 'correct') if right else (0.0, 'wrong')

  ((offer,), learner) = gather(group, 'rollout', judge=judge)
  assert offer.successes == 1
  assert [r.reward for r in offer.rollouts] == [0.0, 1.0, 0.0]
  assert [r.success for r in offer.rollouts] == [False, True, False]
  # Mean 1/3, deviation sqrt(2)/3.
  assert [r.advantage for r in offer.rollouts] == pytest.approx(
    [-0.7071, 1.4142, -0.7071], rel=1e-3
  )
  assert learner.refused == {'false_verdict': 2}


def test_false_successes_of_an_outcome_are_left_out_and_counted():
  def verify(prompt, payload):
    return payload == b'= 1'

  some = examples.outcome((b'= 1', b'= 2'), policy='b')
  none = examples.outcome((b'= 2', b'= 3'), policy='c')
  found, learner = gather([some, none], 'outcome', verify=verify)
  assert [(o.peer, o.successes, o.right()) for o in found] == [
    ('b', 2, [b'= 1']),
    ('c', 0, []),
  ]
  assert learner.refused == {'false_success': 3}


def test_of_several_rounds_the_newest_counts():
  old, new = (
    [
      *examples.group([reward], policy='b', round=round),
      examples.outcome((b'= %d' % round,), policy='b', round=round),
      xgrpo.group_stats(examples.group([reward], policy='b', round=round)),
    ]
    for round, reward in ((3, 0.0), (4, 1.0))
  )
  alone = examples.group([1.0], policy='c', round=3)
  mixed = [new[0], *old, *new[1:], *alone]
  assert offers.newest(mixed) == [*new, *alone]
