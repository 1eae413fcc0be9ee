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
  """A micro-batch of packed rows, of a policy's own responses or its peers'.

  A packed row has the tokens of several rows, each a prompt and its response,
  one after the other. All but `row_BS` stand at the slot of the token that is
  scored, and are 0 at prompts and padding. With the prompt [5, 6] and its
  response [7, 8], then the prompt [4] and its response [9]:

    tokens_BS  5 6 7 8 4 9 0     mask_BS   0 0 1 1 0 1 0
    row_BS     1 1 1 1 2 2 0     chunk_BS  0 0 2 3 0 5 0
  """

  tokens_BS: jax.Array
  row_BS: jax.Array  # Which row a token belongs to, 1, 2, ...; 0 at padding.
  old_logp_BS: jax.Array  # In the denominator of ratios.
  advantage_BS: jax.Array  # Of the whole response.
  # Of each token in the loss. The weights contain the averaging over the whole
  # mini-batch, so that a plain sum over micro-batches and devices is the loss.
  weight_BS: jax.Array
  mask_BS: jax.Array  # False at tokens not trained on.
  # Of each token, unique within the packed row, above 0 in responses; see
  # `losses/prp.py`.
  chunk_BS: jax.Array
  mini_batch_B1: jax.Array  # Index of the mini-batch in the round.
  # Under the reference policy, if there is a KL penalty.
  reference_logp_BS: jax.Array | None = None

  @property
  def is_response_BS(self):
    """Whether a token belongs to a response: all rows begin with a prompt."""
    return self.chunk_BS > 0


class Objective(NamedTuple):
  """What is maximised on rows of one kind."""

  # Maps scores of the response tokens, 0 elsewhere, and their micro-batch to
  # (objective_BS, statistics). Statistics are sums over tokens, or maxima if the
  # name begins with 'max_'.
  function: Callable[[logps.Scores, PackedRows], tuple[jax.Array, dict]]
  reads_entropy: bool = False  # Whether it needs the entropies of the scores.


def own(settings, ratio: str, by_trainer: bool = False) -> Objective:
  """GRPO or GSPO on own rows, less the KL penalty, plus the entropy bonus.

  `ratio` is 'token', or 'sequence' for GSPO's ratios of whole responses.

  With `by_trainer`, denominators are log-probabilities by the trainer. In the
  first mini-batch of a round they are its own scores, with stopped gradient, so
  that every ratio is exactly 1; `old_logp_BS` has there the log-probabilities by
  the sampler, with which they are compared.
  """

  def objective(scores, rows):
    logp_BS, old_logp_BS, statistics = scores.logp_BS, rows.old_logp_BS, {}
    if by_trainer:
      before_BS = jax.lax.stop_gradient(logp_BS)
      mismatch_BS = jnp.exp(before_BS - old_logp_BS)
      statistics |= _ratios(mismatch_BS, rows, '_to_sampler')
      old_logp_BS = jnp.where(rows.mini_batch_B1 == 0, before_BS, old_logp_BS)
    token_BS = jnp.exp(logp_BS - old_logp_BS)
    if ratio == 'sequence':
      ratio_BS = gspo.sequence_ratio(
        logp_BS, old_logp_BS, rows.mask_BS, rows.row_BS
      )
      statistics |= _ratios(token_BS, rows, '_of_tokens')
    else:
      ratio_BS = token_BS
    objective_BS, of_ratios = _clipped(ratio_BS, rows, settings)
    statistics |= of_ratios
    if settings.kl_weight:
      kl_BS = kl.estimate(logp_BS, rows.reference_logp_BS, settings.kl_form)
      objective_BS -= settings.kl_weight * kl_BS
      statistics['kl'] = _total(kl_BS, rows)
    if settings.entropy_weight:
      objective_BS += settings.entropy_weight * scores.entropy_BS
    return objective_BS, statistics

  return Objective(objective, reads_entropy=settings.entropy_weight > 0)


# Objectives on peers' rows, for `algorithms.HOW`: functions of `config.method`
# and of what `Objective.function` maps.


