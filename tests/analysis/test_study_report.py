"""Tables, notes and files of a study."""

import io
import itertools
import json

import pytest
from rich import console as console_lib

from mrl_jax.analysis import study
from mrl_jax.analysis import study_report
from tests.analysis import workdirs


def write(out, arms, seeds=(0,), **of_row):
  """Arms gain an eighth each, and seeds a sixteenth."""
  for (i, arm), seed in itertools.product(enumerate(arms), seeds):
    after = 0.25 + i / 8 + seed / 16
    workdirs.write(
      out / arm / f'seed-{seed}', after={'a': after, 'b': after},
      config={'method.name': arm, 'seed': seed}, **of_row,
    )  # fmt: skip
  found = study.read(str(out), arms, seeds)
  return found, study.compare(found.runs, 'grpo')


def test_a_study_has_tables_notes_numbers_and_figures(tmp_path):
  found, _ = write(tmp_path, ['grpo', 'prp'], [0, 1])
  missing = study.Study(runs=found.runs, missing={('sgt', 0): 'not started'})
  console = console_lib.Console(file=io.StringIO(), width=120, markup=False)
  study_report.write(str(tmp_path), missing, 'grpo', console)
  text = console.file.getvalue()
  line = next(n for n in text.splitlines() if n.startswith('│ prp'))
  assert [cell.strip() for cell in line.split('│')[1:-1]] == [
    'prp', '2', '25.0', '40.6 ± 3.1', '+12.5 ± 0.0', '-',
  ]  # fmt: skip
  assert 'MISSING: sgt, seed 0: not started' in text
  values = json.loads((tmp_path / 'study.json').read_text())
  assert values['arms']['prp']['difference']['ratio'] is None
  assert values['runs']['prp']['0']['accuracy_R'] == [0.25] * 4
  assert values['missing'] == [{'arm': 'sgt', 'seed': 0, 'why': 'not started'}]
  assert '| prp | 2 |' in (tmp_path / 'study.md').read_text()
  for name in ('curves.png', 'stability_support.png'):
    assert (tmp_path / name).read_bytes().startswith(b'\x89PNG')


def test_a_study_without_complete_runs_has_no_figures(tmp_path):
  missing = study.Study(runs={'grpo': {}}, missing={('grpo', 0): 'failed'})
  console = console_lib.Console(file=io.StringIO(), markup=False)
  study_report.write(str(tmp_path), missing, 'grpo', console)
  assert 'MISSING: the baseline grpo' in console.file.getvalue()
  assert {p.name for p in tmp_path.iterdir()} == {'study.json', 'study.md'}


def test_one_seed_has_no_error_in_any_table(tmp_path):
  _, compared = write(tmp_path, ['grpo', 'a'])
  first, *_ = study_report.tables(compared, 'grpo')
  assert first.rows == [
    ('grpo', '1', '25.0', '25.0 ± -', 'baseline', '-'),
    ('a', '1', '25.0', '37.5 ± -', '+12.5 ± -', '-'),
  ]


def test_unequal_rollouts_are_marked_everywhere(tmp_path):
  write(tmp_path, ['grpo', 'a'])
  write(tmp_path, ['a'], rollouts=20)
  found = study.read(str(tmp_path), ['grpo', 'a'], [0])
  compared = study.compare(found.runs, 'grpo')
  shown = study_report.tables(compared, 'grpo')
  assert all([row[0] for row in t.rows] == ['grpo', 'a *'] for t in shown)
  assert shown[-1].rows[1][1:3] == ('160', '+25.0%')
  assert (
    '* NOT AT EQUAL ROLLOUTS: a samples 160 in a run, +25.0% against grpo.'
  ) in study_report.notes(found, compared, 'grpo')


@pytest.mark.parametrize(('count', 'more'), [(1, ''), (10, ', 2 more')])
def test_changes_of_a_config_are_listed(tmp_path, count, more):
  write(tmp_path, ['grpo', 'a'])
  config = {f'key{i}': i for i in range(count)}
  workdirs.write(
    tmp_path / 'a' / 'seed-0', after={'a': 0.5, 'b': 0.5},
    config={'method.name': 'grpo', 'seed': 0, **config},
  )  # fmt: skip
  found = study.read(str(tmp_path), ['grpo', 'a'], [0])
  compared = study.compare(found.runs, 'grpo')
  (line,) = [
    line
    for line in study_report.notes(found, compared, 'grpo')
    if line.startswith('a is grpo with key0=0')
  ]
  assert more in line


def test_markdown_has_every_cell_and_every_note():
  table = study_report.Table('Title', ('arm', 'n'), [('a *', '1')])
  assert study_report.markdown([table], ['* of a_b']).splitlines() == [
    '**Title**', '', '| arm | n |', '| --- | ---: |', '| a * | 1 |', '',
    r'- \* of a\_b',
  ]  # fmt: skip
