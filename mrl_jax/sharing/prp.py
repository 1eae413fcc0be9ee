"""PRP: peers' rollouts join the group, transferred by THL."""

from collections.abc import Sequence

import numpy as np

from mrl_jax.sharing import context as context_lib
from mrl_jax.sharing import peer_groups
from mrl_jax.sharing import peer_rows
from mrl_jax.sharing import rows as rows_lib

LEVELS = ('chunk', 'token')
DENOMINATORS = ('behaviour', 'recompute')


def rows(
  groups: Sequence[peer_groups.PeerGroup], context: context_lib.Context
) -> list[rows_lib.Row]:
  """Rows of all rollouts, with the denominators of `config.method.prp`.

  `level`: ratios are over chunks that both vocabularies share ('chunk'), or
  over the learner's tokens, with the log-probability that THL assigns to each
  ('token').

  `denominators`: the log-probabilities with which the peer sampled
  ('behaviour'), or those of the learner before it trains ('recompute'). Recomputed ratios begin at 1 and
  vary little, but the update no longer corrects for the peer's
  distribution, and is not a policy gradient of the expected reward.

  Mutual RL, https://arxiv.org/abs/2605.07244, shares raw rollouts and lets the
  learner score them; both switches are our reconstruction.
  """
  found = peer_rows.rows(groups, context)
  if context.settings.prp.level == 'token':
    found = [
      row._replace(chunk=np.arange(len(row.ids), dtype=np.int32))
      for row in found
    ]
  if context.settings.prp.denominators == 'recompute':
    found = context.rescore(found)
  return found
