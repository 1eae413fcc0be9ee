"""Model families, as data for the one decoder."""

from collections.abc import Mapping
import functools
import math

from mrl_jax import checks
from mrl_jax.architecture import Layer
from mrl_jax.architecture import ModelConfig
from mrl_jax.architecture import Rope

llama = functools.partial(ModelConfig, norm_eps=1e-5, tie_embeddings=False)

qwen = functools.partial(
  ModelConfig, qk_norm='head', layers=(Layer(rope=Rope(base=1e6)),)
)

gemma = functools.partial(
  ModelConfig,
  activation='gelu',
  norm_offset=True,
  scale_embeddings=True,
)

# For policies that start from nothing.
FAMILIES = {'llama': llama, 'qwen': qwen, 'gemma': gemma}


def build(family: str, **sizes) -> ModelConfig:
  """The config of a `family`, with `sizes` as fields of `ModelConfig`."""
  return checks.choose(family, FAMILIES, 'model family')(**sizes)


def _llama(hf) -> dict:
  return {'qkv_bias': hf['attention_bias'], 'out_bias': hf['attention_bias']}


def _mistral(hf) -> dict:
  return {'layers': (_layer(hf['rope_parameters'], hf['sliding_window']),)}


def _qwen2(hf) -> dict:
  return {'qkv_bias': True, 'layers': _by_type(hf)}


def _qwen3(hf) -> dict:
  return {**_llama(hf), 'qk_norm': 'head', 'layers': _by_type(hf)}


def _gemma(hf) -> dict:
  return {**_llama(hf), 'norm_offset': True, 'scale_embeddings': True}


def _gemma2(hf) -> dict:
  return {
    **_gemma(hf),
    'norms': 'both',
    'query_size': hf['query_pre_attn_scalar'],
    'score_cap': hf['attn_logit_softcapping'] or 0,
    'logit_cap': hf['final_logit_softcapping'] or 0,
    'layers': _by_type(hf),
  }


def _gemma3(hf) -> dict:
  return {**_gemma2(hf), 'qk_norm': 'head'}


def _smollm3(hf) -> dict:
  layers = [
    layer if positions else Layer(window=layer.window, rope=None)
    for layer, positions in zip(_by_type(hf), hf['no_rope_layers'], strict=True)
  ]
  return {**_llama(hf), 'layers': tuple(layers)}


def _olmo2(hf) -> dict:
  return {**_llama(hf), 'norms': 'after', 'qk_norm': 'heads'}


def to_hugging_face(family: str, model: ModelConfig) -> dict:
  """The config, as `transformers` 5 writes it, of a model of `FAMILIES`.

  `from_hugging_face` makes the same model of it.
  """
  (layer,) = model.layers
  return {
    'model_type': {'llama': 'llama', 'qwen': 'qwen3', 'gemma': 'gemma'}[family],
    'vocab_size': model.vocab_size,
    'num_hidden_layers': model.num_layers,
    'hidden_size': model.d_model,
    'intermediate_size': model.d_ff,
    'num_attention_heads': model.num_heads,
    'num_key_value_heads': model.num_kv_heads,
    'head_dim': model.head_dim,
    'rms_norm_eps': model.norm_eps,
    'tie_word_embeddings': model.tie_embeddings,
    'rope_parameters': {'rope_type': 'default', 'rope_theta': layer.rope.base},
  }


# What sets a `model_type` of Hugging Face apart, by its config.
ARCHITECTURES = {
  'llama': _llama,
  'mistral': _mistral,
  'qwen2': _qwen2,
  'qwen3': _qwen3,
  'gemma': _gemma,
  'gemma2': _gemma2,
  'gemma3_text': _gemma3,
  'smollm3': _smollm3,
  'olmo2': _olmo2,
}
_ACTIVATIONS = {
  'silu': 'silu',
  'gelu_pytorch_tanh': 'gelu',
  'gelu': 'gelu_erf',
}


