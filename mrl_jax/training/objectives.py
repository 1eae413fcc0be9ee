"""What is maximised on each kind of rows: losses applied to `Rows`."""

import jax.numpy as jnp

from mrl_jax.losses import grpo
from mrl_jax.losses import prp
from mrl_jax.training import update


def own(settings) -> update.Objective:
  """GRPO on the policy's own rows, whose ratios are by token.

  Args:
    settings: `config.method`.
  """

  def objective(logp_BT, rows: update.Rows):
    ratio_BT = jnp.exp(logp_BT - rows.old_logp_BT)
    return _clipped(ratio_BT, rows, settings)

  return objective


def peer_ratio(settings) -> update.Objective:
  """PRP on peers' rows, whose ratios are by chunk and truncated.

  Args:
    settings: `config.method`.
  """

  def objective(logp_BT, rows: update.Rows):
    ratio_BT = prp.chunk_ratio(
      logp_BT, rows.old_logp_BT, rows.chunk_BT, settings.max_ratio
    )
    return _clipped(ratio_BT, rows, settings)

  return objective


def log_likelihood(logp_BT, rows: update.Rows):
  """Supervised learning: the log-likelihood of the rows as they are."""
  del rows
  return logp_BT, {}


def _clipped(ratio_BT, rows, settings):
  """The clipped surrogate, and sums over tokens that tell of the ratios."""
  clip = (settings.clip_low, settings.clip_high)
  objective_BT = grpo.clipped_surrogate(
    ratio_BT, rows.advantage_B1, *clip, settings.dual_clip
  )
  is_clipped_BT = grpo.is_clipped(ratio_BT, rows.advantage_B1, *clip)
  mask_BT = rows.weight_BT > 0

  def total(x_BT):
    return jnp.sum(x_BT, where=mask_BT, dtype=jnp.float32)

  return objective_BT, {
    'tokens': total(jnp.ones_like(ratio_BT)),
    'ratio': total(ratio_BT),
    'ratio_square': total(ratio_BT**2),
    'clipped': total(is_clipped_BT),
  }
