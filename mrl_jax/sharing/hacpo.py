"""HACPO: peers' rollouts, weighed by how able each peer is."""

from collections.abc import Sequence
import dataclasses

import numpy as np

from mrl_jax.sharing import carry as carry_lib
from mrl_jax.sharing import lesson


def carry(
  selected: Sequence[carry_lib.Selected], learner: lesson.Learner, settings
) -> lesson.Carried:
  """Rows whose ratio compares mean log-probabilities a token.

    s = exp(mean_t log pi_k(y_t) - mean_u log pi_j(y_u))

  where each mean is over the policy's own tokens of the same text: every token
  of a row has the peer's mean as its denominator. The advantage is the
  learner's, times w(j, k), the peer's capability relative to the learner's. A
  peer that never told its accuracy has none; its rollouts are left out.

  HACPO, https://arxiv.org/abs/2603.02604, sec. 4.2.

  Args:
    selected: with advantages against the learner's baseline.
    learner: who learns from them.
    settings: `config.method`; without `hacpo.capability_weight`, w is 1.
  """
  pairs, carried = carry_lib.rows(selected, learner)
  rows, weights = [], {}
  for row, rollout in pairs:
    peer = rollout.header.policy
    weight = 1.0
    if settings.hacpo.capability_weight:
      if peer not in learner.ratios:
        learner.refused['unknown_capability'] += 1
        continue
      weight = 1 / learner.ratios[peer]
    weights[peer] = weight
    mean = rollout.policy_logp.mean(dtype=np.float64)
    rows.append(
      row._replace(
        old_logp=np.full(len(row.ids), mean, np.float32),
        advantage=weight * row.advantage,
      )
    )
  return dataclasses.replace(
    carried, rows=rows, metrics={'capability': weights}
  )
