"""Prompts and tokenizers of a run, loaded and measured before it starts."""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import os
from typing import NamedTuple

from absl import logging
import ml_collections
import msgspec
import numpy as np

from mrl_jax import checks
from mrl_jax import config as config_lib
from mrl_jax import config_keys
from mrl_jax import hugging_face
from mrl_jax import records
from mrl_jax.data import prompts as prompts_lib
from mrl_jax.data import vocabulary
from mrl_jax.models import families
from mrl_jax.rewards import gold
from mrl_jax.rewards import judge
from mrl_jax.thl import byte_tokenizer

_MULTIPLE = 8  # Prompt positions are rounded up to it.
# Longest text that a tokenizer is trained on; the time grows with its square.
_MAX_CHARACTERS = 10_000


class PolicyInputs(NamedTuple):
  """What one policy reads."""

  tokenizer: byte_tokenizer.ByteTokenizer
  template: prompts_lib.Template
  folder: str  # Of the tokenizer.
  examples: Sequence[records.Prompt] = ()  # With solutions, for the warm start.
  context: int = 0  # C: prompt positions, enough for the longest prompt.

  def prompt_ids(self, prompt: records.Prompt) -> np.ndarray:
    """The prompt in the policy's template and tokens, i32 [C] at most."""
    return self.template.encode(self.tokenizer, prompt)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
  """What a run reads; every prompt is within every policy's limit."""

  train: Sequence[records.Prompt]
  heldout: Sequence[records.Prompt]
  skipped: int  # Number of prompts that were left out as too long.
  policies: Mapping[str, PolicyInputs]
  faulty: int = 0  # Number of gold answers that could never be rewarded.

  @property
  def digest(self) -> str:
    """A digest of prompts, tokenizers and templates."""
    policies = self.policies.items()
    examples = {name: policy.examples for name, policy in policies}
    return config_lib.digest(
      [
        msgspec.to_builtins((self.train, self.heldout, examples)),
        {name: policy.tokenizer.fingerprint for name, policy in policies},
        {
          name: dataclasses.asdict(policy.template) for name, policy in policies
        },
      ]
    )


def context(longest: int) -> int:
  """C, the prompt positions of rows whose longest prompt has `longest` tokens."""
  return math.ceil(longest / _MULTIPLE) * _MULTIPLE


def load(config: ml_collections.ConfigDict, cache: str) -> Inputs:
  """Loads data and tokenizers, and leaves out prompts that are too long.

  Raises InputError if the data or a tokenizer cannot be used, or if a prompt is
  too long and `sample.long_prompts` is 'error'.
  """
  every = prompts_lib.load(config.data, 'train', cache_dir=cache)
  heldout = prompts_lib.load(config.data, 'heldout', cache_dir=cache)
  train, heldout = (
    prompts_lib.of_families(prompts, config.data.families)
    for prompts in (every, heldout)
  )
  heldout = prompts_lib.balanced(heldout, config.eval.prompts, config.seed)
  policies = {
    name: _load_policy(policy, every, config, cache)
    for name, policy in config.policies.items()
  }
  lengths, long = {name: {} for name in policies}, set()
  for name, policy in policies.items():
    for prompt in (*train, *heldout, *policy.examples):
      n = lengths[name][prompt.id] = len(policy.prompt_ids(prompt))
      if _is_too_long(prompt.id, n, name, config.sample):
        long.add(prompt.id)

  def without_long(where, prompts):
    kept = [prompt for prompt in prompts if prompt.id not in long]
    lost = {p.family for p in prompts} - {p.family for p in kept}
    checks.require(
      not lost,
      f'every prompt {where} {" and ".join(sorted(lost))} has more than '
      f'sample.max_prompt_tokens = {config.sample.max_prompt_tokens} tokens',
    )
    return kept

  train = without_long('to train on,', train)
  heldout = without_long('held out,', heldout)
  for name, policy in policies.items():
    where = f'of the warm start of {name},'
    longest = max(n for id, n in lengths[name].items() if id not in long)
    policies[name] = policy._replace(
      examples=without_long(where, policy.examples),
      context=context(longest),
    )
    _check_solutions(name, policies[name], config)
  return Inputs(
    train=train, heldout=heldout, skipped=len(long), policies=policies
  )


