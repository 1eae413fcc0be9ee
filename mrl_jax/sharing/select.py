"""Which groups of peers a policy learns from.

All take what peers offer, as the learner's own verifier sees it, and what the
policy itself achieved, and return the offers that are taken.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mrl_jax.sharing import lesson
from mrl_jax.sharing import offers as offers_lib

Offers = Sequence[offers_lib.Offer]


class Own(NamedTuple):
  """What the policy's own groups came to.

  Attributes:
    successes_P: i32, right samples of every prompt.
    count: G, samples of each.
  """

  successes_P: np.ndarray
  count: int


def nothing(offers: Offers, own: Own, learner: lesson.Learner) -> Offers:
  del offers, own, learner
  return []


def everything(offers: Offers, own: Own, learner: lesson.Learner) -> Offers:
  """All that peers sampled: PRP and HACPO."""
  del own, learner
  return offers


def rescue(offers: Offers, own: Own, learner: lesson.Learner) -> Offers:
  """Where the policy's whole group fails and a peer's does not: SGT's trigger.

  https://arxiv.org/abs/2605.07244, as re-implemented by GRAFT's authors.
  """
  del learner
  return [
    offer
    for offer in offers
    if not own.successes_P[offer.prompt] and offer.successes
  ]


def complementary(offers: Offers, own: Own, learner: lesson.Learner) -> Offers:
  """Where the whole group fails and that of a peer has both kinds of samples.

  With several such peers, the one with most successes is taken. GRAFT,
  https://arxiv.org/abs/2609.37868, before balancing; the choice between peers
  is our reconstruction, as GRAFT has two policies.
  """
  return _one_each(_mixed(rescue(offers, own, learner)))


def balanced(offers: Offers, own: Own, learner: lesson.Learner) -> Offers:
  """As many `complementary` groups as the peer can take from this policy.

  For every peer, m is the smaller number of candidates of both directions; of
  this policy's, ranked by the peer's successes, the first m are taken, and all
  that tie with the last of them. GRAFT, https://arxiv.org/abs/2609.37868.
  """
  taken = []
  for peer in sorted({offer.peer for offer in offers}):
    theirs = [offer for offer in offers if offer.peer == peer]
    candidates = _mixed(rescue(theirs, own, learner))
    back = sum(
      not offer.successes and 0 < own.successes_P[offer.prompt] < own.count
      for offer in theirs
    )
    ranked = sorted(candidates, key=lambda offer: -offer.successes)
    if 0 < back < len(ranked):
      least = ranked[back - 1].successes
      ranked = [offer for offer in ranked if offer.successes >= least]
    taken += ranked if back else []
  return _one_each(taken)


def random(offers: Offers, own: Own, learner: lesson.Learner) -> Offers:
  """As many groups as `balanced` takes, of prompts drawn at random.

  The control that tells what was chosen from how much was. GRAFT's authors
  match the number of prompts; so do we.
  """
  count = len(balanced(offers, own, learner))
  prompts = sorted({offer.prompt for offer in offers})
  drawn = learner.rng.choice(prompts, count, replace=False) if count else []
  offers = [offer for offer in offers if offer.prompt in drawn]
  return at_most(offers, 1, learner.rng)


def at_most(
  offers: Offers, groups: int, rng: np.random.Generator
) -> list[offers_lib.Offer]:
  """At most so many offers on each prompt, drawn at random; 0 is no bound.

  Of n policies that all learn from all, each would train on n times the rows.
  """
  if not groups:
    return list(offers)
  by_prompt = {}
  for offer in offers:
    by_prompt.setdefault(offer.prompt, []).append(offer)
  kept = []
  for candidates in by_prompt.values():
    count = min(groups, len(candidates))
    drawn = rng.choice(len(candidates), count, replace=False)
    kept += [candidates[i] for i in sorted(drawn)]
  return kept


def _mixed(offers: Offers) -> list[offers_lib.Offer]:
  return [offer for offer in offers if offer.successes < offer.count]


def _one_each(offers: Offers) -> list[offers_lib.Offer]:
  """Of several peers' offers on a prompt, the first with most successes."""
  best = {}
  for offer in sorted(offers, key=lambda o: (o.prompt, -o.successes, o.peer)):
    best.setdefault(offer.prompt, offer)
  return list(best.values())
