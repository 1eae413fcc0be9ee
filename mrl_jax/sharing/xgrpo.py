"""XGRPO: the peers' rewards move the baseline of the policy's own rollouts."""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from mrl_jax import records
from mrl_jax.sharing import grpo


def group_stats(group: Sequence[records.Rollout]) -> records.GroupStats:
  """What crosses: the moments of a group's rewards."""
  rewards_1G = np.array([[rollout.reward for rollout in group]])
  count, reward_sum, reward_square_sum = grpo.moments(rewards_1G)[0]
  return records.GroupStats(
    header=msgspec.structs.replace(group[0].header, sample=records.WHOLE_GROUP),
    count=int(count),
    reward_sum=float(reward_sum),
    reward_square_sum=float(reward_square_sum),
    successes=sum(rollout.success for rollout in group),
  )


def peer_moments(
  received: Sequence[records.Record], place: Mapping[str, int]
) -> dict[str, np.ndarray]:
  """Moments of what every peer sent, f64 [P, 3]; zeros where it sent none.

  Args:
    received: records of peers; those that are not `GroupStats` are passed by.
    place: the place of each prompt of the round.
  """
  peers = {}
  for r in received:
    if isinstance(r, records.GroupStats):
      moments_P3 = peers.setdefault(r.header.policy, np.zeros((len(place), 3)))
      moments = (r.count, r.reward_sum, r.reward_square_sum)
      moments_P3[place[r.header.prompt]] += moments
  return peers


def pooled(
  own_P3: np.ndarray, peers: Mapping[str, np.ndarray], settings, ratios
) -> grpo.Baseline:
  """The mean and deviation of own and peer rewards together.

    b = (sum of own rewards + sum of peers' rewards) / n

  where n counts own and peers' samples of the prompt, and the deviation is over
  the same n rewards. No text and no token crosses, and the rollouts that are
  trained on stay the policy's own. If no own sample succeeds and k of the n do,
  every own row gets -sqrt(k / (n - k)).

  Mutual RL, https://arxiv.org/abs/2605.07244, shares advantage signals; that
  they are pooled moments is our reconstruction.

  Args:
    own_P3: `grpo.moments` of the policy.
    peers: those of each peer; without any, the baseline is exactly its own.
    settings: `config.method`; not read.
    ratios: not read.
  """
  del settings, ratios
  return grpo.baseline(sum(peers.values(), own_P3))


def interpolated(
  own_P3: np.ndarray, peers: Mapping[str, np.ndarray], settings, ratios
) -> grpo.Baseline:
  """Between the mean of own and that of peers' rewards.

    b = (1 - a) mean of own + a mean of peers'

  and the deviation is that of the same mixture. With a = h / n, where h of the
  n samples are peers', this is `pooled`. Our reconstruction, as `pooled` is.

  Args:
    own_P3: `grpo.moments` of the policy.
    peers: those of each peer; where they gave none, the baseline is its own.
    settings: `config.method`, of which `interpolation` is a.
    ratios: not read.
  """
  del ratios
  peers_P3 = sum(peers.values(), np.zeros_like(own_P3))
  count_P1 = peers_P3[:, :1]
  a_P1 = settings.interpolation * (count_P1 > 0)
  mixed_P3 = (1 - a_P1) * own_P3 / own_P3[:, :1]
  mixed_P3 = mixed_P3 + a_P1 * peers_P3 / np.maximum(count_P1, 1)
  return grpo.baseline(mixed_P3 * (own_P3[:, :1] + count_P1))
