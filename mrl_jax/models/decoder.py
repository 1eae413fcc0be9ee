"""The decoder-only transformer that every model family configures."""

import functools

from flax import nnx
import jax
import jax.numpy as jnp

from mrl_jax.architecture import ModelConfig
from mrl_jax.architecture import QK_NORMS
from mrl_jax.models import attention
from mrl_jax.models import blockwise
from mrl_jax.models import cache as cache_lib
from mrl_jax.models import modules
from mrl_jax.models import rope
from mrl_jax.models import sharding

_ACTIVATIONS = {
  'silu': jax.nn.silu,
  'gelu': functools.partial(jax.nn.gelu, approximate=True),
  'gelu_erf': functools.partial(jax.nn.gelu, approximate=False),
}
_REMAT = {
  'none': None,
  'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  'block': jax.checkpoint_policies.nothing_saveable,
}
# Layers from which on equal groups of them are scanned over.
_MANY = 8


def _identity(x):
  return x


class Attention(nnx.Module):
  """Self-attention with rotary positions and grouped queries.

  What is attended to is up to the caller: `attend(q, k, v)` returns the result,
  and what to keep of the keys and values.
  """

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    def project(name, spec, bias):
      return modules.Projection(name, spec, config, rngs, bias)

    self.q = project('q_proj', 'BTD,DHE->BHTE', config.qkv_bias)
    self.k = project('k_proj', 'BTD,DKE->BKTE', config.qkv_bias)
    self.v = project('v_proj', 'BTD,DKE->BKTE', config.qkv_bias)
    self.o = project('o_proj', 'BHTE,HED->BTD', config.out_bias)
    norms = [modules.RMSNorm(config, axes) for axes in QK_NORMS[config.qk_norm]]
    self.q_norm, self.k_norm = norms or (_identity, _identity)

  def __call__(self, x_BTD, sin_cos, attend):
    q_BHTE, k_BKTE, v_BKTE = self.q(x_BTD), self.k(x_BTD), self.v(x_BTD)
    q_BHTE, k_BKTE = self.q_norm(q_BHTE), self.k_norm(k_BKTE)
    if sin_cos is not None:
      q_BHTE = rope.rotate(q_BHTE, *sin_cos)
      k_BKTE = rope.rotate(k_BKTE, *sin_cos)
    out_BHTE, kept = attend(q_BHTE, k_BKTE, v_BKTE)
    return self.o(out_BHTE), kept


class MLP(nnx.Module):
  """Gated feed-forward layer (2002.05202)."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    self.activation = _ACTIVATIONS[config.activation]
    self.gate = modules.Projection('gate_proj', 'ND,DF->NF', config, rngs)
    self.up = modules.Projection('up_proj', 'ND,DF->NF', config, rngs)
    self.down = modules.Projection('down_proj', 'NF,FD->ND', config, rngs)

  def __call__(self, x_BTD):
    # All tokens on one axis: of sums over two, XLA for CPUs writes the gradient of
    # the gate in transposed order, which makes an update a quarter slower.
    x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
    y_ND = self.down(self.activation(self.gate(x_ND)) * self.up(x_ND))
    return y_ND.reshape(x_BTD.shape)


class Block(nnx.Module):
  """Attention and feed-forward, each with norms and a residual."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    before = config.norms in ('before', 'both')
    after = config.norms in ('after', 'both')

    def norm(wanted):
      return modules.RMSNorm(config, 'D') if wanted else _identity

    self.attention_norm = norm(before)
    self.attention = Attention(config, rngs)
    self.attention_norm_after = norm(after)
    self.mlp_norm = norm(before)
    self.mlp = MLP(config, rngs)
    self.mlp_norm_after = norm(after)

  def __call__(self, x_BTD, sin_cos, attend):
    out_BTD, kept = self.attention(self.attention_norm(x_BTD), sin_cos, attend)
    x_BTD = x_BTD + self.attention_norm_after(out_BTD)
    out_BTD = self.mlp(self.mlp_norm(x_BTD))
    x_BTD = x_BTD + self.mlp_norm_after(out_BTD)
    return sharding.by_rows(x_BTD), kept