def check_answers(
  loaded: Inputs, verifier: judge.Verifier, most: float
) -> Inputs:
  """Counts gold answers that are not correct by the run's own verifier.

  Raises InputError if they are more than the share `most` of a set.
  """
  count = 0
  for name, prompts in (('train', loaded.train), ('heldout', loaded.heldout)):
    faults = gold.faults(verifier, [prompt.answer for prompt in prompts])
    bad = [prompt for prompt in prompts if prompt.answer in faults]
    examples = [
      f'{p.id}: {faults[p.answer]}: {p.answer[:80]!r}' for p in bad[:3]
    ]
    checks.require(
      len(bad) <= most * len(prompts),
      f'{len(bad):,} of {len(prompts):,} gold answers of the {name} set could '
      'never be rewarded. Are data.jsonl.answer and reward.marker right? If so, '
      'raise data.max_faulty.\n  ' + '\n  '.join(examples),
    )
    count += len(bad)
    for example in examples:
      logging.warning('this gold answer could never be rewarded: %s', example)
  return dataclasses.replace(loaded, faulty=count)


def _load_policy(policy, prompts, config, cache) -> PolicyInputs:
  """A policy's inputs, with examples of any length."""
  examples = []
  if config.warm_start.steps:
    examples = prompts_lib.of_families(prompts, policy.warm_start_families)
    checks.require(
      all(prompt.solution for prompt in examples),
      f'data.source = {config.data.source} has no worked solutions to start '
      'from; give --config.warm_start.steps=0',
    )
  folder = policy.tokenizer.path or policy.path
  if not folder:
    folder = _train_tokenizer(policy.tokenizer, prompts, cache)
  embeddings, stop_ids = None, ()
  if policy.path:
    values = hugging_face.load_config(policy.path)
    embeddings = families.from_hugging_face(values).vocab_size
    stop_ids = hugging_face.stop_ids(policy.path)
  tokenizer = byte_tokenizer.load(folder, embeddings, stop_ids)
  return PolicyInputs(tokenizer, _template(policy, folder), folder, examples)


def _train_tokenizer(config, prompts, cache) -> str:
  texts = [f'{prompt.text}\n{prompt.solution}' for prompt in prompts]
  texts = [text[:_MAX_CHARACTERS] for text in texts]
  name = f'{config.kind}-{config.vocab_size}-{config_lib.digest(texts)}'
  folder = os.path.join(cache, 'tokenizers', name)
  vocabulary.train(config.kind, texts, config.vocab_size, folder)
  return folder


def _template(policy, folder) -> prompts_lib.Template:
  """The template of the config, or the chat template of the tokenizer."""
  if policy.template != config_lib.CHAT:
    return prompts_lib.plain(policy.template)
  before, after = hugging_face.chat_template(
    hugging_face.load_tokenizer(folder),
    policy.system,
    config_keys.THINKING[policy.thinking],
  )
  return prompts_lib.Template(before=before, after=after, chat=True)


def _is_too_long(id, n, policy, config) -> bool:
  checks.require(n > 0, f'prompt {id} has no token for policy {policy}')
  most = config.max_prompt_tokens
  checks.require(
    n <= most or config.long_prompts == 'skip',
    f'prompt {id} has {n} tokens for policy {policy}, more than '
    f'sample.max_prompt_tokens = {most}; raise it, or leave such prompts out '
    'with --config.sample.long_prompts=skip',
  )
  return n > most


def _check_solutions(name, policy: PolicyInputs, config) -> None:
  """Refuses worked solutions that are longer than a completion may be."""
  most = config.sample.max_tokens
  for prompt in policy.examples:
    rejected = prompt.solution.replace(
      config.reward.marker, config.warm_start.rejected_marker
    )
    for solution in (prompt.solution, rejected):
      n = len(policy.tokenizer.encode(solution.encode())) + 1
      checks.require(
        n <= most,
        f'the solution {solution!r} of {prompt.id}, with its end, has {n} '
        f'tokens for policy {name}; raise sample.max_tokens = {most}',
      )
