"""XGRPO: the peers' rewards move the baseline of the policy's own rollouts."""

import numpy as np

from mrl_jax.sharing import context as context_lib
from mrl_jax.sharing import grpo


def pooled(context: context_lib.Context) -> grpo.Baseline:
  """The mean and deviation of own and peer rewards together.

    b = (sum of own rewards + sum of peers' rewards) / n

  where n counts own and peers' samples of the prompt, and the deviation is over
  the same n rewards. Only reward statistics cross; the policy trains on its own
  rollouts. If no own sample succeeds and k of the n do, every own row has the
  advantage -sqrt(k / (n - k)). Without peers the baseline is exactly `grpo.own`.

  Mutual RL, https://arxiv.org/abs/2605.07244, shares advantage signals;
  that they are pooled moments is our reconstruction.
  """
  peers = context.peer_moments.values()
  return grpo.baseline(sum(peers, context.own_moments_P3))


def interpolated(context: context_lib.Context) -> grpo.Baseline:
  """A mixture of the mean of own and the mean of peers' rewards.

    b = (1 - a) mean of own + a mean of peers'

  with a = `config.method.interpolation`; the deviation is that of the same
  mixture. With a = h / n, where h of the n samples are peers', it is `pooled`.
  On prompts without peer rewards it is `grpo.own`. Our reconstruction, as
  `pooled` is.
  """
  own_P3 = context.own_moments_P3
  peers_P3 = sum(context.peer_moments.values(), np.zeros_like(own_P3))
  count_P1 = peers_P3[:, :1]
  a_P1 = context.settings.interpolation * (count_P1 > 0)
  mixed_P3 = (1 - a_P1) * own_P3 / own_P3[:, :1]
  mixed_P3 = mixed_P3 + a_P1 * peers_P3 / np.maximum(count_P1, 1)
  return grpo.baseline(mixed_P3 * (own_P3[:, :1] + count_P1))
