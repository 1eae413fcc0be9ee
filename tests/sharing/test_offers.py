from mrl_jax.sharing import offers
from mrl_jax.sharing import xgrpo
from tests import examples

PLACE = {'p0': 0, 'p1': 1}


def test_rollouts_of_a_group_are_one_offer():
  group = examples.group([1.0, 0.0, 1.0], policy='b', prompt='p1')
  other = examples.group([0.0], policy='a', prompt='p1')
  first = examples.group([0.0, 1.0], policy='b', prompt='p0')
  received = [group[0], *other, *first, *group[1:], xgrpo.group_stats(group)]
  found = offers.gather(received, PLACE, 'rollout')
  assert [(o.prompt, o.peer, o.count, o.successes) for o in found] == [
    (0, 'b', 2, 1),
    (1, 'a', 1, 0),
    (1, 'b', 3, 2),
  ]
  assert list(found[2].rollouts) == group
  assert found[2].right() == [group[0].payload, group[2].payload]


def test_an_outcome_offers_its_texts():
  outcome = examples.outcome((b'= 1', b'so = 1'), policy='b', prompt='p1')
  received = [outcome, examples.rollout(policy='b', prompt='p0')]
  (offer,) = offers.gather(received, PLACE, 'outcome')
  assert (offer.peer, offer.prompt, offer.count, offer.successes) == (
    'b', 1, 4, 2,
  )  # fmt: skip
  assert offer.right() == [b'= 1', b'so = 1']


def test_of_two_outcomes_the_newer_counts():
  old = examples.outcome((b'= 1',), policy='b', round=3)
  new = examples.outcome((b'= 2',), policy='b', round=4)
  (offer,) = offers.gather([new, old], PLACE, 'outcome')
  assert offer.right() == [b'= 2']
