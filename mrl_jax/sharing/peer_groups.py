"""Peers' groups on the prompts of a round, verified by the learner itself."""

from collections.abc import Sequence
import itertools
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
  """Peers' groups in the records of one kind, by prompt and then by peer.

  The learner judges every response anew. Where it disagrees with what the peer
  claims, its own verdict holds, and the disagreement is counted. Records of the
  kind 'rollout' are grouped; those of the kind 'outcome' are groups already.
  """
  groups = {}
  for r in context.peer_records:
    if records.kind(r) == kind:
      place = context.index[r.header.prompt], r.header.policy
      groups.setdefault(place, []).append(r)
  groups = {place: groups[place] for place in sorted(groups)}
  responses = [
    (prompt, *response)
    for (prompt, _), group in groups.items()
    for record in group
    for response in _responses(record)
  ]
  judgements = iter(context.judge(responses))
  make = {'rollout': _from_rollouts, 'outcome': _from_outcomes}[kind]
  return [
    make(peer, prompt, group, judgements, context.log)
    for (prompt, peer), group in groups.items()
  ]


def _responses(record) -> list[tuple[bytes, records.Finish, int]]:
  """The bytes, the finish and the number of tokens of a record's responses."""
  if isinstance(record, records.Rollout):
    return [(record.payload, record.finish, len(record.ids))]
  # An outcome does not say how many tokens its texts have.
  return [(text, 'stop', 0) for text in record.texts]


def _from_rollouts(peer, prompt, group, judgements, log) -> PeerGroup:
  judged = grpo.judged(group, [*itertools.islice(judgements, len(group))])
  for claim, rollout in zip(group, judged, strict=True):
    log.refused['false_verdict'] += claim.verdict != rollout.verdict
  successes = sum(rollout.success for rollout in judged)
  return PeerGroup(peer, prompt, len(group), successes, rollouts=judged)


def _from_outcomes(peer, prompt, group, judgements, log) -> PeerGroup:
  """The claimed number of successes counts if any text that is quoted is one."""
  (outcome,) = group
  texts = [text for text in outcome.texts if next(judgements)[1] == 'correct']
  log.refused['false_success'] += len(outcome.texts) - len(texts)
  successes = outcome.successes if texts else 0
  return PeerGroup(peer, prompt, outcome.count, successes, texts=texts)
