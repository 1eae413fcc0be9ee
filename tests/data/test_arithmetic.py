import random
import shutil

import pytest

from mrl_jax.data import arithmetic
from mrl_jax.rewards import verify


@pytest.fixture(scope='module')
def builder(tmp_path_factory):
  return arithmetic.prepare(str(tmp_path_factory.mktemp('tfds')), seed=0)


@pytest.fixture(scope='module')
def splits(builder):
  """The generated rows of both splits, by their ids."""
  return {
    split: dict(builder._generate_examples(heldout=split == 'heldout'))
    for split in ('train', 'heldout')
  }


def numbers(row):
  return row['id'].rpartition('/')[2].split('-')


@pytest.mark.parametrize(
  ('operation', 'operands', 'expected'),
  [
    ('add', (4, 6, 3), '= 10 = 13'),
    ('sub', (9, 3, 2), '= 6 = 4'),
    ('max', (4, 9, 3), '= 9'),
    ('min', (4, 9, 3), '= 3'),
    ('reverse', (4, 9, 3), '= 3 9 4'),
    ('sort', (4, 9, 3), '= 3 4 9'),
  ],
)
def test_solutions(operation, operands, expected):
  assert arithmetic.solution(operation, operands) == expected


@pytest.mark.parametrize(
  ('surface', 'operation', 'expected'),
  [
    ('formula', 'add', '9 + 3 + 2'),
    ('formula', 'sub', '9 - 3 - 2'),
    ('formula', 'sort', 'sort 9 3 2'),
    ('words', 'sort', 'line up 9 3 2 in order'),
  ],
)
def test_questions(surface, operation, expected):
  rng = random.Random(0)
  assert arithmetic.question(surface, operation, (9, 3, 2), rng) == expected


def test_word_problems_have_a_name_and_all_numbers():
  text = arithmetic.question('words', 'sub', (9, 3, 2), random.Random(0))
  assert text.partition(' ')[2] == 'had 9, lost 3, lost 2'


def test_the_files_have_the_generated_rows(builder, splits):
  assert len(builder.as_data_source('train')) == len(splits['train'])
  rows = list(builder.as_data_source('heldout'))
  assert len(rows) == len(splits['heldout'])
  for row in rows:
    generated = splits['heldout'][row['id'].decode()]
    assert arithmetic.FAMILIES[row['family']] == generated['family']
    assert row['difficulty'] == generated['difficulty']
    for text in ('question', 'solution', 'answer'):
      assert row[text].decode() == generated[text]


def test_splits_share_no_operands_in_any_order(splits):
  train, heldout = (
    {tuple(sorted(numbers(row))) for row in splits[split].values()}
    for split in ('train', 'heldout')
  )
  assert train
  assert heldout
  assert not train & heldout


def test_every_family_and_difficulty_is_in_both_splits(splits):
  kinds = len(arithmetic.FAMILIES) * len(arithmetic.DIFFICULTIES)
  for rows in splits.values():
    found = {(row['family'], row['difficulty']) for row in rows.values()}
    assert len(found) == kinds


def test_the_verifier_accepts_every_solution(splits):
  for row in splits['heldout'].values():
    assert verify.verify(row['solution'], row['answer'], '=') == 'correct'


def test_the_seed_decides_which_operands_are_held_out():
  first, second = (
    {n for n in range(100) if arithmetic.is_heldout((n, 1, 2), seed)}
    for seed in (0, 1)
  )
  assert first != second
  assert 5 < len(first) < 40


def test_a_sample_of_a_large_family_is_drawn_from_all_its_operands(splits):
  drawn = [
    map(int, numbers(row))
    for row in splits['train'].values()
    if row['family'] == 'formula/add' and row['difficulty'] == 4
  ]
  first, *rest = map(set, zip(*drawn, strict=True))
  assert first == set(range(21))
  assert rest == [{1, 2, 3, 4}] * 3


def test_no_number_is_below_zero(splits):
  for rows in splits.values():
    assert not [row for row in rows.values() if '-' in row['solution']]


@pytest.mark.parametrize('exists', [True, False])
def test_another_run_may_be_first_to_write_the_files(
  exists, builder, tmp_path, monkeypatch
):
  def too_late(late_builder):
    if exists:
      shutil.copytree(builder.data_dir, late_builder.data_dir)
    raise FileExistsError('another run has written it')

  monkeypatch.setattr(arithmetic.Arithmetic, 'download_and_prepare', too_late)
  if exists:
    again = arithmetic.prepare(str(tmp_path), seed=0)
    assert len(again.as_data_source('heldout')) > 0
  else:
    with pytest.raises(FileExistsError):
      arithmetic.prepare(str(tmp_path), seed=0)
