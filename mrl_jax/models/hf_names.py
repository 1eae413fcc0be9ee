"""The names and layouts that Hugging Face and PEFT give to our parameters."""

from collections.abc import Mapping
import math
from typing import NamedTuple

import numpy as np

from mrl_jax.architecture import ModelConfig

# Matrix of a layer: its name there, and the axes that it sums and makes.
_PROJECTIONS = {
  'attention.q': ('self_attn.q_proj', 'D', 'HE'),
  'attention.k': ('self_attn.k_proj', 'D', 'KE'),
  'attention.v': ('self_attn.v_proj', 'D', 'KE'),
  'attention.o': ('self_attn.o_proj', 'HE', 'D'),
  'mlp.gate': ('mlp.gate_proj', 'D', 'F'),
  'mlp.up': ('mlp.up_proj', 'D', 'F'),
  'mlp.down': ('mlp.down_proj', 'F', 'D'),
}
# The norms of a layer, by whether they stand before or after.
_NORMS = {
  'before': {
    'attention_norm': 'input_layernorm',
    'mlp_norm': 'post_attention_layernorm',
  },
  'after': {
    'attention_norm_after': 'post_attention_layernorm',
    'mlp_norm_after': 'post_feedforward_layernorm',
  },
  'both': {
    'attention_norm': 'input_layernorm',
    'attention_norm_after': 'post_attention_layernorm',
    'mlp_norm': 'pre_feedforward_layernorm',
    'mlp_norm_after': 'post_feedforward_layernorm',
  },
}
_QK_NORMS = {'none': (), 'head': ('E', 'E'), 'heads': ('HE', 'KE')}


class Tensor(NamedTuple):
  """A parameter there: a matrix, or a vector if it has no columns.

  Attributes:
    name: of the tensor.
    letters: our axes, in our order.
    rows, columns: which of them are its rows and columns, flattened.
  """

  name: str
  letters: str
  rows: str
  columns: str = ''

  def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """There; `sizes` are those of the axes."""
    groups = (self.rows, self.columns) if self.columns else (self.rows,)
    return tuple(math.prod(sizes[c] for c in group) for group in groups)

  def to_ours(self, x: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
    theirs = self.rows + self.columns
    x = x.reshape([sizes[c] for c in theirs])
    return x.transpose([theirs.index(c) for c in self.letters])

  def to_theirs(self, x: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
    theirs = self.rows + self.columns
    x = x.transpose([self.letters.index(c) for c in theirs])
    return x.reshape(self.shape(sizes))


def tensors(config: ModelConfig) -> dict[str, Tensor]:
  """The tensors of a model by the paths of our parameters, without adapters."""
  found = {'embed_VD': Tensor('model.embed_tokens.weight', 'VD', 'V', 'D')}
  for i in range(config.num_layers):
    for ours, (theirs, inputs, outputs) in _PROJECTIONS.items():
      path, name = f'blocks.{i}.{ours}', f'model.layers.{i}.{theirs}'
      found[f'{path}.weight'] = Tensor(
        f'{name}.weight', inputs + outputs, outputs, inputs
      )
      if _has_bias(ours, config):
        found[f'{path}.bias'] = Tensor(f'{name}.bias', outputs, outputs)
    for ours, theirs in _NORMS[config.norms].items():
      found[f'blocks.{i}.{ours}.scale'] = Tensor(
        f'model.layers.{i}.{theirs}.weight', 'D', 'D'
      )
    for q_or_k, letters in zip('qk', _QK_NORMS[config.qk_norm], strict=False):
      found[f'blocks.{i}.attention.{q_or_k}_norm.scale'] = Tensor(
        f'model.layers.{i}.self_attn.{q_or_k}_norm.weight', letters, letters
      )
  found['final_norm.scale'] = Tensor('model.norm.weight', 'D', 'D')
  if not config.tie_embeddings:
    found['unembed_DV'] = Tensor('lm_head.weight', 'DV', 'V', 'D')
  return found


def adapters(config: ModelConfig) -> dict[str, Tensor]:
  """The tensors of its adapters, as PEFT names them."""
  found = {}
  for i in range(config.num_layers):
    for ours, (theirs, inputs, outputs) in _PROJECTIONS.items():
      if theirs.rpartition('.')[2] in config.lora.target_modules:
        path = f'blocks.{i}.{ours}.adapter'
        name = f'base_model.model.model.layers.{i}.{theirs}'
        found[f'{path}.a'] = Tensor(
          f'{name}.lora_A.weight', inputs + 'R', 'R', inputs
        )
        found[f'{path}.b'] = Tensor(
          f'{name}.lora_B.weight', 'R' + outputs, outputs, 'R'
        )
  return found


def _has_bias(ours, config) -> bool:
  if ours == 'attention.o':
    return config.out_bias
  return config.qkv_bias and ours.startswith('attention.')
