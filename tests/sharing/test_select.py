import numpy as np
import pytest

from mrl_jax.sharing import offers as offers_lib
from mrl_jax.sharing import select
from tests import examples

BYTES = None  # A tokenizer is not needed to select.


def offer(prompt, successes, peer='b', count=4):
  texts = tuple(b'= %d' % i for i in range(successes))
  return offers_lib.Offer(peer, prompt, count, successes, texts=texts)


def own(*successes, count=4):
  return select.Own(np.array(successes), count)


def learner(**changes):
  return examples.learner(BYTES, **changes)


def chosen(found):
  return [(o.prompt, o.peer, o.successes) for o in found]


def test_nothing_and_everything():
  offers = [offer(0, 1), offer(1, 0)]
  assert list(select.nothing(offers, own(0, 0), learner())) == []
  assert list(select.everything(offers, own(0, 0), learner())) == offers


def test_rescue_is_where_all_fail_and_a_peer_does_not():
  offers = [offer(0, 1), offer(1, 1), offer(2, 0), offer(3, 4)]
  found = select.rescue(offers, own(0, 1, 0, 0), learner())
  assert chosen(found) == [(0, 'b', 1), (3, 'b', 4)]


def test_complementary_leaves_out_where_the_peer_always_succeeds():
  offers = [offer(0, 1), offer(0, 3, 'c'), offer(1, 4), offer(2, 2)]
  found = select.complementary(offers, own(0, 0, 1), learner())
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
  offers = [offer(0, 3), offer(1, 2), offer(2, 1), offer(3, 2)]
  offers += [offer(4 + i, 0) for i in range(back)]
  # Where the policy always succeeds it has nothing for the peer.
  offers += [offer(4 + back, 0)]
  successes = own(0, 0, 0, 0, *[2] * back, 4)
  found = select.balanced(offers, successes, learner())
  assert chosen(found) == expected


def test_every_pair_is_balanced_by_itself():
  offers = [offer(0, 2), offer(1, 3, 'c'), offer(2, 0), offer(2, 1, 'c')]
  found = select.balanced(offers, own(0, 0, 2), learner())
  assert chosen(found) == [(0, 'b', 2)]  # c needs nothing of this policy.


def test_random_takes_as_many_prompts_as_balance_would():
  offers = [offer(p, 3 if p < 2 else 0) for p in range(20)]
  successes = own(0, 0, *[2] * 18)
  seen = set()
  for seed in range(30):
    rng = np.random.default_rng(seed)
    found = select.random(offers, successes, learner(rng=rng))
    assert len({o.prompt for o in found}) == len(found) == 2
    seen |= {o.prompt for o in found}
  assert len(seen) > 15
  assert select.random(offers[:2], own(0, 0), learner()) == []


def test_a_bound_draws_some_of_each_prompts_offers():
  offers = [offer(p, 1, peer) for p in (0, 1) for peer in 'bcd']
  offers.append(offer(2, 1))
  seen = set()
  for seed in range(30):
    rng = np.random.default_rng(seed)
    found = select.at_most(offers, 2, rng)
    assert [o.prompt for o in found] == [0, 0, 1, 1, 2]
    assert len({(o.prompt, o.peer) for o in found}) == 5
    seen |= {(o.prompt, o.peer) for o in found}
  assert len(seen) == 7
  assert select.at_most(offers, 0, rng) == offers
  assert select.at_most(offers, 9, rng) == offers
