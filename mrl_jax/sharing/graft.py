"""GRAFT: a peer's compatible responses in place of an own group that failed."""

from collections.abc import Collection, Sequence

import numpy as np

from mrl_jax.sharing import context as context_lib
from mrl_jax.sharing import peer_groups
from mrl_jax.sharing import peer_rows
from mrl_jax.sharing import rows as rows_lib

ADMISSIONS = ('compatibility', 'random', 'all')
# Sort keys of grafted prompts among the others, whose key is 0.
ORDERS = {'last': 1, 'first': -1, 'uniform': 0}

_MAX_LOG_RATIO = 10.0  # A peer may claim any probability.


def rows(
  groups: Sequence[peer_groups.PeerGroup], context: context_lib.Context
) -> list[rows_lib.Row]:
  """Rows of the responses that are compatible with the learner.

    s = exp(mean_t log pi_B(o_t) - mean_u log pi_A(o_u)),  w = 1[s > f] min(s, 1)

  over the tokens of the learner B and of the source A, each at the temperature at
  which it samples. A response of s <= f is not admitted; the others enter with
  weight w and the ratio of B's new to old probabilities.

  GRAFT, https://arxiv.org/abs/2609.37868. The controls of `config.method.graft`
  are its authors': `admission` 'random' admits as many responses at random,
  'all' admits every response; without `weighted`, w is 1; `success_only` leaves
  out a group's failures.
  """
  graft = context.settings.graft
  if graft.success_only:
    groups = [
      group._replace(rollouts=[r for r in group.rollouts if r.success])
      for group in groups
    ]
  pairs = peer_rows.pairs(groups, context)
  rescored = context.rescore([row for row, _ in pairs])
  difference_B = [
    row.old_logp.mean(dtype=np.float64)
    - rollout.sampling_logp.mean(dtype=np.float64)
    for row, (_, rollout) in zip(rescored, pairs, strict=True)
  ]
  compatibility_B = np.exp(
    np.clip(difference_B, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
  )
  admitted_B = admission(compatibility_B, graft, context.rng)
  if pairs:
    context.log.refused['incompatible'] += len(pairs) - int(admitted_B.sum())
    context.log.metrics |= {
      'compatibility': float(np.median(compatibility_B)),
      'admitted': float(admitted_B.mean()),
    }
  return [
    row._replace(weight=float(min(s, 1.0)) if graft.weighted else 1.0)
    for row, s, admitted in zip(
      rescored, compatibility_B, admitted_B, strict=True
    )
    if admitted
  ]


def admission(
  compatibility_B: np.ndarray, graft, rng: np.random.Generator
) -> np.ndarray:
  """Which responses `config.method.graft` admits, bool [B]."""
  if graft.admission == 'all':
    return np.ones(len(compatibility_B), bool)
  admitted_B = compatibility_B > graft.floor
  random = graft.admission == 'random'
  return rng.permutation(admitted_B) if random else admitted_B


def order(
  prompts: Collection[int], grafted: Collection[int], where: str
) -> list[int]:
  """The prompts of a round in the order in which they are trained on.

  By default the `grafted` prompts, whose own group was replaced, come last, so
  that a policy trains on its own samples first. `where` is a name in `ORDERS`;
  'uniform' leaves them where they are.
  """
  return sorted(prompts, key=lambda p: (ORDERS[where] * (p in grafted), p))
