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
) -> np.ndarray:
  """Moments of what all peers sent, f64 [P, 3]; zeros where they sent none.

  Args:
    received: records of peers; those that are not `GroupStats` are passed by.
    place: the place of each prompt of the round.
  """
  moments_P3 = np.zeros((len(place), 3))
  for r in received:
    if isinstance(r, records.GroupStats):
      moments = (r.count, r.reward_sum, r.reward_square_sum)
      moments_P3[place[r.header.prompt]] += moments
  return moments_P3


def pooled(own_P3: np.ndarray, peers_P3: np.ndarray) -> np.ndarray:
  """The baseline's moments over own and peer rewards together.

    b = (sum of own rewards + sum of peers' rewards) / n

  where n counts own and peers' samples of the prompt, and the deviation is over
  the same n rewards. No text and no token crosses, and the rollouts that are
  trained on stay the policy's own. If no own sample succeeds and k of the n do,
  every own row gets -sqrt(k / (n - k)).

  Mutual RL, https://arxiv.org/abs/2605.07244, shares advantage signals; that
  they are pooled moments is our reconstruction.

  Args:
    own_P3: `grpo.moments` of the policy.
    peers_P3: those of its peers together; zeros where they gave none, which
      leaves exactly the policy's own.

  Returns:
    f64 [P, 3].
  """
  return own_P3 + peers_P3
