"""What is maximised on each kind of rows: losses applied to packed rows."""

from collections.abc import Callable
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mrl_jax import config as config_lib
from mrl_jax.losses import grpo
from mrl_jax.losses import gspo
from mrl_jax.losses import hacpo
from mrl_jax.losses import kl
from mrl_jax.losses import luffy
from mrl_jax.losses import prp
from mrl_jax.models import logps

_MAX_LOG_RATIO = 10.0  # HACPO's bound of its ratios.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedRows:
  """Rows of one kind, a policy's own or its peers', packed into arrays.

  Stacked micro-batches have one more axis, M, in front.
  """

  tokens_BS: jax.Array  # Left-padded prompts, then right-padded responses.
  valid_BS: jax.Array  # False at padding.
  old_logp_BT: jax.Array  # In the denominator of ratios; 0 at padding.
  advantage_B1: jax.Array
  # Of each token in the loss, 0 at padding. The weights contain the averaging
  # over the whole mini-batch, so that a plain sum over micro-batches and devices
  # is the loss.
  weight_BT: jax.Array
  mask_BT: jax.Array  # False at padding, and at tokens not trained on.
  chunk_BT: jax.Array  # Of each token, in [0, T); see `losses/prp.py`.
  mini_batch_B1: jax.Array  # Index of the mini-batch in the round.
  # Under the reference policy, if there is a KL penalty.
  reference_logp_BT: jax.Array | None = None


class Objective(NamedTuple):
  """What is maximised on rows of one kind."""

  # Maps scores of the response tokens and one micro-batch of rows to
  # (objective_BT, statistics). Statistics are sums over tokens, or maxima if the
  # name begins with 'max_'.
  function: Callable[[logps.Scores, PackedRows], tuple[jax.Array, dict]]
  reads_entropy: bool = False  # Whether it needs the entropies of the scores.


def own(settings, ratio: str, by_trainer: bool = False) -> Objective:
  """GRPO or GSPO on own rows, less the KL penalty, plus the entropy bonus.

  `ratio` is 'token', or 'sequence' for GSPO's ratios of whole responses.

  With `by_trainer`, denominators are log-probabilities by the trainer. In the
  first mini-batch of a round they are its own scores, with stopped gradient, so
  that every ratio is exactly 1; `old_logp_BT` has there the log-probabilities by
  the sampler, with which they are compared.
  """

  def objective(scores, rows):
    logp_BT, old_logp_BT, statistics = scores.logp_BT, rows.old_logp_BT, {}
    if by_trainer:
      before_BT = jax.lax.stop_gradient(logp_BT)
      mismatch_BT = jnp.exp(before_BT - old_logp_BT)
      statistics |= _ratios(mismatch_BT, rows, '_to_sampler')
      old_logp_BT = jnp.where(rows.mini_batch_B1 == 0, before_BT, old_logp_BT)
    token_BT = jnp.exp(logp_BT - old_logp_BT)
    if ratio == 'sequence':
      ratio_BT = gspo.sequence_ratio(logp_BT, old_logp_BT, rows.mask_BT)
      statistics |= _ratios(token_BT, rows, '_of_tokens')
    else:
      ratio_BT = token_BT
    objective_BT, of_ratios = _clipped(ratio_BT, rows, settings)
    statistics |= of_ratios
    if settings.kl_weight:
      kl_BT = kl.estimate(logp_BT, rows.reference_logp_BT, settings.kl_form)
      objective_BT -= settings.kl_weight * kl_BT
      statistics['kl'] = _total(kl_BT, rows)
    if settings.entropy_weight:
      objective_BT += settings.entropy_weight * scores.entropy_BT
    return objective_BT, statistics

  return Objective(objective, reads_entropy=settings.entropy_weight > 0)


# Objectives on peers' rows, for `algorithms.HOW`: functions of `config.method`
# and of what `Objective.function` maps.


def peer_ratio(settings, scores, rows):
  """PRP on peers' rows: truncated ratios of chunks."""
  most = settings.prp.max_ratio
  ratio_BT = prp.chunk_ratio(
    scores.logp_BT, rows.old_logp_BT, rows.chunk_BT, most
  )
  # A truncated ratio has the value of its bound, up to rounding.
  truncated_BT = ratio_BT >= most * (1 - 1e-6)
  objective_BT, statistics = _clipped(ratio_BT, rows, settings)
  statistics['truncated'] = _total(truncated_BT, rows)
  return objective_BT, statistics


def grafted(settings, scores, rows):
  """GRAFT on peers' rows: GRPO's surrogate of token ratios."""
  return _clipped(jnp.exp(scores.logp_BT - rows.old_logp_BT), rows, settings)


def stepwise(settings, scores, rows):
  """HACPO on peers' rows: ratios of whole responses, clipped stepwise."""
  bounds = settings.hacpo
  ratio_BT = gspo.sequence_ratio(
    scores.logp_BT, rows.old_logp_BT, rows.mask_BT, _MAX_LOG_RATIO
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


def shaped(settings, scores, rows):
  """LUFFY on peers' rows."""
  objective_BT = luffy.shaped(
    scores.logp_BT, rows.advantage_B1, settings.luffy.gamma
  )
  return objective_BT, {'tokens': _total(rows.mask_BT, rows)}


def log_likelihood(settings, scores, rows):
  """SGT on peers' successes."""
  del settings
  logp = _total(scores.logp_BT, rows)
  return scores.logp_BT, {'tokens': _total(rows.mask_BT, rows), 'logp': logp}


# Supervised training: the log-likelihood of the rows.
LOG_LIKELIHOOD = Objective(lambda scores, rows: (scores.logp_BT, {}))


def _clipped(ratio_BT, rows, settings):
  clip = (settings.clip_low, settings.clip_high, settings.dual_clip)
  objective_BT = grpo.clipped_surrogate(ratio_BT, rows.advantage_B1, *clip)
  clipped_BT = grpo.is_clipped(ratio_BT, rows.advantage_B1, *clip)
  return objective_BT, _of_ratios(ratio_BT, clipped_BT, rows)


def _of_ratios(ratio_BT, clipped_BT, rows):
  return {
    'tokens': _total(rows.mask_BT, rows),
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
  """The histogram of log ratios: tokens by bin of `config.LOG_RATIO_EDGES`.

  Bin e has the tokens above edge e - 1 that are not above edge e:

    tokens 5, above each edge [4, 4, 1]  ->  counts [1, 0, 3, 1]
  """
  edges_11E = config_lib.LOG_RATIO_EDGES[None, None]
  is_above_BTE = log_ratio_BT[..., None] > edges_11E
  above_E = jnp.sum(
    is_above_BTE, (0, 1), where=rows.mask_BT[..., None], dtype=jnp.float32
  )
  return -jnp.diff(above_E, prepend=_total(rows.mask_BT, rows), append=0)


def _total(x_BT, rows):
  return jnp.sum(x_BT, where=rows.mask_BT, dtype=jnp.float32)