def from_hugging_face(hf: Mapping, **changes) -> ModelConfig:
  """The config of a model of Hugging Face.

  Args:
    hf: its config as `transformers` 5 writes it.
    **changes: other fields of `ModelConfig`, such as dtypes.

  Raises:
    InputError: the decoder cannot compute such a model; names what it lacks.
  """
  name = hf['model_type']
  checks.require(
    name in ARCHITECTURES,
    f'architecture {name!r} is not supported.'
    f'{checks.did_you_mean(name, ARCHITECTURES)} A new one needs a function in '
    'mrl_jax/models/families.py, its names in mrl_jax/models/hf_names.py and, '
    'where it computes something else, a field of ModelConfig',
  )
  heads = hf['num_attention_heads']
  fields = {
    'vocab_size': hf['vocab_size'],
    'num_layers': hf['num_hidden_layers'],
    'd_model': hf['hidden_size'],
    'd_ff': hf['intermediate_size'],
    'num_heads': heads,
    'num_kv_heads': hf['num_key_value_heads'],
    'head_dim': hf.get('head_dim') or hf['hidden_size'] // heads,
    'activation': checks.choose(
      hf.get('hidden_activation') or hf['hidden_act'],
      _ACTIVATIONS,
      'activation',
    ),
    'norm_eps': hf['rms_norm_eps'],
    'tie_embeddings': hf['tie_word_embeddings'],
  }
  if 'layer_types' not in hf:
    fields['layers'] = (_layer(hf['rope_parameters']),)
  for key in ('mlp_bias', 'use_bidirectional_attention'):
    checks.require(not hf.get(key), f'{name} with {key} is not supported')
  return ModelConfig(**{**fields, **ARCHITECTURES[name](hf), **changes})


def _by_type(hf) -> tuple[Layer, ...]:
  """Layers that see all or a window, with rotary positions of their own."""
  rope = hf['rope_parameters']
  layers = {
    kind: _layer(rope.get(kind, rope), window)
    for kind, window in (
      ('full_attention', 0),
      ('sliding_attention', hf['sliding_window']),
    )
  }
  return tuple(
    checks.choose(kind, layers, 'layer type') for kind in hf['layer_types']
  )


def _layer(rope: Mapping, window: int | None = 0) -> Layer:
  checks.require(
    rope.get('partial_rotary_factor', 1) == 1,
    f'rotary positions of a part of each head are not supported: {dict(rope)}',
  )
  scaling = checks.choose(rope['rope_type'], _ROPES, 'rope_type')
  return Layer(
    window=window or 0, rope=Rope(base=rope['rope_theta'], **scaling(rope))
  )


def _llama3_rope(rope):
  return {
    'scaling': 'llama3',
    'factor': rope['factor'],
    'original_length': rope['original_max_position_embeddings'],
    'low': rope['low_freq_factor'],
    'high': rope['high_freq_factor'],
  }


def _yarn_rope(rope):
  factor = rope['factor']
  amplitude = rope.get('attention_factor')
  if amplitude is None:
    above, below = rope.get('mscale'), rope.get('mscale_all_dim')
    both = above and below
    amplitude = _yarn_amplitude(factor, above if both else 1.0)
    amplitude /= _yarn_amplitude(factor, below) if both else 1.0
  return {
    'scaling': 'yarn',
    'factor': factor,
    'original_length': rope['original_max_position_embeddings'],
    'low': rope.get('beta_slow') or 1.0,
    'high': rope.get('beta_fast') or 32.0,
    'amplitude': amplitude,
    'truncate': rope.get('truncate', True),
  }


def _yarn_amplitude(factor, scale):
  """2309.00071, eq. 15, with its scale of DeepSeek's."""
  return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


_ROPES = {
  'default': lambda rope: {},
  'linear': lambda rope: {'scaling': 'linear', 'factor': rope['factor']},
  'llama3': _llama3_rope,
  'yarn': _yarn_rope,
}
