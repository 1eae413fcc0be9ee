import contextlib
import json
import os
import pathlib

import pytest

from mrl_jax.rewards import gold
from mrl_jax.rewards import mathematics
from mrl_jax.rewards import verify


@pytest.fixture(params=['exact', 'math'])
def verifier(request):
  made = {
    'exact': verify.Exact('####'),
    'math': mathematics.Mathematics('####', 1.0),
  }[request.param]
  with contextlib.closing(made):
    yield made


def test_faults_of_gold_answers(verifier):
  sound = (
    *('72', '3 4 9', 'thus\nso\n#### 72', '9 (apples)', 'Mrs. Hilt', '3:4'),
    *(r'\frac{1}{2}', '$x', r'\text{no real solution}', '(1,2)'),
  )
  faults = {
    'so it is ####': 'no answer is in it',
    '72>>72 clips.\n72': 'the answer in it has several lines',
    'https://example.org/1': 'the answer in it is an address',
    'Natalia sold clips to ' * 4: 'the answer in it has 16 words',
  }
  assert gold.faults(verifier, [*sound, *faults]) == faults


def test_faults_of_boxes_and_braces():
  with contextlib.closing(mathematics.Mathematics('####', 1.0)) as verifier:
    matrix = '\\begin{pmatrix}\n1 & 2\n\\end{pmatrix}'
    box = 'so\nit is\n' + r'\boxed{72}'
    answers = [matrix, box, r'\frac{1}{2', '9' * 2000]
    assert gold.faults(verifier, answers) == {
      r'\frac{1}{2': 'against itself, it is unparsable'
    }


@pytest.mark.parametrize(
  ('file', 'right', 'wrong'),
  [
    ('asdiv', 'answer', 'body'),
    ('amc23', 'answer', 'problem'),
    ('gsm8k_test', 'answer', 'question'),
  ],
)
def test_real_data_sets_are_sound_and_their_problems_are_not(
  file, right, wrong, verifier
):
  folder = os.environ.get('MRL_TEST_DATA')
  if folder is None:
    pytest.skip('MRL_TEST_DATA does not name a folder of real data')
  path = pathlib.Path(folder) / 'math' / f'{file}.jsonl'
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  assert not gold.faults(verifier, [str(row[right]) for row in rows])
  texts = {row[wrong] for row in rows}
  assert len(gold.faults(verifier, texts)) > 0.5 * len(texts)
