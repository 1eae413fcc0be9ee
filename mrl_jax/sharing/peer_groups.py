"""Peers' groups on the prompts of a round, verified by the learner itself."""

from collections.abc import Sequence
from typing import NamedTuple

from mrl_jax import records
from mrl_jax.sharing import context as context_lib
from mrl_jax.sharing import grpo


class PeerGroup(NamedTuple):
  """One peer's samples of one prompt."""

  peer: str
  prompt: int  # Index of the prompt in the round.
  count: int  # Of samples.
  successes: int
  # The samples, if whole rollouts crossed. Their advantages are relative to the
  # peer's own group, by the learner's rewards and divided by their standard
  # deviation, until the method replaces them.
  rollouts: Sequence[records.Rollout] = ()
  texts: Sequence[bytes] = ()  # Different successes, if outcomes crossed.

  def successful_texts(self) -> list[bytes]:
    return [*(r.payload for r in self.rollouts if r.success), *self.texts]


def gather(context: context_lib.Context, kind: str) -> list[PeerGroup]:
  """Chosen groups in the records of one kind, by prompt and then by peer.

  Records of the kind 'rollout' are grouped; those of the kind 'outcome' are
  groups already.
  """
  groups = {}
  for r in context.peer_records:
    if records.kind(r) == kind and context.place(r) in context.chosen:
      groups.setdefault(context.place(r), []).append(r)
  make = {'rollout': _from_rollouts, 'outcome': _from_outcome}[kind]
  return [make(*place, groups[place]) for place in sorted(groups)]


def _from_rollouts(prompt, peer, group) -> PeerGroup:
  judged = grpo.judged(group, [(r.reward, r.verdict) for r in group])
  successes = sum(rollout.success for rollout in judged)
  return PeerGroup(peer, prompt, len(group), successes, rollouts=judged)


def _from_outcome(prompt, peer, group) -> PeerGroup:
  (outcome,) = group
  return PeerGroup(
    peer, prompt, outcome.count, outcome.successes, texts=outcome.texts
  )
