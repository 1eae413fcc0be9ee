"""The parameters of a decoder: their shapes, and their names in files.

Files of weights have the names and layouts of Hugging Face, files of adapters
those of PEFT.
"""

from collections.abc import Mapping, Sequence
import math
from typing import NamedTuple

import numpy as np

from mrl_jax.architecture import ModelConfig
from mrl_jax.architecture import QK_NORMS

# Matrices of a layer: Hugging Face's name, input axes, output axes, and the
# field of `ModelConfig` that adds a bias.
_PROJECTIONS = {
  'attention.q': ('self_attn.q_proj', 'D', 'HE', 'qkv_bias'),
  'attention.k': ('self_attn.k_proj', 'D', 'KE', 'qkv_bias'),
  'attention.v': ('self_attn.v_proj', 'D', 'KE', 'qkv_bias'),
  'attention.o': ('self_attn.o_proj', 'HE', 'D', 'out_bias'),
  'mlp.gate': ('mlp.gate_proj', 'D', 'F', None),
  'mlp.up': ('mlp.up_proj', 'D', 'F', None),
  'mlp.down': ('mlp.down_proj', 'F', 'D', None),
}
# The norms of a layer, by `ModelConfig.norms`.
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


class Tensor(NamedTuple):
  """A tensor in a file: a matrix, or a vector if it has no columns."""

  sizes: Mapping[str, int]  # The sizes of the axes, by their letters.
  name: str  # The tensor's name in the file.
  letters: str  # The axes of our parameter, in our order.
  rows: str  # The axes that are flattened into rows in the file.
  columns: str = ''  # The axes that are flattened into columns in the file.

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape in the file."""
    groups = filter(None, (self.rows, self.columns))
    return tuple(math.prod(self.sizes[c] for c in group) for group in groups)

  def bounds(self, index: Sequence[slice]) -> tuple[tuple[int, int], ...]:
    """First and last row, and column, in the file of a part of our parameter.

    `index` has a slice of each axis. Of axes that are flattened together, only
    the first may be split.
    """
    wanted, found = dict(zip(self.letters, index, strict=True)), []
    for first, *others in filter(None, (self.rows, self.columns)):
      assert all(wanted[c] == slice(None) for c in others)
      start, stop, _ = wanted[first].indices(self.sizes[first])
      stride = math.prod(self.sizes[c] for c in others)
      found.append((start * stride, stop * stride))
    return tuple(found)

  def to_ours(self, x: np.ndarray) -> np.ndarray:
    """The parameter, or a part of it, in our order of axes."""
    theirs, sizes = self.rows + self.columns, []
    for size, group in zip(x.shape, (self.rows, self.columns), strict=False):
      others = [self.sizes[c] for c in group[1:]]
      sizes += [size // math.prod(others), *others]
    return x.reshape(sizes).transpose([theirs.index(c) for c in self.letters])

  def to_theirs(self, x: np.ndarray) -> np.ndarray:
    x = x.transpose([self.letters.index(c) for c in self.rows + self.columns])
    return np.ascontiguousarray(x.reshape(self.shape))


def tensors(config: ModelConfig) -> dict[str, Tensor]:
  """The tensors of a model without adapters, by the path of our parameter."""
  table, sizes = {}, config.axis_sizes

  def add(path, name, *axes):
    table[path] = Tensor(sizes, name, *axes)

  add('embed_VD', 'model.embed_tokens.weight', 'VD', 'V', 'D')
  for i in range(config.num_layers):
    ours, theirs = f'blocks.{i}.', f'model.layers.{i}.'
    for path, (name, inputs, outputs, bias) in _PROJECTIONS.items():
      axes = inputs + outputs, outputs, inputs
      add(f'{ours}{path}.weight', f'{theirs}{name}.weight', *axes)
      if bias and getattr(config, bias):
        add(f'{ours}{path}.bias', f'{theirs}{name}.bias', outputs, outputs)
    for path, name in _NORMS[config.norms].items():
      add(f'{ours}{path}.scale', f'{theirs}{name}.weight', 'D', 'D')
    for q_or_k, axes in zip('qk', QK_NORMS[config.qk_norm], strict=False):
      path, name = f'attention.{q_or_k}_norm', f'self_attn.{q_or_k}_norm'
      add(f'{ours}{path}.scale', f'{theirs}{name}.weight', axes, axes)
  add('final_norm.scale', 'model.norm.weight', 'D', 'D')
  if not config.tie_embeddings:
    add('unembed_DV', 'lm_head.weight', 'DV', 'V', 'D')
  return table


def adapters(config: ModelConfig) -> dict[str, Tensor]:
  """The tensors of a model's adapters, by the path of our parameter."""
  table, sizes = {}, config.axis_sizes
  targets = config.lora.target_modules if config.lora else ()
  for i in range(config.num_layers):
    for path, (name, inputs, outputs, _) in _PROJECTIONS.items():
      if name.rpartition('.')[2] in targets:
        path = f'blocks.{i}.{path}.adapter'
        name = f'base_model.model.model.layers.{i}.{name}'
        axes_a = inputs + 'R', 'R', inputs
        axes_b = 'R' + outputs, outputs, 'R'
        table[f'{path}.a'] = Tensor(sizes, f'{name}.lora_A.weight', *axes_a)
        table[f'{path}.b'] = Tensor(sizes, f'{name}.lora_B.weight', *axes_b)
  return table


def num_params(table: Mapping[str, Tensor]) -> int:
  return sum(math.prod(tensor.shape) for tensor in table.values())
