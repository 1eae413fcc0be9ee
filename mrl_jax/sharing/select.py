"""Which rollouts of peers a policy learns from."""

from collections.abc import Sequence

from mrl_jax import records

Group = Sequence[records.Rollout]


def nothing(
  groups: Sequence[Group], offered: Sequence[records.Rollout]
) -> Sequence[records.Rollout]:
  del groups, offered
  return []


def everything(
  groups: Sequence[Group], offered: Sequence[records.Rollout]
) -> Sequence[records.Rollout]:
  del groups
  return offered
