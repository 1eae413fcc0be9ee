"""Draws tokens from logits, with the filters of the common samplers."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from mrl_jax.models import logps

_BLOCK = (
  128  # Tokens whose probabilities are summed before one is searched for.
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Density:
  """The distribution that tokens are drawn from, given their logits.

  Logits are divided by the temperature; then the filters apply in this order,
  each to what the ones before it left, as in `transformers`.
  """

  temperature: float = 1.0  # At 0, always the most likely token.
  top_k: int = 0  # The k most likely tokens, and those as likely; 0: all.
  # The most likely tokens, until their probabilities sum to p.
  top_p: float = 1.0
  # Tokens with at least this share of the largest probability.
  min_p: float = 0.0

  @property
  def is_filtered(self) -> bool:
    """Whether some tokens are never drawn."""
    return bool(self.top_k or self.top_p < 1 or self.min_p)

  @property
  def is_policy(self) -> bool:
    """Whether it is softmax(logits) itself."""
    return self == Density()


def draw(
  logits_BV: jax.Array, uniform_B: jax.Array, density: Density
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Draws a token for every row.

  Args:
    logits_BV: f32, of the next token.
    uniform_B: uniform random numbers in [0, 1).
    density: the distribution to draw from.

  Returns:
    token_B; its log-probability in `density`, which is 0 at temperature 0; and
    its log-probability in softmax(logits).
  """
  if not density.temperature:
    token_B = jnp.argmax(logits_BV, -1)
    return (
      token_B,
      jnp.zeros_like(uniform_B),
      logps.log_prob(logits_BV, token_B),
    )
  scaled_BV = filtered(logits_BV / density.temperature, density)
  token_B, logp_B = _search(scaled_BV, uniform_B)
  if density.is_policy:
    return token_B, logp_B, logp_B
  return token_B, logp_B, logps.log_prob(logits_BV, token_B)


def filtered(scaled_BV: jax.Array, density: Density) -> jax.Array:
  """The logits, with -inf at tokens that the filters leave out."""
  if 0 < density.top_k < scaled_BV.shape[1]:
    least_B1 = jax.lax.top_k(scaled_BV, density.top_k)[0][:, -1:]
    scaled_BV = _at_least(scaled_BV, least_B1)
  if density.top_p < 1:
    sorted_BV = -jnp.sort(-scaled_BV, -1)
    p_BV = jax.nn.softmax(sorted_BV, -1)
    before_BV = jnp.cumsum(p_BV, -1) - p_BV  # Of more likely tokens.
    last_B1 = jnp.sum(before_BV < density.top_p, -1, keepdims=True) - 1
    least_B1 = jnp.take_along_axis(sorted_BV, jnp.maximum(last_B1, 0), -1)
    scaled_BV = _at_least(scaled_BV, least_B1)
  if density.min_p:
    most_B1 = scaled_BV.max(-1, keepdims=True)
    scaled_BV = _at_least(scaled_BV, most_B1 + math.log(density.min_p))
  return scaled_BV


def _at_least(x_BV, least_B1):
  return jnp.where(x_BV >= least_B1, x_BV, -jnp.inf)


def _search(logits_BV, uniform_B):
  """The token where the cumulative probability passes a uniform number.

  One random number a row is enough, where `jax.random.categorical` needs one a
  token. Probabilities are summed by blocks: first a block is found, then a token
  in it.
  """
  most_B1 = logits_BV.max(-1, keepdims=True)
  weight_BV = jnp.exp(logits_BV - most_B1)
  more = -weight_BV.shape[1] % _BLOCK
  weight_BNb = jnp.pad(weight_BV, ((0, 0), (0, more))).reshape(
    len(weight_BV), -1, _BLOCK
  )
  sum_BN = weight_BNb.sum(-1)
  total_B = sum_BN.sum(-1)
  block_B, rest_B = _passed(sum_BN, uniform_B * total_B)
  weight_Bb = jnp.take_along_axis(weight_BNb, block_B[:, None, None], 1)[:, 0]
  place_B, _ = _passed(weight_Bb, rest_B)
  token_B = block_B * _BLOCK + place_B
  chosen_B = jnp.take_along_axis(logits_BV, token_B[:, None], 1)[:, 0]
  logp_B = chosen_B - most_B1[:, 0] - jnp.log(total_B)
  return token_B, jnp.minimum(logp_B, 0.0)


def _passed(weight_BN, goal_B):
  """The first entry with which the sum passes the goal, and what was missing.

  Entries of weight 0 are never chosen, whatever the rounding.
  """
  above_BN = jnp.cumsum(weight_BN, -1)
  place_B = jnp.sum(above_BN <= goal_B[:, None], -1)
  count = weight_BN.shape[1]
  last_B = count - 1 - jnp.argmax(weight_BN[:, ::-1] > 0, -1)
  place_B = jnp.minimum(place_B, last_B)
  before_BN = above_BN - weight_BN
  before_B = jnp.take_along_axis(before_BN, place_B[:, None], 1)[:, 0]
  return place_B, jnp.maximum(goal_B - before_B, 0.0)
