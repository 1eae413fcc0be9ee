"""Causal attention in blocks, in memory that is linear in the length.

FlashAttention-2 (2307.08691) in plain jax: the forward pass keeps a running
maximum and sum of each softmax, and the backward pass computes the weights
again from their logarithmic sum. Blocks of keys after a block of queries, or
before its window, are not computed.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

_MASKED = -1e30  # Finite: a token that attends to nothing would become NaN.


class Settings(NamedTuple):
  """What does not depend on the arrays."""

  block: int  # Queries, and keys, of a block; divides T.
  scale: float  # Multiplies scores.
  window: int  # Tokens that a token attends to, itself included; 0: all.
  cap: float  # c of the soft cap c tanh(x / c) of scores; 0 is none.


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attention(q_BKRTE, k_BKTE, v_BKTE, valid_BT, settings: Settings):
  """Attends to the valid tokens up to a token's own; returns [B, K, R, T, E].

  R query heads share each of K heads of keys and values.
  """
  return _forward(q_BKRTE, k_BKTE, v_BKTE, valid_BT, settings)[0]


def _forward(q_BKRTE, k_BKTE, v_BKTE, valid_BT, settings):
  """The result, and the logarithm of each softmax's sum, [B, K, R, T]."""
  block, length = settings.block, valid_BT.shape[1]

  def of_queries(i):
    q_BKRtE = _cut(q_BKRTE, i, block)

    def add(j, sums):
      most_BKRt, sum_BKRt, out_BKRtE = sums
      score_BKRts, mask_B11ts, _ = _scores(
        q_BKRtE, k_BKTE, valid_BT, i, j, settings
      )
      more_BKRt = jnp.maximum(most_BKRt, score_BKRts.max(-1))
      weight_BKRts = jnp.exp(score_BKRts - more_BKRt[..., None]) * mask_B11ts
      kept_BKRt = jnp.exp(most_BKRt - more_BKRt)
      v_BKsE = _cut(v_BKTE, j, block)
      return (
        more_BKRt,
        sum_BKRt * kept_BKRt + weight_BKRts.sum(-1),
        out_BKRtE * kept_BKRt[..., None]
        + _einsum(
          'BKRts,BKsE->BKRtE', weight_BKRts.astype(v_BKsE.dtype), v_BKsE
        ),
      )

    zeros_BKRt = jnp.zeros(q_BKRtE.shape[:-1], jnp.float32)
    zeros_BKRtE = jnp.zeros(q_BKRtE.shape, jnp.float32)
    most_BKRt, sum_BKRt, out_BKRtE = jax.lax.fori_loop(
      _first_keys(i, settings),
      i + 1,
      add,
      (zeros_BKRt + _MASKED, zeros_BKRt, zeros_BKRtE),
    )
    sum_BKRt = jnp.maximum(sum_BKRt, jnp.finfo(jnp.float32).tiny)
    out_BKRtE /= sum_BKRt[..., None]
    return out_BKRtE.astype(q_BKRTE.dtype), most_BKRt + jnp.log(sum_BKRt)

  blocks = jax.lax.map(of_queries, jnp.arange(length // block))
  out_BKRTE, log_sum_BKRT = (_joined(x) for x in blocks)
  return out_BKRTE, log_sum_BKRT


def _forward_rule(q_BKRTE, k_BKTE, v_BKTE, valid_BT, settings):
  out_BKRTE, log_sum_BKRT = _forward(
    q_BKRTE, k_BKTE, v_BKTE, valid_BT, settings
  )
  kept = q_BKRTE, k_BKTE, v_BKTE, valid_BT, out_BKRTE, log_sum_BKRT
  return out_BKRTE, kept


def _backward_rule(settings, kept, d_out_BKRTE):
  q_BKRTE, k_BKTE, v_BKTE, valid_BT, out_BKRTE, log_sum_BKRT = kept
  block, blocks = settings.block, valid_BT.shape[1] // settings.block
  # sum_s weight d_weight, by which the softmax's gradient is centred.
  centre_BKRT = _einsum('BKRTE,BKRTE->BKRT', out_BKRTE, d_out_BKRTE)

  def of_keys(d_q_BKRTE, j):
    k_BKsE, v_BKsE = _cut(k_BKTE, j, block), _cut(v_BKTE, j, block)

    def add(i, sums):
      d_q_BKRTE, d_k_BKsE, d_v_BKsE = sums
      q_BKRtE = _cut(q_BKRTE, i, block)
      d_out_BKRtE = _cut(d_out_BKRTE, i, block)
      score_BKRts, mask_B11ts, slope = _scores(
        q_BKRtE, k_BKTE, valid_BT, i, j, settings
      )
      log_sum_BKRt1 = _cut(log_sum_BKRT[..., None], i, block)
      weight_BKRts = jnp.exp(score_BKRts - log_sum_BKRt1) * mask_B11ts
      d_weight_BKRts = _einsum('BKRtE,BKsE->BKRts', d_out_BKRtE, v_BKsE)
      centre_BKRt1 = _cut(centre_BKRT[..., None], i, block)
      d_score_BKRts = weight_BKRts * (d_weight_BKRts - centre_BKRt1)
      d_score_BKRts = (d_score_BKRts * slope).astype(q_BKRtE.dtype)
      d_q_BKRtE = _cut(d_q_BKRTE, i, block) + _einsum(
        'BKRts,BKsE->BKRtE', d_score_BKRts, k_BKsE
      )
      return (
        jax.lax.dynamic_update_slice_in_dim(
          d_q_BKRTE, d_q_BKRtE, i * block, axis=-2
        ),
        d_k_BKsE + _einsum('BKRts,BKRtE->BKsE', d_score_BKRts, q_BKRtE),
        d_v_BKsE
        + _einsum(
          'BKRts,BKRtE->BKsE', weight_BKRts.astype(v_BKsE.dtype), d_out_BKRtE
        ),
      )

    zeros_BKsE = jnp.zeros(k_BKsE.shape, jnp.float32)
    d_q_BKRTE, d_k_BKsE, d_v_BKsE = jax.lax.fori_loop(
      j,
      _last_queries(j, blocks, settings),
      add,
      (d_q_BKRTE, zeros_BKsE, zeros_BKsE),
    )
    return d_q_BKRTE, (d_k_BKsE, d_v_BKsE)

  d_q_BKRTE, blocks_of_keys = jax.lax.scan(
    of_keys, jnp.zeros(q_BKRTE.shape, jnp.float32), jnp.arange(blocks)
  )
  d_k_BKTE, d_v_BKTE = (
    jnp.moveaxis(x, 0, 2).reshape(k_BKTE.shape) for x in blocks_of_keys
  )
  return (
    d_q_BKRTE.astype(q_BKRTE.dtype),
    d_k_BKTE.astype(k_BKTE.dtype),
    d_v_BKTE.astype(v_BKTE.dtype),
    None,
  )


attention.defvjp(_forward_rule, _backward_rule)


def _scores(q_BKRtE, k_BKTE, valid_BT, i, j, settings):
  """Scores of queries i and keys j, their mask, and the slope to the products."""
  block = settings.block
  product_BKRts = _einsum('BKRtE,BKsE->BKRts', q_BKRtE, _cut(k_BKTE, j, block))
  product_BKRts *= settings.scale
  score_BKRts, slope = product_BKRts, settings.scale
  if settings.cap:
    bent_BKRts = jnp.tanh(product_BKRts / settings.cap)
    score_BKRts = settings.cap * bent_BKRts
    slope = settings.scale * (1 - bent_BKRts**2)
  places_b = jnp.arange(block)
  distance_ts = (i - j) * block + places_b[:, None] - places_b[None, :]
  mask_ts = distance_ts >= 0
  if settings.window:
    mask_ts &= distance_ts < settings.window
  valid_Bs = jax.lax.dynamic_slice_in_dim(valid_BT, j * block, block, axis=1)
  mask_B11ts = (mask_ts[None] & valid_Bs[:, None, :])[:, None, None]
  return jnp.where(mask_B11ts, score_BKRts, _MASKED), mask_B11ts, slope


def _first_keys(i, settings):
  """The first block of keys that queries of block i attend to."""
  if not settings.window:
    return 0
  return jnp.maximum(
    0, (i * settings.block - settings.window + 1) // settings.block
  )


def _last_queries(j, blocks, settings):
  """One past the last block of queries that attend to keys of block j."""
  if not settings.window:
    return blocks
  last = (j + 1) * settings.block - 1 + settings.window - 1
  return jnp.minimum(blocks, last // settings.block + 1)


def _einsum(spec, x, y):
  return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)


def _cut(x, i, block):
  """Block i of the second-to-last axis."""
  return jax.lax.dynamic_slice_in_dim(x, i * block, block, axis=-2)


def _joined(x_NBKRt):
  """Joins blocks [N, B, K, R, t, ...] to [B, K, R, T, ...]."""
  x_BKRNt = jnp.moveaxis(x_NBKRt, 0, 3)
  shape = x_BKRNt.shape
  return x_BKRNt.reshape(*shape[:3], shape[3] * shape[4], *shape[5:])
