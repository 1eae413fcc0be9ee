"""The `config.json` of public models, for plans made without weights or hub.

Each has the keys that `families.from_hugging_face` reads and that differ from
the defaults of `transformers`; names and values are those of the file. Training
reads the file itself.
"""

from collections.abc import Sequence

_QWEN2 = {
  'model_type': 'qwen2',
  'vocab_size': 151_936,
  'rope_theta': 1e6,
  'rms_norm_eps': 1e-6,
  'tie_word_embeddings': True,
}
_QWEN3 = {**_QWEN2, 'model_type': 'qwen3', 'head_dim': 128}
_LLAMA3 = {
  'model_type': 'llama',
  'vocab_size': 128_256,
  'max_position_embeddings': 131_072,
  'rope_theta': 5e5,
  'rope_scaling': {
    'rope_type': 'llama3',
    'factor': 32.0,
    'low_freq_factor': 1.0,
    'high_freq_factor': 4.0,
    'original_max_position_embeddings': 8192,
  },
  'rms_norm_eps': 1e-5,
  'tie_word_embeddings': True,
}
_LLAMA3_8 = {'rope_scaling': {**_LLAMA3['rope_scaling'], 'factor': 8.0}}
_SMOLLM3 = {
  'model_type': 'smollm3',
  'vocab_size': 128_256,
  'rope_theta': 5e6,
  'rms_norm_eps': 1e-6,
  'tie_word_embeddings': True,
  'no_rope_layers': 9 * [1, 1, 1, 0],
}
_SIZES = (
  'num_hidden_layers',
  'hidden_size',
  'intermediate_size',
  'num_attention_heads',
  'num_key_value_heads',
)


def _model(family: dict, sizes: Sequence[int], **changes) -> dict:
  return {**family, **dict(zip(_SIZES, sizes, strict=True)), **changes}


# Layers, width, width of the feed-forward, heads of queries and of keys.
_QWEN2_15B = _model(_QWEN2, (28, 1536, 8960, 12, 2))
_QWEN3_17B = _model(_QWEN3, (28, 2048, 6144, 16, 8))
_QWEN3_4B = _model(_QWEN3, (36, 2560, 9728, 32, 8))
_QWEN3_8B = _model(_QWEN3, (36, 4096, 12288, 32, 8), tie_word_embeddings=False)
_LLAMA3_1B = _model(_LLAMA3, (16, 2048, 8192, 32, 8))
_LLAMA3_3B = _model(_LLAMA3, (28, 3072, 8192, 24, 8))
_LLAMA3_8B = _model(
  _LLAMA3, (32, 4096, 14336, 32, 8), tie_word_embeddings=False, **_LLAMA3_8
)
_SMOLLM3_3B = _model(_SMOLLM3, (36, 2048, 11008, 16, 4))

CONFIGS = {
  'Qwen/Qwen2.5-0.5B': _model(_QWEN2, (24, 896, 4864, 14, 2)),
  'Qwen/Qwen2.5-1.5B': _QWEN2_15B,
  'Qwen/Qwen2.5-Math-1.5B': {**_QWEN2_15B, 'rope_theta': 1e4},
  'Qwen/Qwen3-0.6B': _model(_QWEN3, (28, 1024, 3072, 16, 8)),
  'Qwen/Qwen3-1.7B': _QWEN3_17B,
  'Qwen/Qwen3-1.7B-Base': _QWEN3_17B,
  'Qwen/Qwen3-4B': _QWEN3_4B,
  'Qwen/Qwen3-4B-Base': _QWEN3_4B,
  'Qwen/Qwen3-4B-Instruct-2507': {**_QWEN3_4B, 'rope_theta': 5e6},
  'Qwen/Qwen3-8B': _QWEN3_8B,
  'Qwen/Qwen3-8B-Base': _QWEN3_8B,
  'meta-llama/Llama-3.2-1B': _LLAMA3_1B,
  'meta-llama/Llama-3.2-1B-Instruct': _LLAMA3_1B,
  'meta-llama/Llama-3.2-3B': _LLAMA3_3B,
  'meta-llama/Llama-3.2-3B-Instruct': _LLAMA3_3B,
  'meta-llama/Llama-3.1-8B': _LLAMA3_8B,
  'meta-llama/Llama-3.1-8B-Instruct': _LLAMA3_8B,
  'HuggingFaceTB/SmolLM3-3B': _SMOLLM3_3B,
  'HuggingFaceTB/SmolLM3-3B-Base': _SMOLLM3_3B,
  'OctoThinker/OctoThinker-3B-Hybrid-Base': _LLAMA3_3B,
}
