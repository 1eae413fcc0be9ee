"""Which of the peers' groups a policy learns from.

A selection takes the peers' groups, which the learner has verified itself
(`peer_groups.gather`), and the context of the round; it returns the groups that
are selected. Functions of places return the candidates of a selection, which
are known before any group is verified.
"""

from collections.abc import Collection, Sequence
import hashlib
from typing import TypeVar

from mrl_jax import records
from mrl_jax.sharing import context as context_lib
from mrl_jax.sharing import peer_groups

Groups = Sequence[peer_groups.PeerGroup]
Places = Sequence[context_lib.Place]
_Group = TypeVar('_Group', peer_groups.PeerGroup, context_lib.Place)


def where_all_fail(places: Places, context: context_lib.Context) -> Places:
  """Places on prompts that the learner's whole group fails."""
  return [place for place in places if not context.successes_P[place.prompt]]


def where_any_fails(places: Places, context: context_lib.Context) -> Places:
  """Places on prompts that some sample of the learner fails."""
  successes_P, most = context.successes_P, context.group_size
  return [place for place in places if successes_P[place.prompt] < most]


def everything(
  groups: Sequence[_Group], context: context_lib.Context
) -> Sequence[_Group]:
  """All groups or places: PRP and HACPO."""
  del context
  return groups


def rescue(groups: Groups, context: context_lib.Context) -> Groups:
  """Where the learner's whole group fails and a peer's does not: SGT's trigger.

  https://arxiv.org/abs/2605.07244, as re-implemented by GRAFT's authors.
  """
  return [
    group
    for group in groups
    if not context.successes_P[group.prompt] and group.successes
  ]


def complementary(groups: Groups, context: context_lib.Context) -> Groups:
  """Where the learner's whole group fails and a peer's is mixed.

  With several such peers, the group with most successes is selected. GRAFT,
  https://arxiv.org/abs/2609.37868, before balancing; the choice between peers
  is our reconstruction, as GRAFT has two policies.
  """
  return _one_each(_mixed(rescue(groups, context)))


def balanced(groups: Groups, context: context_lib.Context) -> Groups:
  """At most as many `complementary` groups as the peer gets in return.

  For every peer, m is the smaller number of candidates of the two directions.
  The learner's candidates are ranked by the peer's successes; the first m are
  selected, with all that tie with the last of them. GRAFT,
  https://arxiv.org/abs/2609.37868.
  """
  taken = []
  for peer in sorted({group.peer for group in groups}):
    of_peer = [group for group in groups if group.peer == peer]
    candidates = _mixed(rescue(of_peer, context))
    back = sum(
      not group.successes
      and 0 < context.successes_P[group.prompt] < context.group_size
      for group in of_peer
    )
    ranked = sorted(candidates, key=lambda group: -group.successes)
    if 0 < back < len(ranked):
      least = ranked[back - 1].successes
      ranked = [group for group in ranked if group.successes >= least]
    taken += ranked if back else []
  return _one_each(taken)


def random(groups: Groups, context: context_lib.Context) -> Groups:
  """As many groups as `balanced` selects, of prompts drawn at random.

  A control: it separates the effect of which groups are selected from that of
  how many. GRAFT's authors match the number of prompts; so do we.
  """
  count = len(balanced(groups, context))
  prompts = sorted({group.prompt for group in groups})
  drawn = context.rng.choice(prompts, count, replace=False) if count else []
  groups = [group for group in groups if group.prompt in drawn]
  return _at_most(groups, 1, context)


def drawn(
  groups: Sequence[_Group], context: context_lib.Context
) -> list[_Group]:
  """At most `method.max_peer_groups` groups or places of every prompt.

  If n policies all learn from all others, each trains on n times the rows.
  """
  return _at_most(groups, context.settings.max_peer_groups, context)


def draw(
  peers: Collection[str], most: int, header: records.Header, learner: str
) -> list[str]:
  """Peers whose groups a learner draws on the prompt of a header.

  They are `most` at most; 0 draws all. Peers are ordered by a hash, so that they
  can compute the draw themselves, and send nothing that is not drawn. What a
  silent peer would have sent is not replaced, except by what a journal has.
  """

  def place(peer):
    about = (header.run, header.round, header.prompt, learner, peer)
    return hashlib.sha256(repr(about).encode()).digest()

  return sorted(peers, key=place)[: most or None]


def _at_most(groups, most, context) -> list[_Group]:
  if not most:
    return list(groups)
  peers = {}
  for group in groups:
    peers.setdefault(group.prompt, set()).add(group.peer)
  for prompt, offering in peers.items():
    header = context.groups[prompt][0].header
    peers[prompt] = draw(offering, most, header, header.policy)
  return [group for group in groups if group.peer in peers[group.prompt]]


def _mixed(groups: Groups) -> list[peer_groups.PeerGroup]:
  return [group for group in groups if group.successes < group.count]


def _one_each(groups: Groups) -> list[peer_groups.PeerGroup]:
  """Of several peers' groups on a prompt, the first with most successes."""
  best = {}
  for group in sorted(groups, key=lambda g: (g.prompt, -g.successes, g.peer)):
    best.setdefault(group.prompt, group)
  return list(best.values())
