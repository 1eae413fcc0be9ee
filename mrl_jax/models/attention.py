"""Causal self-attention over whole rows, and over a cache of keys and values.

Whole rows are computed in one of several ways, which agree. They are chosen by
platform and length, or by `ModelConfig.attention`:

  plain   rows of fewer than `LONG` tokens: holds the scores of all pairs of
          tokens, [S, S] for every head, in memory
  splash  TPU: the Pallas kernel that ships with jax
  cudnn   GPU: cuDNN's kernel, for heads of at most 128 in bfloat16; it reads a
          mask [S, S] for every row of a batch (not for every head)
  blocks  otherwise: blocks of queries and keys in turn, see `blockwise`
"""

import jax
from jax.experimental.pallas.ops.tpu import splash_attention
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from mrl_jax.models import blockwise
from mrl_jax.models import sharding

LONG = 512  # Tokens of a row.
_MASKED = -1e30  # Finite: a token that attends to nothing would become NaN.
_BLOCK = 512  # The most queries, or keys, of a block of the TPU kernel.
_CPU_BLOCK = 128  # And of `blockwise`.
_LANES = 128  # Divides the lengths of the TPU kernel.
_BY_PLATFORM = {'tpu': 'splash', 'gpu': 'cudnn', 'cuda': 'cudnn'}


def causal(
  q_BHTE: jax.Array,
  k_BKTE: jax.Array,
  v_BKTE: jax.Array,
  row_BT: jax.Array,
  *,
  kind: str = 'auto',
  window: int = 0,
  scale: float,
  cap: float = 0,
) -> jax.Array:
  """Attention of every token to itself and to those of its row before it.

  Args:
    q_BHTE: queries; head h has the keys and values of head h // (H / K).
    k_BKTE: keys.
    v_BKTE: values.
    row_BT: i32, which of the rows that are packed together a token belongs to;
      the tokens of a row are consecutive. 0 is padding, where results are finite
      but mean nothing.
    kind: a name in `KINDS`, or 'auto'.
    window: how many tokens a token attends to, itself included; 0 is all.
    scale: multiplies scores.
    cap: c of the soft cap c tanh(x / c) of scores; 0 is none.

  Returns [B, H, T, E]. Scores and softmax are computed in float32.
  """
  kind = choose(kind, q_BHTE.shape, q_BHTE.dtype, cap)
  return KINDS[kind](q_BHTE, k_BKTE, v_BKTE, row_BT, window, scale, cap)


def choose(kind: str, shape: tuple[int, ...], dtype, cap: float) -> str:
  """The name in `KINDS` of what computes queries of this shape [B, H, T, E]."""
  *_, length, head_dim = shape
  if kind != 'auto':
    return kind
  if length < LONG:
    return 'plain'
  chosen = _BY_PLATFORM.get(sharding.platform(), 'blocks')
  by_cudnn = dtype == 'bfloat16' and head_dim <= 128 and not cap
  return 'blocks' if chosen == 'cudnn' and not by_cudnn else chosen


def attend(q_BHTE, parts, mask_BTS, scale, cap=0.0):
  """Attention with any mask; scores are multiplied by `scale`.

  `parts` are keys and values, [B, K, S, E] each; S of the mask is that of all
  parts together. Heads come before positions, unlike in `jax.nn.dot_product_attention`: a
  decoding step then reads the cache in order, which makes it 10 to 30% faster
  on CPU.
  """
  q_BKRTE = _grouped(q_BHTE, parts[0][0])
  scores_BKRTS = jnp.concatenate(
    [
      jnp.einsum(
        'BKRTE,BKSE->BKRTS', q_BKRTE, k_BKSE, preferred_element_type=jnp.float32
      )
      for k_BKSE, _ in parts
    ],
    -1,
  )
  scores_BKRTS = soft_cap(scores_BKRTS * scale, cap)
  scores_BKRTS = jnp.where(mask_BTS[:, None, None], scores_BKRTS, _MASKED)
  # Divided by their sum after they weigh the values: softmax has no gradient that
  # sums over all pairs of tokens.
  largest_BKRT1 = jax.lax.stop_gradient(scores_BKRTS.max(-1, keepdims=True))
  weights_BKRTS = jnp.exp(scores_BKRTS - largest_BKRT1)
  sum_BKRT1 = weights_BKRTS.sum(-1, keepdims=True)
  weights_BKRTS = weights_BKRTS.astype(q_BHTE.dtype)
  ends = np.cumsum([k_BKSE.shape[2] for k_BKSE, _ in parts])[:-1]
  out_BKRTE = sum(
    jnp.einsum(
      'BKRTS,BKSE->BKRTE',
      weights_BKRTs,
      v_BKSE,
      preferred_element_type=jnp.float32,
    )
    for weights_BKRTs, (_, v_BKSE) in zip(
      jnp.split(weights_BKRTS, ends, -1), parts, strict=True
    )
  )
  out_BKRTE = (out_BKRTE / sum_BKRT1).astype(q_BHTE.dtype)
  return out_BKRTE.reshape(q_BHTE.shape)


