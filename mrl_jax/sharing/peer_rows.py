"""Training rows of peers' rollouts, transferred by THL."""

from collections.abc import Sequence

from mrl_jax import records
from mrl_jax.sharing import context as context_lib
from mrl_jax.sharing import peer_groups
from mrl_jax.sharing import rows as rows_lib
from mrl_jax.thl import transfer


def pairs(
  groups: Sequence[peer_groups.PeerGroup], context: context_lib.Context
) -> list[tuple[rows_lib.Row, records.Rollout]]:
  """A row for each rollout that THL transfers, beside the rollout.

  Denominators are the peer's log-probabilities, projected onto the
  learner's tokens. What THL refuses or loses is counted in the log of `context`.
  """
  offered = [(group, rollout) for group in groups for rollout in group.rollouts]
  transferred = transfer.transfer_all(
    [
      (rollout, context.log.residuals[group.peer]) for group, rollout in offered
    ],
    context.tokenizer,
    context.limits,
  )
  found = []
  for (group, rollout), moved in zip(offered, transferred, strict=True):
    if moved is not None:
      row = rows_lib.Row(
        group.prompt,
        moved.ids,
        moved.behaviour_logp,
        rollout.advantage,
        moved.chunk,
        moved.mask,
      )
      found.append((row, rollout))
  return found


def rows(
  groups: Sequence[peer_groups.PeerGroup], context: context_lib.Context
) -> list[rows_lib.Row]:
  """The rows of `pairs`, unchanged."""
  return [row for row, _ in pairs(groups, context)]