class Decoder(nnx.Module):
  """A decoder-only language model; `logits` turns its output into scores.

  Calling it reads whole rows, for training. To sample, `prefill` reads prompts
  and `step` a token of each row, with a cache of keys and values.
  """

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    self.config = config
    self.embed_VD = modules.param(config, rngs, 'VD', 'D')
    self.blocks = nnx.List(
      Block(config, rngs) for _ in range(config.num_layers)
    )
    self.final_norm = modules.RMSNorm(config, 'D')
    self.unembed_DV = (
      None if config.tie_embeddings else modules.param(config, rngs, 'DV', 'D')
    )

  def __call__(self, tokens_BT: jax.Array, row_BT: jax.Array) -> jax.Array:
    """The normed hidden states [B, T, D] of rows.

    Args:
      tokens_BT: token ids of one or more rows, one after the other.
      row_BT: which of them a token belongs to, 1, 2, ...; 0 at padding. A row
        does not see the others.
    """
    pattern, views = self.config.pattern, self._views(row_BT)
    groups = self.config.num_layers // len(pattern)
    scanned = groups if self.config.num_layers >= _MANY and groups > 1 else 0

    def read(x_BTD, blocks):
      for i, block in enumerate(blocks):
        x_BTD = self._recomputed(block, *views[self.config.layer(i)])(x_BTD)
      return x_BTD

    x_BTD = self._embed(tokens_BT)
    if scanned:
      x_BTD = self._scan(read, x_BTD, scanned)
    rest = self.blocks[scanned * len(pattern) :]
    return self.final_norm(read(x_BTD, rest))

  def _scan(self, read, x_BTD, count):
    """Reads with the first `count` groups of layers, one group at a time.

    The compiled program has one group, and only one group's parameters are
    gathered at a time. Parameters are separate arrays, by layer; they are stacked
    here, in the dtype in which they are used.
    """
    size = len(self.config.pattern)
    splits = [
      nnx.split(nnx.List(self.blocks[i * size : (i + 1) * size]))
      for i in range(count)
    ]
    stacked = jax.tree.map(
      lambda *layers: jnp.stack(layers),
      *(cast(state, self.config.dtype) for _, state in splits),
    )

    def step(x_BTD, state):
      return read(x_BTD, nnx.merge(splits[0][0], state)), None

    return jax.lax.scan(step, x_BTD, stacked)[0]

  def prefill(
    self, tokens_BC: jax.Array, valid_BC: jax.Array
  ) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
    """Reads prompts.

    Args:
      tokens_BC: token ids, padded on the left.
      valid_BC: False at padding.

    Returns the normed hidden state [B, 1, D] of the last token of each row, and
    the keys and values [B, K, C, E] of every layer.
    """
    x_BCD, kept = self._embed(tokens_BC), []
    views = self._views(valid_BC)
    for i, block in enumerate(self.blocks):
      x_BCD, keys_and_values = block(x_BCD, *views[self.config.layer(i)])
      kept.append(keys_and_values)
    return self.final_norm(x_BCD[:, -1:]), kept

  def step(
    self,
    token_B1: jax.Array,
    now: cache_lib.Now,
    cache: cache_lib.Cache,
  ) -> tuple[jax.Array, cache_lib.Cache]:
    """Reads one token of every row.

    Args:
      token_B1: token ids.
      now: where the tokens stand in their rows.
      cache: holds the tokens before them.

    Returns the normed hidden state [B, 1, D], and the cache with these tokens.
    """
    x_B1D, after = self._embed(token_B1), []
    turns = self._turns(now.position_B1)
    for i, (block, layer) in enumerate(zip(self.blocks, cache, strict=True)):
      kind = self.config.layer(i)

      def attend(q_BH1E, k_BK1E, v_BK1E, layer=layer, kind=kind):
        layer = cache_lib.write(layer, k_BK1E, v_BK1E, now.step)
        out_BH1E = attention.attend(
          q_BH1E,
          [(layer.k_BKCE, layer.v_BKCE), (layer.k_BKRE, layer.v_BKRE)],
          cache_lib.visible(layer, kind.window, now),
          self.config.score_scale,
          self.config.score_cap,
        )
        return out_BH1E, layer

      x_B1D, layer = block(x_B1D, turns[kind], attend)
      after.append(layer)
    return self.final_norm(x_B1D), after

  def _embed(self, tokens_BT):
    x_BTD = sharding.lookup(self.embed_VD[...], tokens_BT, self.config.dtype)
    x_BTD = sharding.by_rows(x_BTD)
    if self.config.scale_embeddings:
      x_BTD = x_BTD * jnp.asarray(self.config.d_model**0.5, x_BTD.dtype)
    return x_BTD

  def _turns(self, positions_BT):
    """Rotary angles of every distinct kind of layer."""
    size = self.config.head_dim
    return {
      layer: layer.rope and rope.rotary(positions_BT, size, layer.rope)
      for layer in dict.fromkeys(self.config.layers)
    }

  def _views(self, row_BT):
    """Rotary angles and attention, over whole rows, of every kind of layer."""
    row_BT = row_BT.astype(jnp.int32)  # Of one row, where tokens are valid.
    turns = self._turns(positions(row_BT))

    def attend(layer, q_BHTE, k_BKTE, v_BKTE):
      out_BHTE = attention.causal(
        q_BHTE,
        k_BKTE,
        v_BKTE,
        row_BT,
        kind=self.config.attention,
        window=layer.window,
        scale=self.config.score_scale,
        cap=self.config.score_cap,
      )
      return out_BHTE, (k_BKTE, v_BKTE)

    return {
      layer: (turned, functools.partial(attend, layer))
      for layer, turned in turns.items()
    }

  def _recomputed(self, block, sin_cos, attend):
    """The block as a function of its input; see `ModelConfig.remat`."""

    def read(x_BTD):
      return block(x_BTD, sin_cos, attend)[0]

    policy = _REMAT[self.config.remat]
    return jax.checkpoint(read, policy=policy) if policy else read

  def unembed(self):
    """The matrix [D, V] from hidden states to logits, as `logits` uses it."""
    tied = self.unembed_DV is None
    unembed_DV = self.embed_VD[...].T if tied else self.unembed_DV[...]
    return unembed_DV.astype(self.config.dtype)

  def logits(self, x_BTD, unembed_DV=None):
    """Logits of the next token, float32 [B, T, V]."""
    if unembed_DV is None:
      unembed_DV = self.unembed()
    logits_BTV = jnp.einsum(
      'BTD,DV->BTV', x_BTD, unembed_DV, preferred_element_type=jnp.float32
    )
    return attention.soft_cap(logits_BTV, self.config.logit_cap)


def positions(row_BT):
  """Rotary positions, counted from the first token of each row.

  row 0 0 1 1 1 2 2 0  ->  positions 0 0 0 1 2 0 1 0
  """
  first_BT, _ = blockwise.runs(row_BT)
  return jnp.arange(row_BT.shape[1])[None] - first_BT


NO_PARAMS = nnx.State({})


def split(decoder: Decoder) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
  """Splits into structure, trained parameters and frozen parameters.

  All parameters are trained or, with LoRA, only the adapters. `nnx.merge` joins
  the parts again.
  """
  trained = nnx.LoRAParam if decoder.config.lora else nnx.Param
  return nnx.split(decoder, trained, ...)


def cast(params: nnx.State, dtype: str) -> nnx.State:
  """Casts parameters to the dtype in which a forward pass uses them.

  A forward pass casts them at every use, except the scales of norms. To cast
  them once beforehand gives the same results bit for bit.
  """

  def cast_param(path, param):
    if path[-1] == 'scale':
      return param
    return param.replace(param.get_value().astype(dtype))

  return nnx.map_state(cast_param, params)


@functools.cache
def abstract(config: ModelConfig) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
  """The result of `split` with shapes for arrays; shared: do not change it."""
  return split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
