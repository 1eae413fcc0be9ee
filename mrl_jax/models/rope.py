"""Rotary positions (2104.09864), and their scalings for longer contexts."""

import math

import jax
import jax.numpy as jnp

from mrl_jax.architecture import Rope


def frequencies(rope: Rope, head_dim: int) -> jax.Array:
  """The angle per position of each pair of dimensions, f32 [I], I = E / 2."""
  frequency_I = rope.base ** (-jnp.arange(0, head_dim, 2) / head_dim)
  if rope.scaling == 'none':
    return frequency_I
  if rope.scaling == 'linear':  # 2306.15595
    return frequency_I / rope.factor
  kept_I = {'llama3': _llama3, 'yarn': _yarn}[rope.scaling](frequency_I, rope)
  return frequency_I * (kept_I + (1 - kept_I) / rope.factor)


def _llama3(frequency_I, rope):
  """The share of each frequency that is kept: 0 for low, 1 for high ones.

  The ramp is over the number of turns that a frequency makes in the original
  context: https://arxiv.org/abs/2407.21783, sec. 3.4, and Meta's code.
  """
  turns_I = rope.original_length * frequency_I / (2 * math.pi)
  return jnp.clip((turns_I - rope.low) / (rope.high - rope.low), 0, 1)


def _yarn(frequency_I, rope):
  """As `_llama3`, with a ramp over indices of pairs: 2309.00071, sec. 3.2."""
  pairs = len(frequency_I)

  def pair(turns):
    """The pair whose frequency makes `turns` in the original context."""
    wavelength = rope.original_length / (turns * 2 * math.pi)
    return pairs * math.log(wavelength) / math.log(rope.base)

  first, last = pair(rope.high), pair(rope.low)
  if rope.truncate:
    first, last = math.floor(first), math.ceil(last)
  first, last = max(first, 0), min(last, 2 * pairs - 1)
  last += 1e-3 * (first == last)
  ramp_I = (jnp.arange(pairs) - first) / (last - first)
  return 1 - jnp.clip(ramp_I, 0, 1)


def rotary(
  positions_BT: jax.Array, head_dim: int, rope: Rope
) -> tuple[jax.Array, jax.Array]:
  """The sine and cosine of every position, each [B, 1, T, I]."""
  frequency_I = frequencies(rope, head_dim)
  angle_B1TI = positions_BT[:, None, :, None] * frequency_I[None, None, None, :]
  sin_B1TI, cos_B1TI = jnp.sin(angle_B1TI), jnp.cos(angle_B1TI)
  return sin_B1TI * rope.amplitude, cos_B1TI * rope.amplitude


def rotate(
  x_BHTE: jax.Array, sin_B1TI: jax.Array, cos_B1TI: jax.Array
) -> jax.Array:
  """Rotates all pairs of dimensions, i and i + E / 2, of every head."""
  a_BHTI, b_BHTI = jnp.split(x_BHTE.astype(jnp.float32), 2, -1)
  turned = (
    a_BHTI * cos_B1TI - b_BHTI * sin_B1TI,
    b_BHTI * cos_B1TI + a_BHTI * sin_B1TI,
  )
  return jnp.concatenate(turned, -1).astype(x_BHTE.dtype)
