"""Prompts and tokenizers of a run, loaded and measured before it starts."""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import hashlib
import os

import ml_collections

from mrl_jax import checks
from mrl_jax import records
from mrl_jax.data import prompts as prompts_lib
from mrl_jax.data import vocabulary
from mrl_jax.thl import byte_tokenizer
from mrl_jax.training import worker as worker_lib

_MULTIPLE = 8  # Prompt positions are rounded up to it.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts:
  """The prompts of a run, each within every policy's limit.

  Attributes:
    train: those of reinforcement.
    heldout: those of evaluation.
    examples: those with worked solutions for each policy's warm start.
    skipped: how many were left out as too long.
    context: C of each policy.
    tokenizers: of each policy.
  """

  train: Sequence[records.Prompt]
  heldout: Sequence[records.Prompt]
  examples: Mapping[str, Sequence[records.Prompt]]
  skipped: int
  context: Mapping[str, int]
  tokenizers: Mapping[str, byte_tokenizer.ByteTokenizer]


def load(config: ml_collections.ConfigDict, cache: str) -> Prompts:
  """Loads data and tokenizers, and measures every prompt."""
  read = functools.partial(prompts_lib.load, config.data, cache_dir=cache)
  every = read('train')
  train = prompts_lib.of_families(every, config.data.families)
  heldout = prompts_lib.balanced(
    prompts_lib.of_families(read('heldout'), config.data.families),
    config.eval.prompts,
    config.seed,
  )
  examples = {
    name: _examples(every, policy, config)
    for name, policy in config.policies.items()
  }
  tokenizers = {
    name: byte_tokenizer.load(_tokenizer_folder(policy.tokenizer, every, cache))
    for name, policy in config.policies.items()
  }
  lengths = {
    name: {
      p.id: len(worker_lib.prompt_ids(tokenizers[name], policy.template, p))
      for part in (train, heldout, examples[name])
      for p in part
    }
    for name, policy in config.policies.items()
  }
  limit = config.sample.max_prompt_tokens
  long = {
    id: (name, n)
    for name, by_id in lengths.items()
    for id, n in by_id.items()
    if n > limit
  }
  for id, (name, n) in long.items():
    checks.require(
      config.sample.long_prompts == 'skip',
      f'prompt {id} has {n} tokens for policy {name}, more than '
      f'sample.max_prompt_tokens = {limit}; raise it, or skip such prompts '
      "with --config.sample.long_prompts=skip",
    )
  short = lambda part: [prompt for prompt in part if prompt.id not in long]
  longest = {
    name: max((n for id, n in by_id.items() if id not in long), default=1)
    for name, by_id in lengths.items()
  }
  return Prompts(
    train=short(train),
    heldout=short(heldout),
    examples={name: short(part) for name, part in examples.items()},
    skipped=len(long),
    context={n: -(-c // _MULTIPLE) * _MULTIPLE for n, c in longest.items()},
    tokenizers=tokenizers,
  )


def _examples(every, policy, config):
  if not config.warm_start.steps:
    return []
  examples = prompts_lib.of_families(every, policy.warm_start_families)
  checks.require(
    all(prompt.solution for prompt in examples),
    f'data.source = {config.data.source} has no worked solutions to start '
    'from; give --config.warm_start.steps=0',
  )
  return examples


def _tokenizer_folder(config, prompts, cache):
  """The folder given, or that of a tokenizer trained on these prompts."""
  if config.path:
    return config.path
  texts = [f'{prompt.text}\n{prompt.solution}' for prompt in prompts]
  digest = hashlib.sha256('\0'.join(texts).encode()).hexdigest()[:8]
  folder = os.path.join(
    cache, 'tokenizers', f'{config.kind}-{config.vocab_size}-{digest}'
  )
  vocabulary.train(config.kind, texts, config.vocab_size, folder)
  return folder
