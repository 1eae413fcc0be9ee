import random

import pytest

from mrl_jax.data import arithmetic
from mrl_jax.rewards import verify


@pytest.fixture(scope='module')
def splits(tmp_path_factory):
  builder = arithmetic.prepare(str(tmp_path_factory.mktemp('tfds')), seed=0)
  return {
    split: list(builder.as_data_source(split)) for split in ('train', 'heldout')
  }


def numbers(row):
  return row['id'].decode().rpartition('/')[2].split('-')


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


def test_word_problems_name_someone_and_all_numbers():
  text = arithmetic.question('words', 'sub', (9, 3, 2), random.Random(0))
  assert text.partition(' ')[2] == 'had 9, lost 3, lost 2'


def test_splits_share_no_operands_in_any_order(splits):
  train, heldout = (
    {tuple(sorted(numbers(row))) for row in splits[split]}
    for split in ('train', 'heldout')
  )
  assert train
  assert heldout
  assert not train & heldout


def test_every_family_and_difficulty_is_in_both_splits(splits):
  kinds = len(arithmetic.FAMILIES) * len(arithmetic.DIFFICULTIES)
  for rows in splits.values():
    assert len({(row['family'], row['difficulty']) for row in rows}) == kinds
    assert len({row['id'] for row in rows}) == len(rows)


def test_the_verifier_accepts_every_solution(splits):
  for row in splits['heldout']:
    solution, answer = row['solution'].decode(), row['answer'].decode()
    assert verify.verify(solution, answer, '=') == 'correct'


def test_the_seed_chooses_what_is_held_out():
  chosen = [
    {n for n in range(100) if arithmetic.is_heldout((n, 1, 2), seed)}
    for seed in (0, 1)
  ]
  assert chosen[0] != chosen[1]
  assert 5 < len(chosen[0]) < 40


def test_what_there_is_too_much_of_is_drawn_from_all_of_it(splits):
  drawn = [
    tuple(map(int, numbers(row)))
    for row in splits['train']
    if row['family'] == arithmetic.FAMILIES.index('formula/add')
    and row['difficulty'] == 4
  ]
  first, *rest = map(set, zip(*drawn, strict=True))
  assert first == set(range(21))
  assert rest == [{1, 2, 3, 4}] * 3


def test_nothing_is_below_zero(splits):
  for rows in splits.values():
    assert not [row for row in rows if b'-' in row['solution']]


@pytest.mark.parametrize('first', [True, False])
def test_another_run_may_be_first_to_write_the_data(
  first, tmp_path, monkeypatch
):
  write = arithmetic.Arithmetic.download_and_prepare

  def too_late(builder):
    if first:
      write(builder)
    raise FileExistsError('it is there already')

  monkeypatch.setattr(arithmetic.Arithmetic, 'download_and_prepare', too_late)
  if first:
    builder = arithmetic.prepare(str(tmp_path), seed=0)
    assert len(builder.as_data_source('heldout')) > 0
  else:
    with pytest.raises(FileExistsError):
      arithmetic.prepare(str(tmp_path), seed=0)
