"""What a policy tells of its own groups: records of each kind."""

from collections.abc import Collection, Sequence

import msgspec

from mrl_jax import records
from mrl_jax.sharing import xgrpo

Group = Sequence[records.Rollout]


def publish(
  groups: Sequence[Group], kinds: Collection[str], *, texts: int, verifier: str
) -> list[records.Record]:
  """The records of these kinds about a round's groups.

  Args:
    groups: a policy's rollouts of each prompt.
    kinds: of `records.KINDS`.
    texts: the most successes that an outcome quotes.
    verifier: what found them correct.
  """
  published = []
  if 'rollout' in kinds:
    published += [rollout for group in groups for rollout in group]
  if 'group_stats' in kinds:
    published += [xgrpo.group_stats(group) for group in groups]
  if 'outcome' in kinds:
    published += [outcome(group, texts, verifier) for group in groups]
  return published


def outcome(group: Group, texts: int, verifier: str) -> records.Outcome:
  """How a group did, with its first few different successes in words."""
  successes = [rollout for rollout in group if rollout.success]
  different = dict.fromkeys(rollout.payload for rollout in successes)
  return records.Outcome(
    header=msgspec.structs.replace(group[0].header, sample=records.WHOLE_GROUP),
    count=len(group),
    successes=len(successes),
    texts=tuple(different)[:texts],
    verifier=verifier,
    verdict='correct',
  )
