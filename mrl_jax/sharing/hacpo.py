"""HACPO: the capability of the policies, and what is weighted by it.

https://arxiv.org/abs/2603.02604; where the paper and its authors' code differ,
the code.
"""

import collections
from collections.abc import Mapping, Sequence

import numpy as np

from mrl_jax import records
from mrl_jax.sharing import context as context_lib
from mrl_jax.sharing import grpo
from mrl_jax.sharing import peer_groups
from mrl_jax.sharing import peer_rows
from mrl_jax.sharing import rows as rows_lib

_LEAST_ACCURACY = 1e-8
_RATIO_BOUNDS = (0.1, 10.0)


def remember_accuracies(
  history: Mapping[str, Sequence[float]],
  learner: str,
  groups: Sequence[Sequence[records.Rollout]],
  received: Sequence[records.Record],
  window: int,
) -> dict[str, list[float]]:
  """The batch accuracies of the last `window` rounds (K), by policy.

  New ones are added to `history`, the result of the previous round: the learner's
  from its own groups, a peer's from its `GroupStats`, one for each round that it
  played; a late peer's may arrive together. A peer that sent none keeps its last
  accuracies.
  """
  own = [rollout.success for group in groups for rollout in group]
  longer = {name: list(accuracies) for name, accuracies in history.items()}
  longer.setdefault(learner, []).append(sum(own) / len(own))
  counts = collections.defaultdict(lambda: np.zeros(2, int))
  for r in received:
    if isinstance(r, records.GroupStats):
      counts[r.header.round, r.header.policy] += (r.count, r.successes)
  for (_, name), (samples, successes) in sorted(counts.items()):
    longer.setdefault(name, []).append(float(successes / samples))
  return {name: accuracies[-window:] for name, accuracies in longer.items()}


def capability_ratios(
  history: Mapping[str, Sequence[float]], learner: str
) -> dict[str, float]:
  """The learner's capability relative to that of each policy, w(k, j).

    w(k, j) = clip(P_k / P_j, 0.1, 10)

  with P the mean accuracy over the window (`remember_accuracies`).
  """
  capability = {
    name: max(float(np.mean(accuracies)), _LEAST_ACCURACY)
    for name, accuracies in history.items()
  }
  return {
    name: float(np.clip(capability[learner] / other, *_RATIO_BOUNDS))
    for name, other in capability.items()
  }


def baseline(context: context_lib.Context) -> grpo.Baseline:
  """The mean of all rewards, each scaled to the learner's capability.

    b_k = (sum over sources j of w(k, j) times the rewards of j) / n

  It is the learner's own mean where b_k is above 1 (HACPO's rewards are 0 and 1),
  and the plain mean where all n rewards are equal. The deviation is that of the n raw
  rewards; HACPO takes the unbiased one (`grpo.SCALES`). HACPO, sec. 3.1.
  """
  own_P3, peers = context.own_moments_P3, context.peer_moments
  all_P3 = sum(peers.values(), own_P3)
  weighted_P1 = own_P3[:, 1:2] + sum(
    context.capability_ratio[name] * peer_P3[:, 1:2]
    for name, peer_P3 in peers.items()
  )
  plain = grpo.baseline(all_P3)
  mean_P1 = weighted_P1 / all_P3[:, :1]
  mean_P1 = np.where(mean_P1 > 1, grpo.baseline(own_P3).mean_P1, mean_P1)
  equal_P1 = grpo.all_equal(all_P3)
  return grpo.Baseline(np.where(equal_P1, plain.mean_P1, mean_P1), all_P3)


def rows(
  groups: Sequence[peer_groups.PeerGroup], context: context_lib.Context
) -> list[rows_lib.Row]:
  """Rows whose ratio compares mean log-probabilities a token.

    s = exp(mean_t log pi_k(y_t) - mean_u log pi_j(y_u))

  Each policy is taken at the temperature at which it samples. Each mean is over
  the policy's own tokens of the same text, so that every token of a row has the
  peer's mean as its denominator. The advantage is the learner's times
  w(j, k) = 1 / w(k, j), the peer's capability relative to the learner's (without
  `hacpo.capability_weight`, times 1). Rollouts of a peer that never reported its
  accuracy are left out and counted.

  HACPO, https://arxiv.org/abs/2603.02604, sec. 3.2 (weight) and 3.3 (ratio). The
  authors' code leaves end-of-sequence out of both means; here it is in both.
  """
  found, weights = [], {}
  for row, rollout in peer_rows.pairs(groups, context):
    peer, weight = rollout.header.policy, 1.0
    if context.settings.hacpo.capability_weight:
      if peer not in context.capability_ratio:
        context.log.refused['unknown_capability'] += 1
        continue
      weight = 1 / context.capability_ratio[peer]
    weights[peer] = weight
    mean = rollout.sampling_logp.mean(dtype=np.float64)
    found.append(
      row._replace(
        old_logp=np.full(len(row.ids), mean, np.float32),
        advantage=weight * row.advantage,
      )
    )
  context.log.metrics['capability'] = weights
  return found
