"""HACPO: how able policies are, and baselines that allow for it.

https://arxiv.org/abs/2603.02604; where the paper and its authors' code differ,
the code.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from mrl_jax import records
from mrl_jax.sharing import grpo

_LEAST_ACCURACY = 1e-8
_RATIOS = (0.1, 10.0)


def remember(
  history: Mapping[str, Sequence[float]],
  own: tuple[str, Sequence[Sequence[records.Rollout]]],
  received: Sequence[records.Record],
  window: int,
) -> dict[str, list[float]]:
  """The batch accuracies of the last rounds, this one included.

  Args:
    history: of each policy; what this returned a round ago.
    own: the learner's name and groups.
    received: records of peers, of which `GroupStats` tell their accuracy; a
      peer that sent none this round keeps its last ones.
    window: rounds that are kept, K.
  """
  name, groups = own
  counts = {name: [sum(map(len, groups)), sum(map(_successes, groups))]}
  for r in received:
    if isinstance(r, records.GroupStats):
      count = counts.setdefault(r.header.policy, [0, 0])
      count[0] += r.count
      count[1] += r.successes
  longer = {name: list(accuracies) for name, accuracies in history.items()}
  for name, (samples, successes) in counts.items():
    longer.setdefault(name, []).append(successes / samples)
  return {name: accuracies[-window:] for name, accuracies in longer.items()}


def ratios(
  history: Mapping[str, Sequence[float]], learner: str
) -> dict[str, float]:
  """The learner's capability relative to that of each policy, w(k, j).

  w(k, j) = clip(P_k / P_j, 0.1, 10), with P the mean accuracy of the window.
  """
  able = {
    name: max(float(np.mean(accuracies)), _LEAST_ACCURACY)
    for name, accuracies in history.items()
  }
  return {
    name: float(np.clip(able[learner] / able[name], *_RATIOS)) for name in able
  }


def capability(
  own_P3: np.ndarray,
  peers: Mapping[str, np.ndarray],
  settings,
  ratios: Mapping[str, float],
) -> grpo.Baseline:
  """The mean of all rewards, each as if the learner had earned it.

    b_k = (sum over sources j of w(k, j) times their rewards) / n

  The learner's own mean where that is above 1, and the plain mean where all n
  rewards are equal. The deviation is that of the n rewards as they are; HACPO
  takes the unbiased one (`grpo.SCALES`). HACPO, sec. 4.1.

  Args:
    own_P3: `grpo.moments` of the policy; rewards are at most 1.
    peers: those of each peer.
    settings: `config.method`; not read.
    ratios: `ratios` of the learner.
  """
  del settings
  all_P3 = sum(peers.values(), own_P3)
  weighted_P1 = own_P3[:, 1:2] + sum(
    ratios[name] * peer_P3[:, 1:2] for name, peer_P3 in peers.items()
  )
  plain = grpo.baseline(all_P3)
  mean_P1 = weighted_P1 / all_P3[:, :1]
  mean_P1 = np.where(mean_P1 > 1, grpo.baseline(own_P3).mean_P1, mean_P1)
  equal_P1 = grpo.all_equal(all_P3)
  return grpo.Baseline(np.where(equal_P1, plain.mean_P1, mean_P1), all_P3)


def _successes(group):
  return sum(rollout.success for rollout in group)
