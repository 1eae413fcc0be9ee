"""What peers have to offer on the prompts of a round."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mrl_jax import records


class Offer(NamedTuple):
  """One peer's group of samples of one prompt.

  Attributes:
    peer: its name.
    prompt: the prompt's place in the round.
    count: samples.
    successes: that it says are right.
    rollouts: its samples, where whole rollouts crossed.
    texts: different right responses, where outcomes did.
  """

  peer: str
  prompt: int
  count: int
  successes: int
  rollouts: Sequence[records.Rollout] = ()
  texts: Sequence[bytes] = ()

  def right(self) -> list[bytes]:
    """The responses that it says are right."""
    return [*(r.payload for r in self.rollouts if r.success), *self.texts]


def gather(
  received: Sequence[records.Record], place: Mapping[str, int], kind: str
) -> list[Offer]:
  """The offers in records of a kind, by prompt and then by peer.

  Args:
    received: records of peers.
    place: the place of each prompt of the round.
    kind: 'rollout', of which those of a group are put together, or 'outcome'.
  """
  groups, offers = {}, []
  for r in received:
    if records.kind(r) == kind:
      groups.setdefault((place[r.header.prompt], r.header.policy), []).append(r)
  for (prompt, peer), group in sorted(groups.items(), key=lambda g: g[0]):
    if kind == 'rollout':
      successes = sum(rollout.success for rollout in group)
      offer = Offer(peer, prompt, len(group), successes, rollouts=group)
    else:
      newest = max(group, key=lambda outcome: outcome.header.round)
      offer = Offer(
        peer, prompt, newest.count, newest.successes, texts=newest.texts
      )
    offers.append(offer)
  return offers
