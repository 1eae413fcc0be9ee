"""GRAFT: a peer's group in place of one's own that failed, if compatible."""

from collections.abc import Collection, Sequence
import dataclasses

import numpy as np

from mrl_jax.sharing import carry as carry_lib
from mrl_jax.sharing import lesson

ADMISSIONS = ('compatibility', 'random', 'all')
ORDERS = ('last', 'first', 'uniform')

_MAX_LOG_RATIO = 10.0  # A peer may claim any probability.


def carry(
  selected: Sequence[carry_lib.Selected], learner: lesson.Learner, settings
) -> lesson.Carried:
  """The responses that are compatible with the learner, and how much.

    s = exp(mean_t log pi_B(o_t) - mean_u log pi_A(o_u)),  w = 1[s > f] min(s, 1)

  over the tokens of the learner B and of the source A. A response of s <= f is
  left out; the others enter with weight w and the ratio of B's own new to old
  probabilities.

  GRAFT, https://arxiv.org/abs/2609.37868. The controls of
  `config.method.graft` are its authors': `admission` 'random' admits as many
  responses, whichever they are, and 'all' all of them; without `weighted` w is
  1; `success_only` leaves out a group's failures.

  Args:
    selected: with the source's own advantages.
    learner: who learns from them, and scores them first.
    settings: `config.method`.
  """
  graft = settings.graft
  if graft.success_only:
    selected = [s for s in selected if s.rollout.success]
  pairs, carried = carry_lib.rows(selected, learner)
  scores = learner.score(carried.rows)
  compatibility = np.array(
    [
      np.exp(
        np.clip(
          logp.mean(dtype=np.float64)
          - rollout.policy_logp.mean(dtype=np.float64),
          -_MAX_LOG_RATIO,
          _MAX_LOG_RATIO,
        )
      )
      for logp, (_, rollout) in zip(scores, pairs, strict=True)
    ]
  )
  admitted = admission(compatibility, graft, learner.rng)
  rows = [
    row._replace(
      old_logp=logp, weight=float(min(s, 1.0)) if graft.weighted else 1.0
    )
    for row, logp, s, admit in zip(
      carried.rows, scores, compatibility, admitted, strict=True
    )
    if admit
  ]
  metrics = {}
  if len(rows) < len(pairs):
    learner.refused['incompatible'] += len(pairs) - len(rows)
  if pairs:
    metrics = {
      'compatibility': float(np.median(compatibility)),
      'admitted': float(admitted.mean()),
    }
  return dataclasses.replace(carried, rows=rows, metrics=metrics)


def admission(
  compatibility_B: np.ndarray, graft, rng: np.random.Generator
) -> np.ndarray:
  """Which responses are taken, bool [B]."""
  if graft.admission == 'all':
    return np.ones(len(compatibility_B), bool)
  admitted_B = compatibility_B > graft.floor
  if graft.admission == 'random':
    return rng.permutation(admitted_B)
  return admitted_B


def order(
  prompts: Sequence[int], grafted: Collection[int], where: str
) -> list[int]:
  """The prompts of a round in the order in which they are trained on.

  GRAFT's come last, so that a policy learns from its own samples first.

  Args:
    prompts: all of them.
    grafted: those whose group was replaced.
    where: one of `ORDERS`; 'uniform' leaves them where they are.
  """
  late = {'last': 1, 'first': -1, 'uniform': 0}[where]
  return sorted(prompts, key=lambda p: (late * (p in grafted), p))
