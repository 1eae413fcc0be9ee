"""Keys and values of the tokens that a decoder has read, for each layer.

A row's tokens are in slots: left padding, the prompt, then what was sampled. A
layer whose window is shorter than the row keeps the last tokens only; slot s is
in entry s % S of its S entries. With S = 3, after slot 4:

  entry  0 1 2
  slot   3 4 2
"""

import jax
import jax.numpy as jnp

from mrl_jax.architecture import ModelConfig

Layer = tuple[jax.Array, jax.Array]  # k_BKSE and v_BKSE.
Cache = list[Layer]


def entries(model: ModelConfig, layer: int, slots: int) -> int:
  """S, the number of entries of a layer, in a cache of so many slots."""
  return min(slots, model.layer(layer).window or slots)


def of_prompts(k_BKCE: jax.Array, size: int) -> jax.Array:
  """Keys, or values, of slots 0 to C - 1, in `size` entries."""
  slots = k_BKCE.shape[2]
  if slots <= size:
    return _pad(k_BKCE, size)
  # The first of the last `size` slots goes to the entry that it belongs to.
  last_BKSE = k_BKCE[:, :, slots - size :]
  return jnp.roll(last_BKSE, (slots - size) % size, axis=2)


def write(layer: Layer, k_BK1E, v_BK1E, slot) -> Layer:
  """Writes the keys and values of a token to its entry."""

  def put(x_BKSE, x_BK1E):
    entry = slot % x_BKSE.shape[2]
    return jax.lax.dynamic_update_slice_in_dim(x_BKSE, x_BK1E, entry, axis=2)

  return put(layer[0], k_BK1E), put(layer[1], v_BK1E)


def visible(layer: Layer, first_B, slot):
  """Which entries [B, 1, S] the token in `slot` attends to.

  Those whose slots are `first_B` or later; entries that are not written yet have
  negative ones.
  """
  size = layer[0].shape[2]
  held_S = slot - (slot - jnp.arange(size)) % size
  return (held_S[None, :] >= first_B[:, None])[:, None, :]


def grow(cache: Cache, model: ModelConfig, slots: int) -> Cache:
  """Makes room for `slots` slots; all of the cache's own must be written."""
  return [
    tuple(_pad(x_BKSE, entries(model, i, slots)) for x_BKSE in layer)
    for i, layer in enumerate(cache)
  ]


def _pad(x_BKSE, size):
  return jnp.pad(x_BKSE, ((0, 0), (0, 0), (0, size - x_BKSE.shape[2]), (0, 0)))
