"""Loads prompts from their sources, and checks them."""

from collections.abc import Sequence
import dataclasses
import itertools
import json
import math
import operator
import os
import random
import re

import numpy as np

from mrl_jax import checks
from mrl_jax import records
from mrl_jax.data import arithmetic

_LONE_SURROGATE = re.compile('[\ud800-\udfff]')


def load(config, split: str, cache_dir: str) -> list[records.Prompt]:
  """Loads all prompts of a split ('train' or 'heldout'), of every family.

  `config` is `config.data`; generated datasets are in `cache_dir`. Raises
  InputError if the source is missing, empty or malformed.
  """
  prompts = SOURCES[config.source](config, split, cache_dir)
  checks.require(
    bool(prompts), f'there is no {split} prompt in data.source={config.source}'
  )
  return prompts


def of_families(
  prompts: Sequence[records.Prompt], families: Sequence[str]
) -> list[records.Prompt]:
  """The prompts of these families; all prompts if they have no families."""
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
  text = row.get(field)
  if type(text) is int or (type(text) is float and math.isfinite(text)):
    text = str(text)
  checks.require(
    isinstance(text, str) and bool(text.strip()),
    f'{where}: no text or number in {field!r}; it has {sorted(row)} '
    '(data.jsonl.prompt and data.jsonl.answer name the fields)',
  )
  checks.require(
    _LONE_SURROGATE.search(text) is None,
    f'{where}: {field!r} has half of a surrogate pair, such as \\ud800, which '
    'is not a character',
  )
  return text


SOURCES = {'arithmetic': _arithmetic, 'jsonl': _jsonl}


def balanced(
  prompts: Sequence[records.Prompt], count: int, seed: int
) -> list[records.Prompt]:
  """At most `count` prompts, drawn at random; families take turns."""
  family = operator.attrgetter('family')
  shuffled = random.Random(seed).sample(prompts, len(prompts))
  groups = itertools.groupby(sorted(shuffled, key=family), family)
  rounds = itertools.zip_longest(*[[*group] for _, group in groups])
  drawn = (p for round in rounds for p in round if p is not None)
  return list(itertools.islice(drawn, count))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Template:
  """The text that a policy reads before and after a prompt."""

  before: str
  after: str
  chat: bool = False  # A chat template's control tokens are trusted.

  def encode(self, tokenizer, prompt: records.Prompt) -> np.ndarray:
    """The prompt in the ids (i32) of a `thl.byte_tokenizer.ByteTokenizer`."""
    if self.chat:
      return tokenizer.encode_chat(self.before, prompt.text, self.after)
    return tokenizer.encode_prompt(self.before + prompt.text + self.after)


def plain(template: str) -> Template:
  """The template of a text that contains '{prompt}' once."""
  before, after = template.split('{prompt}')
  return Template(before=before, after=after)
