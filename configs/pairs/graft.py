"""The pairs of GRAFT, https://arxiv.org/abs/2609.37868.

  python launch/tpu_pod.py --config=configs/pairs/graft.py:smollm3_qwen3
    --config.data.jsonl.train=FILE --config.data.jsonl.heldout=FILE

After the colon, give one of `PAIRS`. The data are the 7,500 problems of MATH,
three times, in 174 rounds. Its average of five test sets, SmolLM3 and Qwen3:
GRPO 32.60 and 31.20, SGT 34.88 and 31.24, GRAFT 37.06 and 33.44.

To vary: method.name=grpo, sgt or hacpo.
"""

import ml_collections

from configs.pairs import boxed
from mrl_jax import checks

_MODELS = {
  'smollm3': 'HuggingFaceTB/SmolLM3-3B-Base',
  'qwen3': 'Qwen/Qwen3-1.7B-Base',
  'octothinker': 'OctoThinker/OctoThinker-3B-Hybrid-Base',
}
PAIRS = {
  'smollm3_qwen3': ('smollm3', 'qwen3'),
  'octothinker_qwen3': ('octothinker', 'qwen3'),
  'smollm3_octothinker': ('smollm3', 'octothinker'),
}


def get_config(pair='smollm3_qwen3') -> ml_collections.ConfigDict:
  names = checks.choose(pair, PAIRS, 'pair')
  config = boxed.get_config({name: _MODELS[name] for name in names})
  config.method.name = 'graft'
  config.train.rounds = 174
  config.train.mini_batches = 4
  config.sample.max_prompt_tokens = 2048
  return config
