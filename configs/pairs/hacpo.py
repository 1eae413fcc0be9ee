"""The pairs of HACPO, https://arxiv.org/abs/2603.02604.

  python launch/tpu_pod.py --config=configs/pairs/hacpo.py:qwen3_4b_llama3_3b
    --config.data.jsonl.train=FILE --config.data.jsonl.heldout=FILE

After the colon, give one of `PAIRS`. The data are the 7,500 problems of MATH,
once, in 58 rounds.

To vary: method.name=gspo, by itself (the authors double train.samples).
"""

import ml_collections

from configs.pairs import boxed
from mrl_jax import checks

_MODELS = {
  'qwen3_17b_base': 'Qwen/Qwen3-1.7B-Base',
  'qwen3_4b': 'Qwen/Qwen3-4B',
  'qwen3_4b_base': 'Qwen/Qwen3-4B-Base',
  'qwen3_4b_instruct': 'Qwen/Qwen3-4B-Instruct-2507',
  'qwen3_8b_base': 'Qwen/Qwen3-8B-Base',
  'llama3_1b': 'meta-llama/Llama-3.2-1B-Instruct',
  'llama3_3b': 'meta-llama/Llama-3.2-3B-Instruct',
}
# The two models, and alpha, delta_step and delta.
PAIRS = {
  'qwen3_4b_instruct': ('qwen3_4b', 'qwen3_4b_instruct', 3.0, 0.01, 0.2),
  'qwen3_17b_4b': ('qwen3_17b_base', 'qwen3_4b_base', 1.0, 0.025, 0.2),
  'qwen3_4b_8b': ('qwen3_4b_base', 'qwen3_8b_base', 3.0, 0.025, 0.2),
  'llama3_1b_3b': ('llama3_1b', 'llama3_3b', 1.0, 0.01, 0.1),
  'qwen3_4b_llama3_3b': ('qwen3_4b_base', 'llama3_3b', 1.0, 0.025, 0.2),
  'qwen3_17b_llama3_1b': ('qwen3_17b_base', 'llama3_1b', 1.0, 0.025, 0.2),
}


def get_config(pair='qwen3_4b_llama3_3b') -> ml_collections.ConfigDict:
  *names, alpha, delta_step, delta = checks.choose(pair, PAIRS, 'pair')
  config = boxed.get_config({name: _MODELS[name] for name in names})
  for name, policy in config.policies.items():
    if not name.endswith('base'):
      policy.template, policy.system = 'chat', boxed.TASK
  config.method.name = 'hacpo'
  config.method.scale = 'unbiased_std'
  config.method.kl_weight = 1e-3
  config.method.clip_low = 3e-4
  config.method.clip_high = 4e-4
  config.method.dual_clip = 0.0
  config.method.hacpo.alpha = alpha
  config.method.hacpo.delta_step = delta_step
  config.method.hacpo.delta = delta
  config.train.aggregation = 'sequence_mean'
  config.train.rounds = 58
  config.train.mini_batches = 4  # Of 64 x 8 of the 2 x 128 x 8 responses.
  return config
