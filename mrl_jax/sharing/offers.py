"""What peers have to offer on the prompts of a round, verified anew."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from mrl_jax import records
from mrl_jax.sharing import grpo
from mrl_jax.sharing import lesson


class Offer(NamedTuple):
  """One peer's group of samples of one prompt.

  Attributes:
    peer: its name.
    prompt: the prompt's place in the round.
    count: samples.
    successes: right ones among them.
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
    """The responses that are right."""
    return [*(r.payload for r in self.rollouts if r.success), *self.texts]


def newest(received: Sequence[records.Record]) -> list[records.Record]:
  """Of each peer, prompt and kind, those of the newest round.

  Where records may be older than the round, a group may be there twice.
  """
  rounds = {}
  for r in received:
    of = (r.header.policy, r.header.prompt, records.kind(r))
    rounds[of] = max(rounds.get(of, 0), r.header.round)
  return [
    r
    for r in received
    if r.header.round
    == rounds[r.header.policy, r.header.prompt, records.kind(r)]
  ]


def gather(
  received: Sequence[records.Record],
  place: Mapping[str, int],
  kind: str,
  learner: lesson.Learner,
) -> list[Offer]:
  """The offers in records of a kind, by prompt and then by peer.

  Rewards, verdicts and advantages are the learner's own of the same text; what
  a peer says otherwise is counted.

  Args:
    received: records of peers, `newest`.
    place: the place of each prompt of the round.
    kind: 'rollout', of which those of a group are put together, or 'outcome'.
    learner: who verifies.
  """
  groups = {}
  for r in received:
    if records.kind(r) == kind:
      groups.setdefault((place[r.header.prompt], r.header.policy), []).append(r)
  make = {'rollout': _of_rollouts, 'outcome': _of_outcome}[kind]
  return [
    make(peer, prompt, group, learner)
    for (prompt, peer), group in sorted(groups.items(), key=lambda g: g[0])
  ]


def _of_rollouts(peer, prompt, group, learner):
  judged = []
  for rollout in group:
    reward, verdict = learner.judge(prompt, rollout)
    if verdict != rollout.verdict:
      learner.refused['false_verdict'] += 1
    judged.append(
      msgspec.structs.replace(rollout, reward=reward, verdict=verdict)
    )
  successes = sum(rollout.success for rollout in judged)
  rollouts = grpo.with_advantages(judged)
  return Offer(peer, prompt, len(group), successes, rollouts=rollouts)


def _of_outcome(peer, prompt, group, learner):
  """One, of which the texts can be verified, and what was not quoted cannot."""
  outcome = group[-1]
  texts = [text for text in outcome.texts if learner.verify(prompt, text)]
  false = len(outcome.texts) - len(texts)
  if false:
    learner.refused['false_success'] += false
  successes = outcome.successes if texts else 0
  return Offer(peer, prompt, outcome.count, successes, texts=texts)
