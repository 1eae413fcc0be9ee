"""What a policy publishes about its own groups: records of each kind."""

from collections.abc import Collection, Sequence

import msgspec
import numpy as np

from mrl_jax import records
from mrl_jax.sharing import context as context_lib

Group = Sequence[records.Rollout]


def publish(
  groups: Sequence[Group], kinds: Collection[str], *, texts: int, verifier: str
) -> list[records.Record]:
  """The records of these kinds (names in `records.KINDS`) about own groups.

  An outcome quotes at most `texts` successes, as found by the named verifier.
  """
  published = []
  if 'rollout' in kinds:
    published += [rollout for group in groups for rollout in group]
  if 'group_stats' in kinds:
    published += [group_stats(group) for group in groups]
  if 'outcome' in kinds:
    published += [outcome(group, texts, verifier) for group in groups]
  return published


def group_stats(group: Group) -> records.GroupStats:
  """The moments of a group's rewards."""
  rewards_1G = np.array([[rollout.reward for rollout in group]])
  count, reward_sum, reward_square_sum = context_lib.moments(rewards_1G)[0]
  return records.GroupStats(
    header=_header(group),
    count=int(count),
    reward_sum=float(reward_sum),
    reward_square_sum=float(reward_square_sum),
    successes=sum(rollout.success for rollout in group),
  )


def outcome(group: Group, texts: int, verifier: str) -> records.Outcome:
  """The success count of a group, and its first few different successes."""
  successes = [rollout for rollout in group if rollout.success]
  different = dict.fromkeys(rollout.payload for rollout in successes)
  return records.Outcome(
    header=_header(group),
    count=len(group),
    successes=len(successes),
    texts=tuple(different)[:texts],
    verifier=verifier,
    verdict='correct',
  )


def _header(group):
  return msgspec.structs.replace(group[0].header, sample=records.WHOLE_GROUP)
