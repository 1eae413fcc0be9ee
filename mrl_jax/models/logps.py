"""Log-probabilities and entropies of tokens, without an array [B, T, V]."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mrl_jax.models import decoder as decoder_lib
from mrl_jax.models import sharding


class Scores(NamedTuple):
  """Log-probabilities and entropies of tokens under a policy."""

  # f32, of each token, given the tokens of its row before it.
  logp_BS: jax.Array
  # f32, in nats, of the distribution that each token is drawn from; None if it
  # was not asked for.
  entropy_BS: jax.Array | None = None


def response_scores(
  decoder: decoder_lib.Decoder,
  tokens_BS: jax.Array,
  row_BS: jax.Array,
  chunk: int,
  entropy: bool = False,
  temperature: float = 1.0,
) -> Scores:
  """Scores every token but the first of its row; others have the score 0.

  Args:
    decoder: the policy.
    tokens_BS: the tokens of one or more rows, one after the other.
    row_BS: which of them a token belongs to, 1, 2, ...; 0 at padding.
    chunk: about the most tokens whose logits are in memory at once; the
      backward pass recomputes them.
    entropy: whether to compute entropies too.
    temperature: T of the scored policy, softmax(logits / T).
  """
  hidden_BSD = decoder(tokens_BS, row_BS)
  # Slot s has the score of the token in slot s + 1. The last one's is of no
  # token: all slots together have a length that devices divide.
  scores = token_scores(
    decoder,
    hidden_BSD,
    jnp.roll(tokens_BS, -1, axis=1),
    chunk,
    entropy,
    temperature,
  )
  before_BS = jnp.pad(row_BS[:, :-1], ((0, 0), (1, 0)))
  is_scored_BS = (row_BS == before_BS) & (row_BS > 0)
  return jax.tree.map(
    lambda x_BS: jnp.where(is_scored_BS, jnp.roll(x_BS, 1, axis=1), 0.0), scores
  )


def log_prob(logits, ids):
  """The log-probability of `ids` under softmax of the last axis; at most 0."""
  chosen = jnp.take_along_axis(logits, ids[..., None], -1)[..., 0]
  # Rounding could give a token of probability 1 the value +1e-7.
  return jnp.minimum(chosen - jax.nn.logsumexp(logits, -1), 0.0)


def softmax_entropy(logits):
  """- sum_v p_v log p_v of p = softmax over the last axis, in nats.

  Its gradient is that of the entropy itself: - p_v (log p_v + H) in logit v.
  """
  logp = jax.nn.log_softmax(logits, -1)
  return -(jnp.exp(logp) * logp).sum(-1)


def token_scores(
  decoder, hidden_BTD, targets_BT, chunk, entropy=False, temperature=1.0
):
  """Scores of the targets, computed for a chunk of positions at a time.

  The matrix of the head is gathered before the first chunk, and its gradient is
  summed over the devices after the last.
  """
  step = max(1, chunk // len(targets_BT))

  def local(unembed_DV, hidden_BTD, targets_BT):
    # The gradients of chunks are summed in float32.
    unembed_DV = unembed_DV.astype(jnp.float32)

    def score(hidden_BTD, targets_BT):
      logits_BTV = decoder.logits(
        hidden_BTD, unembed_DV.astype(hidden_BTD.dtype)
      )
      logits_BTV /= temperature
      entropy_BT = softmax_entropy(logits_BTV) if entropy else None
      return Scores(log_prob(logits_BTV, targets_BT), entropy_BT)

    return _by_chunk(score, step, hidden_BTD, targets_BT)

  return sharding.by_token(local, decoder.unembed(), hidden_BTD, targets_BT)


def _by_chunk(function, step, *arrays):
  """Applies a function of arrays [B, T, ...] to `step` positions at a time."""
  batch, length = arrays[0].shape[:2]
  if step >= length:
    return function(*arrays)

  def split(x_BT):
    """Pads T to a multiple of `step`; returns [chunks, B, step, ...]."""
    pad = [(0, 0)] * x_BT.ndim
    pad[1] = (0, -length % step)
    x_BT = jnp.pad(x_BT, pad).reshape(batch, -1, step, *x_BT.shape[2:])
    return jnp.moveaxis(x_BT, 1, 0)

  def join(chunks):
    return jnp.moveaxis(chunks, 0, 1).reshape(batch, -1)[:, :length]

  function = jax.checkpoint(function)
  chunks = jax.lax.map(lambda xs: function(*xs), tuple(map(split, arrays)))
  return jax.tree.map(join, chunks)