def peer_ratio(settings, scores, rows):
  """PRP on peers' rows: truncated ratios of chunks."""
  most = settings.prp.max_ratio
  ratio_BS = prp.chunk_ratio(
    scores.logp_BS, rows.old_logp_BS, rows.chunk_BS, most
  )
  # A truncated ratio has the value of its bound, up to rounding.
  truncated_BS = ratio_BS >= most * (1 - 1e-6)
  objective_BS, statistics = _clipped(ratio_BS, rows, settings)
  statistics['truncated'] = _total(truncated_BS, rows)
  return objective_BS, statistics


def grafted(settings, scores, rows):
  """GRAFT on peers' rows: GRPO's surrogate of token ratios."""
  return _clipped(jnp.exp(scores.logp_BS - rows.old_logp_BS), rows, settings)


def stepwise(settings, scores, rows):
  """HACPO on peers' rows: ratios of whole responses, clipped stepwise."""
  bounds = settings.hacpo
  ratio_BS = gspo.sequence_ratio(
    scores.logp_BS,
    rows.old_logp_BS,
    rows.mask_BS,
    rows.row_BS,
    _MAX_LOG_RATIO,
  )
  low_B1, high = jnp.full_like(rows.mini_batch_B1, -jnp.inf), jnp.inf
  if bounds.clip:
    high = 1.0
    low_B1 = hacpo.lower_bound(
      bounds.delta, bounds.delta_step, rows.mini_batch_B1
    )
  objective_BS = hacpo.stepwise_surrogate(
    ratio_BS, rows.advantage_BS, low_B1, high, bounds.alpha
  )
  clipped_BS = (ratio_BS < low_B1) | (ratio_BS > high)
  return objective_BS, _of_ratios(ratio_BS, clipped_BS, rows)


def shaped(settings, scores, rows):
  """LUFFY on peers' rows."""
  objective_BS = luffy.shaped(
    scores.logp_BS, rows.advantage_BS, settings.luffy.gamma
  )
  return objective_BS, {'tokens': _total(rows.mask_BS, rows)}


def log_likelihood(settings, scores, rows):
  """SGT on peers' successes."""
  del settings
  logp = _total(scores.logp_BS, rows)
  return scores.logp_BS, {'tokens': _total(rows.mask_BS, rows), 'logp': logp}


# Supervised training: the log-likelihood of the rows.
LOG_LIKELIHOOD = Objective(lambda scores, rows: (scores.logp_BS, {}))


def _clipped(ratio_BS, rows, settings):
  clip = (settings.clip_low, settings.clip_high, settings.dual_clip)
  objective_BS = grpo.clipped_surrogate(ratio_BS, rows.advantage_BS, *clip)
  clipped_BS = grpo.is_clipped(ratio_BS, rows.advantage_BS, *clip)
  return objective_BS, _of_ratios(ratio_BS, clipped_BS, rows)


def _of_ratios(ratio_BS, clipped_BS, rows):
  return {
    'tokens': _total(rows.mask_BS, rows),
    **_ratios(ratio_BS, rows),
    'log_ratio_counts': _counts(jnp.log(ratio_BS), rows),
    'clipped': _total(clipped_BS, rows),
  }


def _ratios(ratio_BS, rows, suffix=''):
  return {
    f'ratio{suffix}': _total(ratio_BS, rows),
    f'ratio_square{suffix}': _total(ratio_BS**2, rows),
    f'log_ratio{suffix}': _total(jnp.log(ratio_BS), rows),
    f'max_ratio{suffix}': jnp.max(ratio_BS, where=rows.mask_BS, initial=0.0),
  }


def _counts(log_ratio_BS, rows):
  """The histogram of log ratios: tokens by bin of `config.LOG_RATIO_EDGES`.

  Bin e has the tokens above edge e - 1 that are not above edge e:

    tokens 5, above each edge [4, 4, 1]  ->  counts [1, 0, 3, 1]
  """
  edges_11E = config_lib.LOG_RATIO_EDGES[None, None]
  is_above_BSE = log_ratio_BS[..., None] > edges_11E
  above_E = jnp.sum(
    is_above_BSE, (0, 1), where=rows.mask_BS[..., None], dtype=jnp.float32
  )
  return -jnp.diff(above_E, prepend=_total(rows.mask_BS, rows), append=0)


def _total(x_BS, rows):
  return jnp.sum(x_BS, where=rows.mask_BS, dtype=jnp.float32)