def soft_cap(x, cap: float):
  """Returns c tanh(x / c) for the cap c, and x itself if c is 0."""
  return cap * jnp.tanh(x / cap) if cap else x


def causal_mask(row_BT, window: int = 0):
  """Which tokens [B, T, S] of its row each token attends to.

  row 1 1 1 2 2, window 2  ->  1 0 0 0 0
                               1 1 0 0 0
                               0 1 1 0 0
                               0 0 0 1 0
                               0 0 0 1 1
  """
  place_T = jnp.arange(row_BT.shape[1])
  distance_TS = place_T[:, None] - place_T[None, :]
  mask_TS = distance_TS >= 0
  if window:
    mask_TS &= distance_TS < window
  return mask_TS[None] & (row_BT[:, :, None] == row_BT[:, None, :])


def _grouped(q_BHTE, k_BKSE):
  """Queries [B, K, R, T, E]: R heads share a head of keys and values."""
  batch, _, length, head_dim = q_BHTE.shape
  return q_BHTE.reshape(batch, k_BKSE.shape[1], -1, length, head_dim)


def _plain(q_BHTE, k_BKTE, v_BKTE, row_BT, window, scale, cap):
  mask_BTS = causal_mask(row_BT, window)
  return attend(q_BHTE, [(k_BKTE, v_BKTE)], mask_BTS, scale, cap)


def _blocks(q_BHTE, k_BKTE, v_BKTE, row_BT, window, scale, cap):
  length = row_BT.shape[1]
  block = min(_CPU_BLOCK, length)
  whole = _multiple(length, block)
  q_BHTE, k_BKTE, v_BKTE = (_pad(x, whole) for x in (q_BHTE, k_BKTE, v_BKTE))
  out_BKRTE = blockwise.attention(
    _grouped(q_BHTE, k_BKTE),
    k_BKTE,
    v_BKTE,
    jnp.pad(row_BT, ((0, 0), (0, whole - length))),
    blockwise.Settings(block, scale, window, cap),
  )
  return out_BKRTE.reshape(q_BHTE.shape)[:, :, :length]


def _splash(q_BHTE, k_BKTE, v_BKTE, row_BT, window, scale, cap):
  """The TPU kernel, on each device's rows and heads; elsewhere interpreted."""
  length = row_BT.shape[1]
  whole = _multiple(length, min(_BLOCK, _multiple(length, _LANES)))
  q_BHTE = (q_BHTE * scale).astype(q_BHTE.dtype)
  interpret = sharding.platform() != 'tpu'

  def local(q_BHTE, k_BKTE, v_BKTE, row_BT):
    kernel = _kernel(q_BHTE.shape[1], whole, window, cap, interpret)
    ids = splash_attention.SegmentIds(q=row_BT, kv=row_BT)
    return jax.vmap(kernel)(q_BHTE, k_BKTE, v_BKTE, ids)

  heads = PartitionSpec(sharding.ROWS, 'tensor')
  out_BHTE = sharding.by_device(
    local, (heads, heads, heads, PartitionSpec(sharding.ROWS)), heads
  )(
    *(_pad(x, whole) for x in (q_BHTE, k_BKTE, v_BKTE)),
    jnp.pad(row_BT, ((0, 0), (0, whole - length))),
  )
  return out_BHTE[:, :, :length]


def _kernel(heads, length, window, cap, interpret):
  shape, block = (length, length), min(_BLOCK, length)
  mask = (
    splash_attention.LocalMask(shape, (window - 1, 0), 0)
    if window
    else splash_attention.CausalMask(shape)
  )
  return splash_attention.make_splash_mha_single_device(
    splash_attention.MultiHeadMask([mask] * heads),
    block_sizes=splash_attention.BlockSizes(*[block] * 8),
    attn_logits_soft_cap=cap or None,
    interpret=interpret,
  )


def _cudnn(
  q_BHTE, k_BKTE, v_BKTE, row_BT, window, scale, cap, implementation='cudnn'
):
  """CuDNN's kernel; the mask becomes a bias in the dtype of queries."""
  if cap:
    raise ValueError("attention 'cudnn' has no soft cap; choose 'blocks'")
  out_BTHE = jax.nn.dot_product_attention(
    *(x.swapaxes(1, 2) for x in (q_BHTE, k_BKTE, v_BKTE)),
    mask=causal_mask(row_BT, window)[:, None],
    scale=scale,
    implementation=implementation,
  )
  return out_BTHE.swapaxes(1, 2)


def _multiple(n, of):
  return -(-n // of) * of


def _pad(x_BHTE, length):
  return jnp.pad(
    x_BHTE, ((0, 0), (0, 0), (0, length - x_BHTE.shape[2]), (0, 0))
  )


KINDS = {
  'plain': _plain,
  'splash': _splash,
  'cudnn': _cudnn,
  'blocks': _blocks,
}
