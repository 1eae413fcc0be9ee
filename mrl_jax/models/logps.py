"""Log-probabilities of tokens, and entropies, without holding [B, T, V]."""

import jax
import jax.numpy as jnp

from mrl_jax.models import decoder as decoder_lib


def prompt_layout(valid_BS):
  """Positions and causal mask of left-padded rows.

  Args:
    valid_BS: False at padding.

  Returns:
    positions_BS, counted from each row's first token; mask_BSS.
  """
  positions_BS = jnp.maximum(jnp.cumsum(valid_BS, 1) - 1, 0)
  slots = valid_BS.shape[1]
  causal_1SS = jnp.tril(jnp.ones((1, slots, slots), bool))
  return positions_BS, causal_1SS & valid_BS[:, None, :]


def response_logps(
  decoder: decoder_lib.Decoder,
  tokens_BS: jax.Array,
  valid_BS: jax.Array,
  length: int,
  chunk: int,
  entropy: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """Log pi(token | all before it) of the last `length` tokens of every row.

  Args:
    decoder: the policy.
    tokens_BS: left-padded prompts, then right-padded responses.
    valid_BS: False at padding.
    length: T, the number of response positions.
    chunk: at most about this many tokens have their logits in memory at once;
      the backward pass computes them again.
    entropy: whether to return that of each token's distribution too.

  Returns:
    logp_BT, float32, or with `entropy` (logp_BT, entropy_BT); 0 at padding.
  """
  positions_BS, mask_BSS = prompt_layout(valid_BS)
  hidden_BSD, _ = decoder(tokens_BS, positions_BS, mask_BSS)
  scores = token_logps(
    decoder,
    hidden_BSD[:, -length - 1 : -1],
    tokens_BS[:, -length:],
    chunk,
    entropy,
  )
  return jax.tree.map(
    lambda x_BT: jnp.where(valid_BS[:, -length:], x_BT, 0.0), scores
  )


def log_prob(logits, ids):
  """The log-probability of `ids` under softmax of the last axis; at most 0."""
  chosen = jnp.take_along_axis(logits, ids[..., None], -1)[..., 0]
  # Rounding could leave a token that is certain at +1e-7.
  return jnp.minimum(chosen - jax.nn.logsumexp(logits, -1), 0.0)


def softmax_entropy(logits):
  """- sum_v p_v log p_v of p = softmax over the last axis, in nats.

  Its gradient is that of the entropy itself: - p_v (log p_v + H) in logit v.
  """
  logp = jax.nn.log_softmax(logits, -1)
  return -(jnp.exp(logp) * logp).sum(-1)


def token_logps(decoder, hidden_BTD, targets_BT, chunk, entropy=False):
  """The log-probability of the targets, a chunk of positions at a time.

  With `entropy` a pair: beside it, the entropy of the policy there.
  """

  @jax.checkpoint
  def score(hidden_BTD, targets_BT):
    logits_BTV = decoder.logits(hidden_BTD)
    logp_BT = log_prob(logits_BTV, targets_BT)
    return (logp_BT, softmax_entropy(logits_BTV)) if entropy else logp_BT

  batch, length = targets_BT.shape
  step = max(1, min(length, chunk // batch))
  if step == length:
    return score(hidden_BTD, targets_BT)

  def by_chunk(x_BT):
    """Cuts the positions, padded to a multiple of `step`; chunks come first."""
    pad = [(0, 0)] * x_BT.ndim
    pad[1] = (0, -length % step)
    x_BT = jnp.pad(x_BT, pad).reshape(batch, -1, step, *x_BT.shape[2:])
    return jnp.moveaxis(x_BT, 1, 0)

  def joined(chunks):
    return jnp.moveaxis(chunks, 0, 1).reshape(batch, -1)[:, :length]

  chunks = jax.lax.map(
    lambda xs: score(*xs), (by_chunk(hidden_BTD), by_chunk(targets_BT))
  )
  return jax.tree.map(joined, chunks)
