"""`arithmetic`: a generated dataset of small sums and lists.

Six operations, each with two surfaces, as a formula and in words, and a worked
solution whose last step is the answer:

  formula/sub   '9 - 3 - 2'                  '= 6 = 4'
  words/sub     'Ann had 9, lost 3, lost 2'  '= 6 = 4'
  formula/sort  'sort 4 9 3'                 '= 3 4 9'
  words/sort    'line up 4 9 3 in order'     '= 3 4 9'

A family is a surface and an operation. The difficulty is the number of operands.
Splits do not share operands: the split of a set of operands does not depend on
their order or on the family.
"""

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import functools
import hashlib
import io
import itertools
import operator
import os
import random

import numpy as np
import tensorflow_datasets as tfds

from mrl_jax import checks

# How to compute a sum, and the text before operands: in a formula, and in words
# before the first operand and before all others.
_SUMS = {
  'add': (operator.add, ' + ', ' has ', ', gets '),
  'sub': (operator.sub, ' - ', ' had ', ', lost '),
}
# How to compute the answer to a list, and the question in words.
_LISTS = {
  'max': (lambda numbers: [max(numbers)], 'the top score of {}'),
  'min': (lambda numbers: [min(numbers)], 'the lowest score of {}'),
  'reverse': (lambda numbers: numbers[::-1], 'read {} backwards'),
  'sort': (sorted, 'line up {} in order'),
}
_NAMES = ('Tom', 'Ann', 'Sue', 'Bob')
OPERATIONS = (*_SUMS, *_LISTS)
SURFACES = ('formula', 'words')
FAMILIES = tuple(f'{s}/{o}' for s in SURFACES for o in OPERATIONS)
DIFFICULTIES = (3, 4)
HELDOUT_SHARE = 0.2
MAX_EXAMPLES = 800  # Per family and difficulty, over both splits.
SEEDS = 100  # Every seed is a config of the builder.


def operands(operation: str, count: int) -> Iterator[tuple[int, ...]]:
  """All lists of operands of an operation, in a fixed order."""
  if operation in _LISTS:
    yield from itertools.permutations(range(10), count)
  else:
    for rest in itertools.product(range(1, 5), repeat=count - 1):
      least = sum(rest) if operation == 'sub' else 0
      yield from ((first, *rest) for first in range(least, 21))


def question(
  surface: str, operation: str, numbers: Sequence[int], rng: random.Random
) -> str:
  """The text of a question; names are drawn from `rng`."""
  operands = [str(n) for n in numbers]
  if operation in _LISTS:
    _, words = _LISTS[operation]
    text = words if surface == 'words' else f'{operation} {{}}'
    return text.format(' '.join(operands))
  _, sign, first, more = _SUMS[operation]
  if surface == 'formula':
    return sign.join(operands)
  return rng.choice(_NAMES) + first + more.join(operands)


def solution(operation: str, numbers: Sequence[int]) -> str:
  """The worked solution; the answer follows the last '='."""
  if operation in _LISTS:
    answer, _ = _LISTS[operation]
    return '= ' + ' '.join(map(str, answer(numbers)))
  results = itertools.accumulate(numbers, _SUMS[operation][0])
  return ' '.join(f'= {n}' for n in itertools.islice(results, 1, None))


def is_heldout(numbers: Sequence[int], seed: int) -> bool:
  """Whether these operands, in any order, belong to the held-out split."""
  text = f'{seed}:{sorted(numbers)}'
  digest = hashlib.sha256(text.encode()).digest()
  return int.from_bytes(digest[:8], 'big') < HELDOUT_SHARE * 2**64


@dataclasses.dataclass
class ArithmeticConfig(tfds.core.BuilderConfig):
  """`seed` decides which operands are drawn and held out, and the names."""

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
        if is_heldout(numbers, seed) == heldout:
          key = f'{family}/{"-".join(map(str, numbers))}'
          names = random.Random(f'{seed}:{key}')
          solved = solution(operation, numbers)
          row = {
            'id': key,
            'question': question(surface, operation, numbers, names),
            'solution': solved,
            'answer': solved.rpartition('= ')[2],
            'family': family,
            'difficulty': count,
          }
          yield key, row


def prepare(data_dir: str, seed: int) -> Arithmetic:
  """The builder; generates its files under `data_dir` if they are missing."""
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
