import collections

import numpy as np
import pytest

from mrl_jax.sharing import peer_groups
from mrl_jax.sharing import select
from tests import examples


def group(prompt, successes, peer='b', count=4):
  texts = tuple(b'= %d' % i for i in range(successes))
  return peer_groups.PeerGroup(peer, prompt, count, successes, texts=texts)


def own(*successes, count=4, **changes):
  """A policy with so many successes of `count` samples on each prompt."""
  groups = [
    examples.group([1.0] * n + [0.0] * (count - n), prompt=f'p{p}')
    for p, n in enumerate(successes)
  ]
  return examples.context(groups=groups, **changes)


def chosen(groups):
  return [(g.prompt, g.peer, g.successes) for g in groups]


def test_everything_is_a_selection_too():
  groups = [group(0, 1), group(1, 0)]
  assert list(select.everything(groups, own(0, 0))) == groups


def test_rescue_is_where_all_fail_and_a_peer_does_not():
  groups = [group(0, 1), group(1, 1), group(2, 0), group(3, 4)]
  found = select.rescue(groups, own(0, 1, 0, 0))
  assert chosen(found) == [(0, 'b', 1), (3, 'b', 4)]


def test_complementary_leaves_out_where_the_peer_always_succeeds():
  groups = [group(0, 1), group(0, 3, 'c'), group(1, 4), group(2, 2)]
  found = select.complementary(groups, own(0, 0, 1))
  assert chosen(found) == [(0, 'c', 3)]  # The peer with most successes.


@pytest.mark.parametrize(
  ('back', 'expected'),
  [
    (0, []),
    (1, [(0, 'b', 3)]),
    (2, [(0, 'b', 3), (1, 'b', 2), (3, 'b', 2)]),  # Ties stay.
    (3, [(0, 'b', 3), (1, 'b', 2), (3, 'b', 2)]),
    (9, [(0, 'b', 3), (1, 'b', 2), (2, 'b', 1), (3, 'b', 2)]),
  ],
)
def test_balance_takes_the_best_that_the_peer_can_take_too(back, expected):
  # The policy fails the first four; the peer fails `back` that it has mixed.
  groups = [group(0, 3), group(1, 2), group(2, 1), group(3, 2)]
  groups += [group(4 + i, 0) for i in range(back)]
  # Where the policy always succeeds it has nothing for the peer.
  groups += [group(4 + back, 0)]
  found = select.balanced(groups, own(0, 0, 0, 0, *[2] * back, 4))
  assert chosen(found) == expected


def test_every_pair_is_balanced_by_itself():
  groups = [group(0, 2), group(1, 3, 'c'), group(2, 0), group(2, 1, 'c')]
  found = select.balanced(groups, own(0, 0, 2))
  assert chosen(found) == [(0, 'b', 2)]  # c needs nothing of this policy.


def test_random_takes_as_many_prompts_as_balance_would():
  groups = [group(p, 3 if p < 2 else 0) for p in range(20)]
  seen = set()
  for seed in range(30):
    rng = np.random.default_rng(seed)
    found = select.random(groups, own(0, 0, *[2] * 18, rng=rng))
    assert len({o.prompt for o in found}) == len(found) == 2
    seen |= {o.prompt for o in found}
  assert len(seen) > 15
  assert select.random(groups[:2], own(0, 0)) == []


def test_a_bound_draws_some_of_each_prompts_offers():
  groups = [group(p, 1, peer) for p in (0, 1) for peer in 'bcd']
  groups.append(group(2, 1))
  seen = set()
  for round in range(30):
    found = select.drawn(groups, in_round(round, 2))
    assert [o.prompt for o in found] == [0, 0, 1, 1, 2]
    assert len({(o.prompt, o.peer) for o in found}) == 5
    seen |= {(o.prompt, o.peer) for o in found}
    # A peer that is silent changes nothing about the others.
    without_d = [o for o in groups if o.peer != 'd']
    assert {*found} - {*select.drawn(without_d, in_round(round, 2))} == {
      o for o in found if o.peer == 'd'
    }
  assert len(seen) == 7
  assert select.drawn(groups, in_round(0, 0)) == groups
  assert select.drawn(groups, in_round(0, 9)) == groups


def in_round(round, most):
  own_groups = [
    examples.group([0.0], prompt=f'p{p}', round=round) for p in range(3)
  ]
  settings = examples.settings('prp', max_peer_groups=most)
  return examples.context(groups=own_groups, method=settings)


def test_draws_are_uniform_and_independent_of_learner_and_prompt():
  peers, counts = ['b', 'c', 'd', 'e'], collections.Counter()
  for p in range(1600):
    header = examples.rollout(prompt=f'p{p}').header
    first, second = (
      select.draw(peers, 4, header, learner) for learner in ('x', 'y')
    )
    counts[first[0], second[0]] += 1
    assert first == select.draw(peers[::-1], 0, header, 'x')
    assert first[:2] == select.draw(peers, 2, header, 'x')
  assert len(counts) == 4 * 4
  assert all(60 < n < 140 for n in counts.values())
