"""`arithmetic`: a dataset of small sums and lists, made on the spot.

Six operations, each on two surfaces, a formula and words, with a worked
solution whose last step is the answer:

  formula/sub   '9 - 3 - 2'                  '= 6 = 4'
  words/sub     'Ann had 9, lost 3, lost 2'  '= 6 = 4'
  formula/sort  'sort 4 9 3'                 '= 3 4 9'
  words/sort    'line up 4 9 3 in order'     '= 3 4 9'

A family is a surface and an operation. The difficulty is the number of
operands. Splits do not share operands: which split a set of operands belongs
to does not depend on their order, nor on the family.
"""

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import functools
import hashlib
import io
import itertools
import os
import random

import numpy as np
import tensorflow_datasets as tfds

from mrl_jax import checks

OPERATIONS = ('add', 'sub', 'max', 'min', 'reverse', 'sort')
SURFACES = ('formula', 'words')
FAMILIES = tuple(f'{s}/{o}' for s in SURFACES for o in OPERATIONS)
DIFFICULTIES = (3, 4)
HELDOUT_SHARE = 0.2
MAX_EXAMPLES = 800  # Of a family and difficulty, over both splits.
SEEDS = 100  # A seed is one of so many configs of the builder.

_WORDS = {
  'add': ('{name} has {}', ', gets {}'),
  'sub': ('{name} had {}', ', lost {}'),
}
_LIST_WORDS = {
  'max': 'the top score of {}',
  'min': 'the lowest score of {}',
  'reverse': 'read {} backwards',
  'sort': 'line up {} in order',
}
_NAMES = ('Tom', 'Ann', 'Sue', 'Bob')


def operands(operation: str, count: int) -> Iterator[tuple[int, ...]]:
  """Every list of operands of an operation, in a fixed order."""
  if operation in ('add', 'sub'):
    for rest in itertools.product(range(1, 5), repeat=count - 1):
      least = sum(rest) if operation == 'sub' else 0
      yield from ((first, *rest) for first in range(least, 21))
  else:
    yield from itertools.permutations(range(10), count)


def question(
  surface: str, operation: str, numbers: Sequence[int], rng: random.Random
) -> str:
  """The text of a question; names are drawn from `rng`."""
  listed = ' '.join(map(str, numbers))
  if operation in _LIST_WORDS:
    return (
      f'{operation} {listed}'
      if surface == 'formula'
      else _LIST_WORDS[operation].format(listed)
    )
  if surface == 'formula':
    return {'add': ' + ', 'sub': ' - '}[operation].join(map(str, numbers))
  first, more = _WORDS[operation]
  return first.format(numbers[0], name=rng.choice(_NAMES)) + ''.join(
    more.format(n) for n in numbers[1:]
  )


def solution(operation: str, numbers: Sequence[int]) -> str:
  """The worked solution; what follows the last '=' is the answer."""
  sign = {'add': 1, 'sub': -1}.get(operation)
  if sign:
    rest = [numbers[0], *(sign * n for n in numbers[1:])]
    steps = list(itertools.accumulate(rest))[1:]
    return ' '.join(f'= {step}' for step in steps)
  result = {
    'max': lambda: [max(numbers)],
    'min': lambda: [min(numbers)],
    'reverse': lambda: numbers[::-1],
    'sort': lambda: sorted(numbers),
  }[operation]()
  return '= ' + ' '.join(map(str, result))


def is_heldout(numbers: Sequence[int], seed: int) -> bool:
  """Whether these operands, in any order, belong to the held-out split."""
  text = f'{seed}:{sorted(numbers)}'
  digest = hashlib.sha256(text.encode()).digest()
  return int.from_bytes(digest[:8], 'big') < HELDOUT_SHARE * 2**64


@dataclasses.dataclass
class ArithmeticConfig(tfds.core.BuilderConfig):
  """`seed` chooses the operands, the held-out ones and the names in words."""

  seed: int = 0


class Arithmetic(tfds.core.GeneratorBasedBuilder):
  """The TFDS builder."""

  VERSION = tfds.core.Version('1.0.0')
  BUILDER_CONFIGS = tuple(
    ArithmeticConfig(name=f'seed{seed}', seed=seed) for seed in range(SEEDS)
  )

  def _info(self) -> tfds.core.DatasetInfo:
    text = tfds.features.Text
    return tfds.core.DatasetInfo(
      builder=self,
      description=__doc__,
      features=tfds.features.FeaturesDict(
        {
          'id': text(doc='Unique over both splits.'),
          'question': text(),
          'solution': text(doc='Steps, the last of which is the answer.'),
          'answer': text(),
          'family': tfds.features.ClassLabel(names=FAMILIES),
          'difficulty': tfds.features.Scalar(dtype=np.int32),
        }
      ),
    )

  def _split_generators(self, dl_manager):
    del dl_manager
    return {
      'train': self._generate_examples(heldout=False),
      'heldout': self._generate_examples(heldout=True),
    }

  def _generate_examples(self, heldout: bool):
    seed = self.builder_config.seed
    for family, count in itertools.product(FAMILIES, DIFFICULTIES):
      surface, operation = family.split('/')
      every = list(operands(operation, count))
      if len(every) > MAX_EXAMPLES:
        every = random.Random(f'{seed}:{family}').sample(every, MAX_EXAMPLES)
      for numbers in every:
        if is_heldout(numbers, seed) != heldout:
          continue
        key = f'{family}/{"-".join(map(str, numbers))}'
        solved = solution(operation, numbers)
        yield (
          key,
          {
            'id': key,
            'question': question(
              surface, operation, numbers, random.Random(f'{seed}:{key}')
            ),
            'solution': solved,
            'answer': solved.rpartition('= ')[2],
            'family': family,
            'difficulty': count,
          },
        )


def prepare(data_dir: str, seed: int) -> Arithmetic:
  """The builder, its files written under `data_dir` if they are not there."""
  checks.require(
    0 <= seed < SEEDS, f'data.seed = {seed}; it must be in [0, {SEEDS})'
  )
  build = functools.partial(
    Arithmetic,
    config=f'seed{seed}',
    data_dir=data_dir,
    file_format='array_record',
  )
  tfds.disable_progress_bar()
  try:
    with contextlib.redirect_stdout(io.StringIO()):  # It announces a download.
      build().download_and_prepare()
  except OSError:
    # Another run that shares the cache may have been first.
    if not os.path.isdir(build().data_dir):
      raise
  return build()
