"""PRP: peers' rollouts join the group, carried over by THL."""

from collections.abc import Sequence
import dataclasses

import numpy as np

from mrl_jax.sharing import carry as carry_lib
from mrl_jax.sharing import lesson

LEVELS = ('chunk', 'token')
DENOMINATORS = ('behaviour', 'recompute')


def carry(
  selected: Sequence[carry_lib.Selected], learner: lesson.Learner, settings
) -> lesson.Carried:
  """Rows with the denominators that `config.method.prp` asks for.

  Ratios are over chunks that both vocabularies share, or over the learner's
  tokens, with what THL carries to each. Denominators are the log-probabilities
  of the peer (`behaviour`), or those that the learner itself gives to the text
  before it learns (`recompute`): ratios then begin at 1 and vary little, and
  the update is no longer that of the expected reward.

  Mutual RL, https://arxiv.org/abs/2605.07244, shares raw rollouts and lets the
  learner score them; both switches are our reconstruction.

  Args:
    selected: with advantages in the receiver's group.
    learner: who learns from them.
    settings: `config.method`.
  """
  _, carried = carry_lib.rows(selected, learner)
  rows = carried.rows
  if settings.prp.level == 'token':
    rows = [row._replace(chunk=_each(len(row.ids))) for row in rows]
  if settings.prp.denominators == 'recompute':
    scores = learner.score(rows)
    rows = [
      row._replace(old_logp=logp)
      for row, logp in zip(rows, scores, strict=True)
    ]
  return dataclasses.replace(carried, rows=rows)


def _each(length):
  return np.arange(length, dtype=np.int32)
