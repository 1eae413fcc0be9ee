"""Small Hugging Face models, and their logits by `transformers`.

pip install -e '.[parity]' && python tests/parity.py   # writes tests/golden
"""

import os
import pathlib
import shutil

import numpy as np
from safetensors import numpy as safetensors_numpy

GOLDEN = pathlib.Path(__file__).parent / 'golden'
EXPECTED = 'expected.safetensors'
# Tokens of the longest prompt and of its continuation; sliding windows are
# shorter.
LENGTH, NEW = 24, 64

_SIZES = {
  'vocab_size': 61,
  'hidden_size': 16,
  'intermediate_size': 24,
  'num_hidden_layers': 3,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'head_dim': 6,
  'max_position_embeddings': 256,
  'pad_token_id': 0,
  'bos_token_id': 1,
  'eos_token_id': 2,
}
_LLAMA3_ROPE = {
  'rope_type': 'llama3',
  'rope_theta': 500.0,
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 32,
}
_YARN = {
  'rope_type': 'yarn',
  'rope_theta': 500.0,
  'factor': 4.0,
  'original_max_position_embeddings': 32,
}
# `model_type` of each model, and the fields that differ from its defaults.
MODELS = {
  'llama2': ('llama', {'num_key_value_heads': 4}),
  'llama3': ('llama', {'rope_parameters': _LLAMA3_ROPE}),
  'llama_tied_bias': (
    'llama',
    {'tie_word_embeddings': True, 'attention_bias': True},
  ),
  'mistral': ('mistral', {'sliding_window': 7}),
  'qwen2': ('qwen2', {'rope_parameters': _YARN}),
  'qwen2_window': (
    'qwen2',
    {'use_sliding_window': True, 'sliding_window': 7, 'max_window_layers': 2},
  ),
  'qwen3': ('qwen3', {'tie_word_embeddings': True}),
  'gemma': ('gemma', {}),
  'gemma2': (
    'gemma2',
    {'sliding_window': 7, 'query_pre_attn_scalar': 9,
     'attn_logit_softcapping': 2.0, 'final_logit_softcapping': 3.0},
  ),
  'gemma3': (
    'gemma3_text',
    {
      'num_hidden_layers': 7,
      'sliding_window': 7,
      'query_pre_attn_scalar': 9,
      'rope_parameters': {
        'sliding_attention': {'rope_type': 'default', 'rope_theta': 100.0},
        'full_attention': {
          'rope_type': 'linear', 'rope_theta': 1000.0, 'factor': 8.0,
        },
      },
    },
  ),
  'smollm3': ('smollm3', {'num_hidden_layers': 5}),
  'olmo2': ('olmo2', {}),
}  # fmt: skip


# Models with stored files, one of each family; comparing others needs torch.
STORED = (
  *('llama2', 'llama3', 'mistral', 'qwen2', 'qwen3'),
  *('gemma2', 'gemma3', 'smollm3', 'olmo2'),
)


def write(name: str, folder: str, seed: int = 0):
  """Writes a random model; returns that of `transformers`."""
  import torch
  import transformers

  kind, fields = MODELS[name]
  config = transformers.AutoConfig.for_model(kind, **{**_SIZES, **fields})
  torch.manual_seed(seed)
  model = transformers.AutoModelForCausalLM.from_config(config).eval()
  with torch.no_grad():
    for param in model.parameters():
      # All norms and biases begin equal: a test would not notice if they were
      # mixed up.
      scale = 0.5 if param.ndim == 1 else param.shape[-1] ** -0.5
      param.add_(scale * torch.randn(param.shape))
  model.save_pretrained(folder)
  return model


def prompts(seed: int) -> dict[str, np.ndarray]:
  """Left-padded random prompts of three lengths."""
  tokens_BT = np.random.default_rng(seed).integers(3, 61, (3, LENGTH))
  valid_BT = np.arange(LENGTH)[None, :] >= np.array([[0], [5], [19]])
  return {
    'tokens_BT': np.where(valid_BT, tokens_BT, 0).astype(np.int32),
    'valid_BT': valid_BT,
  }


def expected(model, seed: int) -> dict[str, np.ndarray]:
  """The padded prompts, and the logits of `transformers`."""
  import torch

  rows = prompts(seed)
  mask = torch.tensor(rows['valid_BT']).long()
  with torch.no_grad():
    logits_BTV = model(
      torch.tensor(rows['tokens_BT']),
      attention_mask=mask,
      position_ids=(mask.cumsum(1) - 1).clamp(min=0),
    ).logits
  return {**rows, 'logits_BTV': logits_BTV.numpy().copy()}


def greedy(model, seed: int) -> dict[str, np.ndarray]:
  """The greedy continuations of the prompts by `transformers`."""
  import torch

  rows = prompts(seed)
  model.generation_config.eos_token_id = None
  with torch.no_grad():
    ids = model.generate(
      torch.tensor(rows['tokens_BT']),
      attention_mask=torch.tensor(rows['valid_BT']).long(),
      max_new_tokens=NEW,
      do_sample=False,
    )
  return {'greedy_BN': ids[:, LENGTH:].numpy().astype(np.int32)}


def main():
  shutil.rmtree(GOLDEN, ignore_errors=True)
  for name in STORED:
    model = write(name, os.fspath(GOLDEN / name))
    computed = {**expected(model, seed=0), **greedy(model, seed=0)}
    safetensors_numpy.save_file(computed, GOLDEN / name / EXPECTED)
    print(name)


if __name__ == '__main__':
  main()
