"""Prompts and tokenizers of a run, loaded and measured before it starts."""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import math
import os

import ml_collections
import msgspec

from mrl_jax import checks
from mrl_jax import config as config_lib
from mrl_jax import hugging_face
from mrl_jax import records
from mrl_jax.data import prompts as prompts_lib
from mrl_jax.data import vocabulary
from mrl_jax.models import families
from mrl_jax.thl import byte_tokenizer

_MULTIPLE = 8  # Prompt positions are rounded up to it.
# Of a text that a tokenizer learns from; the time grows with its square.
_MAX_CHARACTERS = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
  """What a run reads; every prompt is within every policy's limit.

  Attributes:
    train: prompts of reinforcement.
    heldout: prompts of evaluation.
    examples: prompts with worked solutions, for each policy's warm start.
    skipped: how many prompts were left out as too long.
    folders: of each policy's tokenizer.
    tokenizers: of each policy.
    templates: of each policy.
    context: C of each policy.
  """

  train: Sequence[records.Prompt]
  heldout: Sequence[records.Prompt]
  examples: Mapping[str, Sequence[records.Prompt]]
  skipped: int
  folders: Mapping[str, str]
  tokenizers: Mapping[str, byte_tokenizer.ByteTokenizer]
  templates: Mapping[str, prompts_lib.Template]
  context: Mapping[str, int]

  @property
  def digest(self) -> str:
    """Equal for equal prompts, tokenizers and templates."""
    prompts = msgspec.to_builtins((self.train, self.heldout, self.examples))
    prints = {name: t.fingerprint for name, t in self.tokenizers.items()}
    templates = {n: dataclasses.asdict(t) for n, t in self.templates.items()}
    return config_lib.digest([prompts, prints, templates])


def load(config: ml_collections.ConfigDict, cache: str) -> Inputs:
  """Loads data and tokenizers, and leaves out prompts that are too long.

  Raises:
    InputError: the data or a tokenizer cannot be used, or a prompt is too long
      where `sample.long_prompts` is 'error'.
  """
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
  folders = {
    name: _tokenizer_folder(policy, every, cache)
    for name, policy in config.policies.items()
  }
  tokenizers = {
    name: byte_tokenizer.load(
      folders[name],
      _rows(policy),
      hugging_face.stop_ids(policy.path) if policy.path else (),
    )
    for name, policy in config.policies.items()
  }
  templates = {
    name: _template(policy, folders[name])
    for name, policy in config.policies.items()
  }
  lengths = {
    name: _lengths(
      tokenizer, templates[name], (*train, *heldout, *examples[name])
    )
    for name, tokenizer in tokenizers.items()
  }
  long = _too_long(lengths, config.sample)
  short = functools.partial(
    _short, long=long, most=config.sample.max_prompt_tokens
  )
  train, heldout = short('to train on,', train), short('held out,', heldout)
  examples = {
    name: short(f'of the warm start of {name},', prompts)
    for name, prompts in examples.items()
  }
  for name, prompts in examples.items():
    _check_solutions(name, tokenizers[name], prompts, config)
  return Inputs(
    train=train,
    heldout=heldout,
    examples=examples,
    skipped=len(long),
    folders=folders,
    tokenizers=tokenizers,
    templates=templates,
    context={name: _context(by_id, long) for name, by_id in lengths.items()},
  )


def _lengths(tokenizer, template, prompts) -> dict[str, int]:
  """How many tokens a policy reads for each prompt, by its id."""
  return {p.id: len(template.encode(tokenizer, p)) for p in prompts}


def _context(lengths, long) -> int:
  """Prompt positions that are enough for all but the long."""
  longest = max(n for id, n in lengths.items() if id not in long)
  return math.ceil(longest / _MULTIPLE) * _MULTIPLE


def _too_long(lengths, config) -> set[str]:
  """The ids of prompts that are too long for a policy."""
  long = set()
  for name, by_id in lengths.items():
    for id, n in by_id.items():
      checks.require(n > 0, f'prompt {id} has no token for policy {name}')
      if n <= config.max_prompt_tokens:
        continue
      long.add(id)
      checks.require(
        config.long_prompts == 'skip',
        f'prompt {id} has {n} tokens for policy {name}, more than '
        f'sample.max_prompt_tokens = {config.max_prompt_tokens}; raise it, or '
        'leave such prompts out with --config.sample.long_prompts=skip',
      )
  return long


def _short(where, prompts, *, long, most) -> list[records.Prompt]:
  """Leaves out the long prompts; some of every family must stay."""
  kept = [prompt for prompt in prompts if prompt.id not in long]
  gone = {p.family for p in prompts} - {p.family for p in kept}
  checks.require(
    not gone,
    f'every prompt {where} {" and ".join(sorted(gone))} has more than '
    f'sample.max_prompt_tokens = {most} tokens',
  )
  return kept


def _examples(every, policy, config) -> list[records.Prompt]:
  if not config.warm_start.steps:
    return []
  examples = prompts_lib.of_families(every, policy.warm_start_families)
  checks.require(
    all(prompt.solution for prompt in examples),
    f'data.source = {config.data.source} has no worked solutions to start '
    'from; give --config.warm_start.steps=0',
  )
  return examples


def _check_solutions(name, tokenizer, examples, config) -> None:
  """Refuses worked solutions that are longer than a completion may be."""
  most = config.sample.max_tokens
  for prompt in examples:
    rejected = prompt.solution.replace(
      config.reward.marker, config.warm_start.rejected_marker
    )
    for solution in (prompt.solution, rejected):
      n = len(tokenizer.encode(solution.encode())) + 1
      checks.require(
        n <= most,
        f'the solution {solution!r} of {prompt.id}, with its end, has {n} '
        f'tokens for policy {name}; raise sample.max_tokens = {most}',
      )


def _rows(policy) -> int | None:
  """Tokens that the model at a policy's path has embeddings for."""
  if not policy.path:
    return None
  values = hugging_face.load_config(policy.path)
  return families.from_hugging_face(values).vocab_size


def _template(policy, folder) -> prompts_lib.Template:
  """The template given, or that of the tokenizer of a folder."""
  if policy.template != config_lib.CHAT:
    return prompts_lib.plain(policy.template)
  before, after = hugging_face.chat_template(
    hugging_face.load_tokenizer(folder),
    policy.system,
    config_lib.THINKING[policy.thinking],
  )
  return prompts_lib.Template(before=before, after=after, chat=True)


def _tokenizer_folder(policy, prompts, cache) -> str:
  """The folder given, or that of a tokenizer trained on these prompts."""
  config = policy.tokenizer
  if config.path or policy.path:
    return config.path or policy.path
  texts = [f'{prompt.text}\n{prompt.solution}' for prompt in prompts]
  texts = [text[:_MAX_CHARACTERS] for text in texts]
  name = f'{config.kind}-{config.vocab_size}-{config_lib.digest(texts)}'
  folder = os.path.join(cache, 'tokenizers', name)
  vocabulary.train(config.kind, texts, config.vocab_size, folder)
  return folder
