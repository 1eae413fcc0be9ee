"""Model families, as data for the one decoder."""

from collections.abc import Mapping
import dataclasses
import math

from mrl_jax import checks
from mrl_jax.architecture import Layer
from mrl_jax.architecture import ModelConfig
from mrl_jax.architecture import Rope

_GEMMA = {'norm_offset': True, 'scale_embeddings': True}
# Fields of `ModelConfig` that no Hugging Face config has, by its `model_type`.
ARCHITECTURES = {
  'llama': {},
  'mistral': {'qkv_bias': False, 'out_bias': False},
  'qwen2': {'qkv_bias': True, 'out_bias': False},
  'qwen3': {'qk_norm': 'head'},
  'gemma': _GEMMA,
  'gemma2': {**_GEMMA, 'norms': 'both'},
  'gemma3_text': {**_GEMMA, 'norms': 'both', 'qk_norm': 'head'},
  'smollm3': {},
  'olmo2': {'norms': 'after', 'qk_norm': 'heads'},
}
# Families of random models: their `model_type` and fields of `ModelConfig`.
FAMILIES = {
  'llama': ('llama', {'norm_eps': 1e-5, 'tie_embeddings': False}),
  'qwen': ('qwen3', {'layers': (Layer(rope=Rope(base=1e6)),)}),
  'gemma': ('gemma', {'activation': 'gelu'}),
}
# Names of fields in Hugging Face's configs and in `ModelConfig`.
_FIELDS = {
  'vocab_size': 'vocab_size',
  'num_hidden_layers': 'num_layers',
  'hidden_size': 'd_model',
  'intermediate_size': 'd_ff',
  'num_attention_heads': 'num_heads',
  'num_key_value_heads': 'num_kv_heads',
  'head_dim': 'head_dim',
  'rms_norm_eps': 'norm_eps',
  'tie_word_embeddings': 'tie_embeddings',
}
# Fields that only some configs have; a missing one, or None, is 0.
_OPTIONAL_FIELDS = {
  'query_pre_attn_scalar': 'query_size',
  'attn_logit_softcapping': 'score_cap',
  'final_logit_softcapping': 'logit_cap',
}
# Fields of `Rope` and their names in `rope_parameters`, by its `rope_type`.
_EXTENDED = {
  'factor': 'factor',
  'original_length': 'original_max_position_embeddings',
}
_SCALINGS = {
  'default': {},
  'linear': {'factor': 'factor'},
  'llama3': {**_EXTENDED, 'low': 'low_freq_factor', 'high': 'high_freq_factor'},
  'yarn': _EXTENDED,
}
_ACTIVATIONS = {'silu': 'silu', 'gelu_pytorch_tanh': 'gelu', 'gelu': 'gelu_erf'}


def build(family: str, **sizes) -> ModelConfig:
  """A random model's architecture; `sizes` are fields of `ModelConfig`."""
  kind, fields = checks.choose(family, FAMILIES, 'model family')
  return ModelConfig(**{**ARCHITECTURES[kind], **fields, **sizes})


def to_hugging_face(family: str, model: ModelConfig) -> dict:
  """The config of a model of `FAMILIES`: the inverse of `from_hugging_face`."""
  (layer,) = model.layers
  return {
    'model_type': FAMILIES[family][0],
    **{theirs: getattr(model, ours) for theirs, ours in _FIELDS.items()},
    'rope_parameters': {'rope_type': 'default', 'rope_theta': layer.rope.base},
  }


def from_hugging_face(hf: Mapping, **changes) -> ModelConfig:
  """The architecture of a Hugging Face model.

  Args:
    hf: the model's config as `transformers` 5 writes it.
    **changes: other fields of `ModelConfig`, such as dtypes.

  Raises InputError, which names the missing feature, if the decoder cannot
  compute such a model.
  """
  name = hf['model_type']
  checks.require(
    name in ARCHITECTURES,
    f'architecture {name!r} is not supported.'
    f'{checks.did_you_mean(name, ARCHITECTURES)} A new one needs a row of '
    'ARCHITECTURES in mrl_jax/models/families.py, its names in '
    'mrl_jax/parameters.py and, if it computes something new, a field of '
    'ModelConfig',
  )
  for key in ('mlp_bias', 'use_bidirectional_attention'):
    checks.require(not hf.get(key), f'{name} with {key} is not supported')
  fields = {ours: hf.get(theirs) for theirs, ours in _FIELDS.items()}
  fields['head_dim'] = (
    fields['head_dim'] or fields['d_model'] // fields['num_heads']
  )
  for theirs, ours in _OPTIONAL_FIELDS.items():
    fields[ours] = hf.get(theirs) or 0
  fields['activation'] = checks.choose(
    hf.get('hidden_activation') or hf['hidden_act'], _ACTIVATIONS, 'activation'
  )
  fields['qkv_bias'] = fields['out_bias'] = bool(hf.get('attention_bias'))
  fields['layers'] = _layers(hf)
  return ModelConfig(**{**fields, **ARCHITECTURES[name], **changes})


def _layers(hf) -> tuple[Layer, ...]:
  """The attention of every layer, or of a single one if all are alike."""
  rope = hf['rope_parameters']
  windows = {'full_attention': 0, 'sliding_attention': hf.get('sliding_window')}
  layers = {
    kind: Layer(window=window or 0, rope=_rope(rope.get(kind, rope)))
    for kind, window in windows.items()
  }
  if hf['model_type'] == 'mistral':
    return (layers['sliding_attention'],)
  kinds = hf.get('layer_types', ['full_attention'])
  chosen = [checks.choose(kind, layers, 'layer type') for kind in kinds]
  # SmolLM3's list has a 0 for every layer without positions.
  return tuple(
    layer if positions else dataclasses.replace(layer, rope=None)
    for layer, positions in zip(
      chosen, hf.get('no_rope_layers', [1] * len(kinds)), strict=True
    )
  )


def _rope(rope: Mapping) -> Rope:
  checks.require(
    rope.get('partial_rotary_factor', 1) == 1,
    f'rotary positions of a part of each head are not supported: {dict(rope)}',
  )
  kind = rope['rope_type']
  names = checks.choose(kind, _SCALINGS, 'rope_type')
  fields = {ours: rope[theirs] for ours, theirs in names.items()}
  if kind == 'yarn':
    fields['low'] = rope.get('beta_slow') or 1.0
    fields['high'] = rope.get('beta_fast') or 32.0
    fields['amplitude'] = _yarn_amplitude(rope)
    fields['truncate'] = rope.get('truncate', True)
  scaling = 'none' if kind == 'default' else kind
  return Rope(base=rope['rope_theta'], scaling=scaling, **fields)


def _yarn_amplitude(rope) -> float:
  """2309.00071, eq. 15, with the scales that DeepSeek's models add."""
  if rope.get('attention_factor') is not None:
    return rope['attention_factor']

  def amplitude(scale):
    factor = rope['factor']
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

  scales = rope.get('mscale'), rope.get('mscale_all_dim')
  if all(scales):
    return amplitude(scales[0]) / amplitude(scales[1])
  return amplitude(1.0)
