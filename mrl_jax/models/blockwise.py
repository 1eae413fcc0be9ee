"""Causal attention in blocks, in memory that is linear in the length.

FlashAttention-2 (2307.08691) in plain jax: the forward pass keeps a running
maximum and sum of each softmax, and the backward pass computes the weights
again from their logarithmic sum. Blocks of keys after a block of queries, before
its window, or before the rows of its tokens in every row of the batch, are not
computed: packed rows cost what their own lengths do.
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
def attention(q_BKRTE, k_BKTE, v_BKTE, row_BT, settings: Settings):
  """Attends to a row's tokens up to a token's own; returns [B, K, R, T, E].

  R query heads share each of K heads of keys and values. `row_BT` is as in
  `attention.causal`; padding attends to nothing.
  """
  return _forward(q_BKRTE, k_BKTE, v_BKTE, row_BT, settings)[0]


def _forward(q_BKRTE, k_BKTE, v_BKTE, row_BT, settings):
  """The result, and the logarithm of each softmax's sum, [B, K, R, T]."""
  block, first_N = settings.block, _first_blocks(row_BT, settings.block)

  def of_queries(i):
    q_BKRtE = _cut(q_BKRTE, i, block)

    def add(j, sums):
      most_BKRt, sum_BKRt, out_BKRtE = sums
      score_BKRts, mask_B11ts, _ = _scores(
        q_BKRtE, k_BKTE, row_BT, i, j, settings
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
      jnp.maximum(first_N[i], _first_keys(i, settings)),
      i + 1,
      add,
      (zeros_BKRt + _MASKED, zeros_BKRt, zeros_BKRtE),
    )
    sum_BKRt = jnp.maximum(sum_BKRt, jnp.finfo(jnp.float32).tiny)
    out_BKRtE /= sum_BKRt[..., None]
    return out_BKRtE.astype(q_BKRTE.dtype), most_BKRt + jnp.log(sum_BKRt)

  blocks = jax.lax.map(of_queries, jnp.arange(len(first_N)))
  out_BKRTE, log_sum_BKRT = (_joined(x) for x in blocks)
  return out_BKRTE, log_sum_BKRT


def _forward_rule(q_BKRTE, k_BKTE, v_BKTE, row_BT, settings):
  out_BKRTE, log_sum_BKRT = _forward(q_BKRTE, k_BKTE, v_BKTE, row_BT, settings)
  kept = q_BKRTE, k_BKTE, v_BKTE, row_BT, out_BKRTE, log_sum_BKRT
  return out_BKRTE, kept


def _backward_rule(settings, kept, d_out_BKRTE):
  q_BKRTE, k_BKTE, v_BKTE, row_BT, out_BKRTE, log_sum_BKRT = kept
  block, last_N = settings.block, _last_blocks(row_BT, settings.block)
  blocks = len(last_N)
  # sum_s weight d_weight, by which the softmax's gradient is centred.
  centre_BKRT = _einsum('BKRTE,BKRTE->BKRT', out_BKRTE, d_out_BKRTE)

  def of_keys(d_q_BKRTE, j):
    k_BKsE, v_BKsE = _cut(k_BKTE, j, block), _cut(v_BKTE, j, block)

    def add(i, sums):
      d_q_BKRTE, d_k_BKsE, d_v_BKsE = sums
      q_BKRtE = _cut(q_BKRTE, i, block)
      d_out_BKRtE = _cut(d_out_BKRTE, i, block)
      score_BKRts, mask_B11ts, slope = _scores(
        q_BKRtE, k_BKTE, row_BT, i, j, settings
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
      jnp.minimum(last_N[j] + 1, _last_queries(j, blocks, settings)),
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


def _scores(q_BKRtE, k_BKTE, row_BT, i, j, settings):
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
  row_Bt1, row_Bs1 = (_cut(row_BT[:, :, None], n, block) for n in (i, j))
  row_B1s = row_Bs1.swapaxes(1, 2)
  mask_Bts = mask_ts[None] & (row_Bt1 == row_B1s) & (row_B1s > 0)
  mask_B11ts = mask_Bts[:, None, None]
  return jnp.where(mask_B11ts, score_BKRts, _MASKED), mask_B11ts, slope


def runs(row_BT):
  """The first and the last slot of the row that each token belongs to.

  Padding is a row of its own at every slot: it attends to nothing.

  row 1 1 2 2 2 0 0  ->  first 0 0 2 2 2 5 6, last 1 1 4 4 4 5 6
  """
  place_BT = jnp.broadcast_to(jnp.arange(row_BT.shape[1]), row_BT.shape)
  edge_Bt = (row_BT[:, 1:] != row_BT[:, :-1]) | (row_BT[:, 1:] == 0)
  is_first_BT = jnp.pad(edge_Bt, ((0, 0), (1, 0)), constant_values=True)
  is_last_BT = jnp.pad(edge_Bt, ((0, 0), (0, 1)), constant_values=True)
  last = row_BT.shape[1] - 1
  return (
    jax.lax.cummax(jnp.where(is_first_BT, place_BT, 0), 1),
    jax.lax.cummin(jnp.where(is_last_BT, place_BT, last), 1, reverse=True),
  )


def _first_blocks(row_BT, block):
  """The first block with a key of any row that has a query in each block."""
  first_BT, _ = runs(row_BT)
  return first_BT.reshape(len(row_BT), -1, block).min((0, 2)) // block


def _last_blocks(row_BT, block):
  """The last block with a query of any row that has a key in each block."""
  _, last_BT = runs(row_BT)
  return last_BT.reshape(len(row_BT), -1, block).max((0, 2)) // block


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
