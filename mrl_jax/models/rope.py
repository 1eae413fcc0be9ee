"""Rotary positions (2104.09864), with scalings for extended contexts."""

import math

import jax
import jax.numpy as jnp

from mrl_jax.architecture import Rope


def frequencies(rope: Rope, head_dim: int) -> jax.Array:
  """The angle per position of each pair of dimensions, f32 [I], I = E / 2."""
  frequency_I = rope.base ** (-jnp.arange(0, head_dim, 2) / head_dim)
  return _SCALINGS[rope.scaling](frequency_I, rope, head_dim)


def _linear(frequency_I, rope, head_dim):
  """Divides all frequencies: 2306.15595."""
  del head_dim
  return frequency_I / rope.factor


def _llama3(frequency_I, rope, head_dim):
  """Divides low frequencies, keeps high ones, with a ramp between them.

  The ramp is over the number of turns that a frequency makes in the original
  context: https://arxiv.org/abs/2407.21783, sec. 3.4, and Meta's code.
  """
  del head_dim
  turns_I = rope.original_length * frequency_I / (2 * math.pi)
  kept_I = jnp.clip((turns_I - rope.low) / (rope.high - rope.low), 0, 1)
  return frequency_I * (kept_I + (1 - kept_I) / rope.factor)


def _yarn(frequency_I, rope, head_dim):
  """As `_llama3`, but the ramp is over dimensions: 2309.00071, sec. 3.2."""

  def dimension(turns):
    """The dimension whose frequency makes `turns` in the original context."""
    wavelength = rope.original_length / (turns * 2 * math.pi)
    return head_dim * math.log(wavelength) / (2 * math.log(rope.base))

  first, last = dimension(rope.high), dimension(rope.low)
  if rope.truncate:
    first, last = math.floor(first), math.ceil(last)
  first, last = max(first, 0), min(last, head_dim - 1)
  last += 1e-3 * (first == last)
  ramp_I = (jnp.arange(head_dim // 2) - first) / (last - first)
  kept_I = 1 - jnp.clip(ramp_I, 0, 1)
  return frequency_I * (kept_I + (1 - kept_I) / rope.factor)


_SCALINGS = {
  'none': lambda frequency_I, rope, head_dim: frequency_I,
  'linear': _linear,
  'llama3': _llama3,
  'yarn': _yarn,
}


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
  """Rotates every head; dimension i is paired with dimension i + E / 2."""
  a_BHTI, b_BHTI = jnp.split(x_BHTE.astype(jnp.float32), 2, -1)
  turned = (
    a_BHTI * cos_B1TI - b_BHTI * sin_B1TI,
    b_BHTI * cos_B1TI + a_BHTI * sin_B1TI,
  )
  return jnp.concatenate(turned, -1).astype(x_BHTE.dtype)
