"""The default job, which the other files of this folder change.

All keys, with their defaults, ranges and meaning: mrl_jax/config_keys.py.

The default job needs no download. Two small policies of different families,
sizes and tokenizers learn arithmetic, each on a device that the CPU emulates. A
short supervised phase before RL (`warm_start`) gives each of them skills that
the other lacks:

- Both see every operation as a formula, `max 4 9 3`. Each sees only half of
  the operations in words, `the top score of 4 9 3`; the other half it never
  sees. Networks this small need thousands of examples to learn a new fact, so
  that RL can only elicit what they already know: here, that words stand for
  operations which the policy can compute.
- In a share of all demonstrations every `=` is a `:`, which the verifier
  rejects. GRPO alone unlearns that quickly, which gives the baseline without
  exchange something to gain. The meaning of the missing words is what peers can
  teach.
"""

import ml_collections

from mrl_jax import config as config_lib

# Sums take more practice than lists, and so they are listed more often.
FORMULAS = (
  *('formula/add', 'formula/sub') * 3,
  'formula/max',
  'formula/min',
  'formula/reverse',
  'formula/sort',
)


def get_config() -> ml_collections.ConfigDict:
  config = config_lib.default()
  config.policies.llama = policy(
    family='llama',
    tokenizer='byte_level',
    vocab_size=384,
    num_layers=2,
    d_model=96,
    d_ff=192,
    num_heads=3,
    num_kv_heads=3,
    head_dim=32,
    warm_start=(*('words/add',) * 3, 'words/max', 'words/reverse'),
  )
  config.policies.gemma = policy(
    family='gemma',
    tokenizer='sentencepiece',
    vocab_size=384,
    num_layers=3,
    d_model=64,
    d_ff=192,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    warm_start=(*('words/sub',) * 3, 'words/min', 'words/sort'),
  )
  # With AdamW the same skills take twice as many updates.
  config.warm_start.optimizer.name = 'muon'
  config.warm_start.optimizer.learning_rate = 0.01
  config.warm_start.steps = 450
  # A prompt and its answer have about 15 tokens.
  config.train.packed_tokens = 64
  config.data.families = (
    'words/add',
    'words/sub',
    'words/max',
    'words/min',
    'words/reverse',
    'words/sort',
    'formula/add',
    'formula/sort',
  )
  return config


def policy(family, tokenizer, vocab_size, warm_start, **sizes):
  """A random model of these sizes, and a tokenizer trained on the data."""
  config = config_lib.policy()
  config.model.family = family
  config.model.update(sizes)
  config.tokenizer.kind = tokenizer
  config.tokenizer.vocab_size = vocab_size
  config.warm_start_families = (*FORMULAS, *warm_start)
  return config


def pretrained(path, template):
  """The model at `path`, with bfloat16 activations."""
  config = config_lib.policy()
  config.path, config.template = path, template
  config.model.dtype = 'bfloat16'
  config.model.remat = 'auto'
  return config
