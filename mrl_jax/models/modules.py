"""The modules that have parameters, and how parameters are declared.

A parameter is declared once, in its module. The letters of its einsum give its
shape, its initial scale and the names of its axes; `sharding` maps the names to
mesh axes.
"""

import math

from flax import nnx
import jax
import jax.numpy as jnp

from mrl_jax.architecture import ModelConfig

_AXES = {
  'D': 'embed',
  'V': 'vocab',
  'H': 'heads',
  'K': 'kv_heads',
  'E': 'head',
  'F': 'mlp',
  'R': 'rank',
}


def axes(letters: str) -> tuple[str, ...]:
  """The names of axes, by their letters."""
  return tuple(_AXES[letter] for letter in letters)


def _shape(config, letters) -> tuple[int, ...]:
  return tuple(config.axis_sizes[letter] for letter in letters)


def param(config, rngs, letters, inputs, kind=nnx.Param):
  """A random matrix with the axes `letters`; an einsum sums over `inputs`."""
  value = jax.random.normal(rngs.params(), _shape(config, letters), jnp.float32)
  value *= math.prod(_shape(config, inputs)) ** -0.5
  return kind(value.astype(_dtype(config, kind)), axes=axes(letters))


def _zeros(config, letters, kind=nnx.Param):
  value = jnp.zeros(_shape(config, letters), _dtype(config, kind))
  return kind(value, axes=axes(letters))


def _dtype(config, kind):
  return 'float32' if kind is nnx.LoRAParam else config.param_dtype


def _as(x, param):
  return param[...].astype(x.dtype)


class Adapter(nnx.Module):
  """LoRA's term of an einsum (2106.09685), alpha / R B A x; initially B = 0."""

  def __init__(self, spec: str, config: ModelConfig, rngs: nnx.Rngs):
    x, inputs, outputs, out = _letters(spec)
    low = ''.join(c for c in x if c not in inputs) + 'R'
    self.spec_a = f'{x},{inputs}R->{low}'
    self.spec_b = f'{low},R{outputs}->{out}'
    self.scale = config.lora.alpha / config.lora.rank
    self.a = param(config, rngs, inputs + 'R', inputs, nnx.LoRAParam)
    self.b = _zeros(config, 'R' + outputs, nnx.LoRAParam)

  def __call__(self, x):
    low = jnp.einsum(self.spec_a, x, _as(x, self.a))
    return jnp.einsum(self.spec_b, low, _as(x, self.b)) * self.scale


class Projection(nnx.Module):
  """An einsum of activations with a weight, which Hugging Face calls `name`."""

  def __init__(
    self,
    name: str,
    spec: str,
    config: ModelConfig,
    rngs: nnx.Rngs,
    bias: bool = False,
  ):
    _, inputs, outputs, out = _letters(spec)
    self.spec = spec
    self.weight = param(config, rngs, inputs + outputs, inputs)
    self.bias = _zeros(config, outputs) if bias else None
    self.bias_shape = tuple(
      config.axis_sizes[c] if c in outputs else 1 for c in out
    )
    adapted = config.lora is not None and name in config.lora.target_modules
    self.adapter = Adapter(spec, config, rngs) if adapted else None

  def __call__(self, x):
    y = jnp.einsum(self.spec, x, _as(x, self.weight))
    if self.adapter is not None:
      y = y + self.adapter(x)
    if self.bias is not None:
      y = y + _as(x, self.bias).reshape(self.bias_shape)
    return y


def _letters(spec: str) -> tuple[str, str, str, str]:
  """Splits 'BTD,DHE->BHTE' into 'BTD', inputs 'D', outputs 'HE' and 'BHTE'."""
  x, weight, out = spec.replace('->', ',').split(',')
  inputs = ''.join(c for c in weight if c not in out)
  outputs = ''.join(c for c in weight if c in out)
  return x, inputs, outputs, out


class RMSNorm(nnx.Module):
  """Root-mean-square norm over the axes `letters`, computed in float32.

  The axes are the last one of the input, or H and E of [B, H, T, E].
  """

  def __init__(self, config: ModelConfig, letters: str):
    self.eps, self.offset = config.norm_eps, float(config.norm_offset)
    single = len(letters) == 1
    self.over = (-1,) if single else (1, 3)
    self.scale = nnx.Param(
      jnp.full(_shape(config, letters), 1 - self.offset, config.param_dtype),
      axes=('norm',) if single else axes(letters),
    )

  def __call__(self, x):
    over = [dim % x.ndim for dim in self.over]
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(x32 * x32, over, keepdims=True)
    scale = self.scale[...].astype(jnp.float32) + self.offset
    scale = scale.reshape(
      [n if i in over else 1 for i, n in enumerate(x.shape)]
    )
    return (x32 * jax.lax.rsqrt(mean_square + self.eps) * scale).astype(x.dtype)
