"""Prompts from their sources, checked before anything runs."""

from collections.abc import Sequence
import dataclasses
import itertools
import json
import math
import os
import random
import re

import numpy as np

from mrl_jax import checks
from mrl_jax import records
from mrl_jax.data import arithmetic

SPLITS = ('train', 'heldout')

_LONE_SURROGATE = re.compile('[\ud800-\udfff]')


def load(config, split: str, cache_dir: str) -> list[records.Prompt]:
  """All prompts of a split, of any family.

  Args:
    config: `config.data`.
    split: one of `SPLITS`.
    cache_dir: where generated datasets are kept.

  Raises:
    InputError: the source is unknown, empty, missing or malformed.
  """
  read = checks.choose(config.source, SOURCES, 'data.source')
  prompts = read(config, split, cache_dir)
  checks.require(
    bool(prompts), f'there is no {split} prompt in data.source={config.source}'
  )
  return prompts


def of_families(
  prompts: Sequence[records.Prompt], families: Sequence[str]
) -> list[records.Prompt]:
  """The prompts of these families, and those of sources that know none."""
  known = {prompt.family for prompt in prompts}
  if known == {''}:
    return list(prompts)
  for family in families:
    checks.choose(family, dict.fromkeys(known), 'family')
  return [prompt for prompt in prompts if prompt.family in families]


def _arithmetic(config, split, cache_dir):
  builder = arithmetic.prepare(os.path.join(cache_dir, 'tfds'), config.seed)
  prompts = [
    records.Prompt(
      id=row['id'].decode(),
      text=row['question'].decode(),
      answer=row['answer'].decode(),
      family=arithmetic.FAMILIES[row['family']],
      solution=row['solution'].decode(),
    )
    for row in builder.as_data_source(split)
    if row['difficulty'] in config.difficulties
  ]
  return sorted(prompts, key=lambda prompt: prompt.id)


def _jsonl(config, split, cache_dir):
  del cache_dir
  path = config.jsonl[split]
  checks.require(
    bool(path) and os.path.isfile(path),
    f'data.jsonl.{split}={path!r} is not a file',
  )
  with open(path, 'rb') as lines:
    return [
      _parse(line, f'{path}:{i}', config.jsonl)
      for i, line in enumerate(lines, start=1)
      if line.strip()
    ]


def _parse(line: bytes, where, fields):
  try:
    row = json.loads(line.decode())
  except (ValueError, RecursionError) as error:
    raise checks.InputError(f'{where}: not JSON in UTF-8: {error}') from error
  checks.require(isinstance(row, dict), f'{where}: not a JSON object')
  return records.Prompt(
    id=where,
    text=_text(row, fields.prompt, where),
    answer=_text(row, fields.answer, where),
  )


def _text(row, field, where) -> str:
  value = row.get(field)
  if isinstance(value, float) and not math.isfinite(value):
    value = None
  number = isinstance(value, int | float) and not isinstance(value, bool)
  text = str(value) if number else value
  checks.require(
    isinstance(text, str) and bool(text.strip()),
    f'{where}: no text or number in {field!r}; it has {sorted(row)} '
    '(data.jsonl.prompt and data.jsonl.answer name the fields)',
  )
  checks.require(
    _LONE_SURROGATE.search(text) is None,
    f'{where}: {field!r} has half a character, a surrogate such as \\ud800',
  )
  return text


SOURCES = {'arithmetic': _arithmetic, 'jsonl': _jsonl}


def balanced(
  prompts: Sequence[records.Prompt], count: int, seed: int
) -> list[records.Prompt]:
  """At most `count` prompts, from the families in turn until each runs out."""
  shuffled = random.Random(seed).sample(prompts, len(prompts))
  by_family = {}
  for prompt in sorted(shuffled, key=lambda prompt: prompt.family):
    by_family.setdefault(prompt.family, []).append(prompt)
  rounds = itertools.zip_longest(*by_family.values())
  drawn = (p for round in rounds for p in round if p is not None)
  return list(itertools.islice(drawn, count))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Template:
  """What a policy reads around a prompt.

  Attributes:
    before, after: the prompt.
    chat: whether control tokens in them are such.
  """

  before: str
  after: str
  chat: bool = False

  def encode(self, tokenizer, prompt: records.Prompt) -> np.ndarray:
    """The prompt in the ids (i32) of a `thl.byte_tokenizer.ByteTokenizer`."""
    if self.chat:
      return tokenizer.encode_chat(self.before, prompt.text, self.after)
    return tokenizer.encode_prompt(self.before + prompt.text + self.after)


def plain(template: str) -> Template:
  """The template of a text that has '{prompt}' once."""
  before, after = template.split('{prompt}')
  return Template(before=before, after=after)
