"""What is maximised on each kind of rows: losses applied to `Rows`."""

import jax.numpy as jnp

from mrl_jax.losses import grpo
from mrl_jax.losses import gspo
from mrl_jax.losses import hacpo
from mrl_jax.losses import kl
from mrl_jax.losses import luffy
from mrl_jax.losses import prp
from mrl_jax.training import metrics
from mrl_jax.update import update

_MAX_LOG_RATIO = 10.0  # HACPO's bound of its ratios.


def own(settings, ratio: str) -> update.Objective:
  """GRPO or GSPO on the policy's own rows, less the KL penalty.

  Args:
    settings: `config.method`.
    ratio: 'token', or 'sequence' for GSPO's of whole responses.
  """

  def objective(logp_BT, rows: update.Rows):
    if ratio == 'sequence':
      ratio_BT = gspo.sequence_ratio(logp_BT, rows.old_logp_BT, rows.mask_BT)
    else:
      ratio_BT = jnp.exp(logp_BT - rows.old_logp_BT)
    objective_BT, statistics = _clipped(ratio_BT, rows, settings)
    if ratio == 'sequence':
      token_BT = jnp.exp(logp_BT - rows.old_logp_BT)
      statistics |= _ratios(token_BT, rows, '_of_tokens')
    if settings.kl_weight:
      kl_BT = kl.estimate(logp_BT, rows.reference_logp_BT, settings.kl_form)
      objective_BT -= settings.kl_weight * kl_BT
      statistics['kl'] = _total(kl_BT, rows)
    return objective_BT, statistics

  return objective


def peer_ratio(settings) -> update.Objective:
  """PRP on peers' rows, whose ratios are by chunk and truncated."""

  def objective(logp_BT, rows: update.Rows):
    ratio_BT = prp.chunk_ratio(
      logp_BT, rows.old_logp_BT, rows.chunk_BT, settings.prp.max_ratio
    )
    # Where the truncation acts: the value is that of its bound.
    truncated_BT = ratio_BT >= settings.prp.max_ratio * (1 - 1e-6)
    objective_BT, statistics = _clipped(ratio_BT, rows, settings)
    statistics['truncated'] = _total(truncated_BT, rows)
    return objective_BT, statistics

  return objective


def grafted(settings) -> update.Objective:
  """GRAFT on peers' rows: as on own, by token, whatever own ratios are of."""

  def objective(logp_BT, rows: update.Rows):
    return _clipped(jnp.exp(logp_BT - rows.old_logp_BT), rows, settings)

  return objective


def stepwise(settings) -> update.Objective:
  """HACPO on peers' rows, whose ratios are of whole responses."""
  bounds = settings.hacpo

  def objective(logp_BT, rows: update.Rows):
    ratio_BT = gspo.sequence_ratio(
      logp_BT, rows.old_logp_BT, rows.mask_BT, _MAX_LOG_RATIO
    )
    low_B1, high = jnp.full_like(rows.advantage_B1, -jnp.inf), jnp.inf
    if bounds.clip:
      high = 1.0
      low_B1 = hacpo.lower_bound(
        bounds.delta, bounds.delta_step, rows.mini_batch_B1
      )
    objective_BT = hacpo.stepwise_surrogate(
      ratio_BT, rows.advantage_B1, low_B1, high, bounds.alpha
    )
    clipped_BT = (ratio_BT < low_B1) | (ratio_BT > high)
    return objective_BT, _of_ratios(ratio_BT, clipped_BT, rows)

  return objective


def shaped(settings) -> update.Objective:
  """LUFFY on peers' rows."""

  def objective(logp_BT, rows: update.Rows):
    return luffy.shaped(logp_BT, rows.advantage_B1, settings.luffy.gamma), {
      'tokens': _total(jnp.ones_like(logp_BT), rows)
    }

  return objective


def nll(settings) -> update.Objective:
  """SGT on peers' successes: their log-likelihood."""
  del settings

  def objective(logp_BT, rows: update.Rows):
    return logp_BT, {
      'tokens': _total(jnp.ones_like(logp_BT), rows),
      'logp': _total(logp_BT, rows),
    }

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
  clipped_BT = grpo.is_clipped(ratio_BT, rows.advantage_B1, *clip)
  return objective_BT, _of_ratios(ratio_BT, clipped_BT, rows)


def _of_ratios(ratio_BT, clipped_BT, rows):
  return {
    'tokens': _total(jnp.ones_like(ratio_BT), rows),
    **_ratios(ratio_BT, rows),
    'log_ratio_counts': _counts(jnp.log(ratio_BT), rows),
    'clipped': _total(clipped_BT, rows),
  }


def _ratios(ratio_BT, rows, suffix=''):
  return {
    f'ratio{suffix}': _total(ratio_BT, rows),
    f'ratio_square{suffix}': _total(ratio_BT**2, rows),
    f'log_ratio{suffix}': _total(jnp.log(ratio_BT), rows),
    f'max_ratio{suffix}': jnp.max(ratio_BT, where=rows.mask_BT, initial=0.0),
  }


def _counts(log_ratio_BT, rows):
  """Tokens in each of the bins between `metrics.LOG_RATIO_EDGES`."""
  is_above_BTE = log_ratio_BT[..., None] > metrics.LOG_RATIO_EDGES[None, None]
  above_E = jnp.sum(
    is_above_BTE, (0, 1), where=rows.mask_BT[..., None], dtype=jnp.float32
  )
  tokens = _total(jnp.ones_like(log_ratio_BT), rows)
  return -jnp.diff(above_E, prepend=tokens, append=0)


def _total(x_BT, rows):
  return jnp.sum(x_BT, where=rows.mask_BT, dtype=jnp.float32)
