"""Keys and values of the tokens that a decoder has read, for each layer.

A layer keeps those of the prompt of each row, padded on the left, and a ring of
those that were sampled. All rows write the same entry of the ring at a time: the
token of step s is in entry s % R of R. Rows begin at different steps, and see
their own tokens alone. With R = 3, after step 4:

  entry of the ring     0 1 2
  step of its token     3 4 2
  seen by a row that
  has sampled 2 tokens  x x -

A layer with a window keeps no more of either than its window.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mrl_jax.architecture import ModelConfig


class Layer(NamedTuple):
  """Keys and values of one layer."""

  k_BKCE: jax.Array  # Of the last C tokens of the prompt.
  v_BKCE: jax.Array
  k_BKRE: jax.Array  # The ring.
  v_BKRE: jax.Array


Cache = list[Layer]


class Now(NamedTuple):
  """Which token of each row is read."""

  step: jax.Array  # Its number in the ring, the same for all rows.
  age_B: jax.Array  # How many tokens were sampled before it in its row.
  prompt_B: jax.Array  # Number of tokens of the prompt.

  @property
  def position_B1(self) -> jax.Array:
    """Rotary positions."""
    return (self.prompt_B + self.age_B)[:, None]


def entries(model: ModelConfig, layer: int, tokens: int) -> int:
  """The most of so many tokens, of a prompt or sampled, that a layer keeps."""
  return min(tokens, model.layer(layer).window or tokens)


def empty(model: ModelConfig, rows: int, context: int, ring: int) -> Cache:
  """A cache for prompts of `context` slots, and `ring` sampled tokens."""

  def zeros(size):
    return jnp.zeros(
      (rows, model.num_kv_heads, size, model.head_dim), model.dtype
    )

  return [
    Layer(
      *(zeros(entries(model, i, n)) for n in (context, context, ring, ring))
    )
    for i in range(model.num_layers)
  ]


def of_prompts(k_BKCE: jax.Array, size: int) -> jax.Array:
  """Keys, or values, of the last `size` slots of prompts, padded on the left."""
  more = max(0, size - k_BKCE.shape[2])
  k_BKCE = jnp.pad(k_BKCE, ((0, 0), (0, 0), (more, 0), (0, 0)))
  return k_BKCE[:, :, k_BKCE.shape[2] - size :]


def write(layer: Layer, k_BK1E: jax.Array, v_BK1E: jax.Array, step) -> Layer:
  """Writes the keys and values of a token of every row to its entry."""

  def put(x_BKRE, x_BK1E):
    entry = step % x_BKRE.shape[2]
    return jax.lax.dynamic_update_slice_in_dim(x_BKRE, x_BK1E, entry, axis=2)

  return layer._replace(
    k_BKRE=put(layer.k_BKRE, k_BK1E), v_BKRE=put(layer.v_BKRE, v_BK1E)
  )


def visible(layer: Layer, window: int, now: Now) -> jax.Array:
  """Which entries [B, 1, C + R] the token of a row attends to, itself included.

  The prompt's come first. `window` is that of the layer, 0 if it has none.
  """
  context, ring = layer.k_BKCE.shape[2], layer.k_BKRE.shape[2]
  age_B1 = now.age_B[:, None]
  before_1C = context - jnp.arange(context)[None]  # Tokens before the samples.
  seen_BC = before_1C <= now.prompt_B[:, None]
  if window:
    seen_BC &= before_1C + age_B1 < window
  before_1R = (now.step - jnp.arange(ring)[None]) % ring  # Before this one.
  seen_BR = before_1R <= age_B1
  return jnp.concatenate([seen_BC, seen_BR], 1)[:, None]


def resized(x_BKRE: jax.Array, step: jax.Array, size: int) -> jax.Array:
  """A ring of `size` entries, before the token of `step`.

  The last tokens stay: no row may have sampled more than there is room for.
  """
  before_R = 1 + (step - 1 - jnp.arange(size)) % size  # Tokens before `step`.
  return jnp.take(x_BKRE, (step - before_R) % x_BKRE.shape[2], axis=2)
