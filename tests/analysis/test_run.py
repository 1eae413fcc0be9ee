"""A work dir is read as far as it can be, and the rest is told."""

import dataclasses
import json

import pytest

from mrl_jax import checks
from mrl_jax.analysis import run as run_lib
from tests.analysis.report import workdirs

FILES = sorted(run_lib.FILES)


def change(folder, name, function):
  """Changes a line of a file, or the whole text."""
  path = folder / name
  path.write_text(function(path.read_text()))


def test_a_whole_run_has_no_problems(tmp_path):
  run = run_lib.read(workdirs.write(tmp_path))
  assert run.problems == []
  assert run.state == 'finished, 4 rounds'
  assert run.policies == ['gemma', 'llama']
  assert [row.round for row in run.rows['llama']] == [0, 1, 2, 3]
  assert run.settings.clip_high == 0.28
  assert run.plan.policies['gemma'].memory_bytes == 2**20
  assert run.evaluations['gemma'][1].overall == (0.75, 0.02)
  assert run.evaluations['gemma'][1].best[0].completion == '= 1 3'


def test_what_is_not_in_the_phases_of_the_rounds_is_the_start(tmp_path):
  run = run_lib.read(workdirs.write(tmp_path))
  assert run.phases() == {
    'start': 26 - 4 * 4, 'sampling': 4, 'updates': 10, 'other': 2,
  }  # fmt: skip
  change(tmp_path, 'metrics.jsonl', lambda t: ''.join(t.splitlines(True)[2:]))
  assert 'start' not in run_lib.read(tmp_path).phases()


def test_totals_are_the_same_with_and_without_a_summary(tmp_path):
  whole = run_lib.read(workdirs.write(tmp_path))
  (tmp_path / 'summary.json').unlink()
  summed = run_lib.read(tmp_path)
  assert summed.summary is None
  assert whole.fates()['gemma->llama']['rollout']['used'] == 28
  assert summed.fates() == whole.fates()
  assert summed.seconds == whole.seconds == 26
  pair = summed.residuals()['gemma->llama']
  assert pair.segmentation_error == 0.25
  assert {k: dataclasses.asdict(r) for k, r in summed.residuals().items()} == {
    k: dataclasses.asdict(r) for k, r in whole.residuals().items()
  }


def test_rescues_are_weighed_by_how_many_prompts_failed(tmp_path):
  workdirs.write(tmp_path, rounds=2)
  rows = [
    workdirs.row(0, 'llama', [], all_fail_groups=0.6, rescued_by={'gemma': 1}),
    workdirs.row(1, 'llama', [], all_fail_groups=0.2, rescued_by={'gemma': 0}),
    workdirs.row(1, 'gemma', [], all_fail_groups=0, rescued_by={'llama': 1}),
  ]
  (tmp_path / 'metrics.jsonl').write_text(workdirs.lines(rows))
  assert run_lib.read(tmp_path).rescues() == {
    ('gemma', 'llama'): pytest.approx(0.75)
  }


def test_refusals_are_of_the_exchange_and_of_lessons(tmp_path):
  workdirs.write(tmp_path, refused={'false_success': 2, 'incompatible': 0})
  told = {
    **workdirs.summary(('gemma', 'llama'), 4),
    'refusals': {'gemma->llama': {'logp': 5}},
    'messages_refused': {'token': 1},
  }
  (tmp_path / 'summary.json').write_text(json.dumps(told))
  assert run_lib.read(tmp_path).refusals() == {
    'gemma->llama': {'logp': 5},
    'messages': {'token': 1},
    'gemma, in its lessons': {'false_success': 8},
    'llama, in its lessons': {'false_success': 8},
  }


def replaced(old, new, line):
  def function(text):
    lines = text.splitlines(keepends=True)
    assert old in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new, 1)
    return ''.join(lines)

  return function


@pytest.mark.parametrize(
  ('old', 'new', 'problem'),
  [
    (
      '"reward": 0.5', '"reward": "high"',
      'metrics.jsonl, line 3 left out: Expected `float | null`, got `str` - at '
      '`$.reward`',
    ),
    (
      '"round": 1', '"round": 1?',
      "metrics.jsonl, line 3 left out: not JSON, Expecting ',' delimiter at "
      'character 12',
    ),
    (
      '"round": 1', f'"round": 1{"0" * 30}',
      'metrics.jsonl, line 3 left out: an integer of 31 digits',
    ),
    (
      '[1, 0', '[0',
      'metrics.jsonl, line 3 left out: 40 bins in place of 41',
    ),
    (
      '"round": 1', f'"deep": {"[" * 20_000}',
      'metrics.jsonl, line 3 left out: it is nested too deeply',
    ),
  ],
)  # fmt: skip
def test_a_damaged_line_is_told_and_costs_only_itself(
  tmp_path, old, new, problem
):
  workdirs.write(tmp_path)
  change(tmp_path, 'metrics.jsonl', replaced(old, new, 3))
  run = run_lib.read(tmp_path)
  assert [told.partition(' - at `$.own')[0] for told in run.problems] == [
    problem
  ]
  assert [row.round for row in run.rows['gemma']] == [0, 2, 3]
  assert [row.round for row in run.rows['llama']] == [0, 1, 2, 3]


def test_a_last_line_that_a_kill_cut_short_is_left_out(tmp_path):
  workdirs.write(tmp_path, rounds=3)
  change(tmp_path, 'metrics.jsonl', lambda text: text[:-20])
  run = run_lib.read(tmp_path)
  assert run.problems == ['metrics.jsonl, line 6 left out: it is cut']
  assert {name: len(rows) for name, rows in run.rows.items()} == {
    'gemma': 3, 'llama': 2,
  }  # fmt: skip
  assert run.state == 'after 3 of 4 rounds: it still runs, or was stopped'


def test_bytes_that_are_no_text_are_told(tmp_path):
  workdirs.write(tmp_path)
  path = tmp_path / 'metrics.jsonl'
  path.write_bytes(b'\xff\xfe\n' + path.read_bytes())
  run = run_lib.read(tmp_path)
  (problem,) = run.problems
  assert problem.startswith('metrics.jsonl, line 1 left out: ')
  assert len(run.rows['gemma']) == 4


def test_numbers_that_are_not_finite_are_told(tmp_path):
  workdirs.write(tmp_path, grad_norm=float('nan'))
  change(tmp_path, 'metrics.jsonl', lambda t: t.replace('NaN', '1', 2))
  run = run_lib.read(tmp_path)
  assert run.problems == [
    'metrics.jsonl, line 3: has numbers that are not finite, which are not '
    'shown; so have 5 more lines'
  ]
  assert len(run.rows['gemma']) == 4


@pytest.mark.parametrize('name', FILES)
def test_a_file_that_is_missing_is_told(tmp_path, name):
  workdirs.write(tmp_path)
  (tmp_path / name).unlink()
  run = run_lib.read(tmp_path)
  assert run.problems == [
    f'{name} is missing, and with it {run_lib.FILES[name]}'
  ]
  assert run.policies == ['gemma', 'llama']
  assert run.rounds == 4


@pytest.mark.parametrize('name', FILES)
@pytest.mark.parametrize('text', ['[1]\n', '{"a": 1\n', '"x"\n'])
def test_a_file_that_is_damaged_is_told(tmp_path, name, text):
  workdirs.write(tmp_path)
  (tmp_path / name).write_text(text)
  run = run_lib.read(tmp_path)
  (problem,) = run.problems
  assert problem.startswith(name)
  assert 'left out' in problem
  assert run.policies == ['gemma', 'llama']


def test_a_folder_in_place_of_a_file_is_told(tmp_path):
  workdirs.write(tmp_path)
  (tmp_path / 'plan.json').unlink()
  (tmp_path / 'plan.json').mkdir()
  (problem,) = run_lib.read(tmp_path).problems
  assert 'Is a directory' in problem


def test_a_summary_of_fewer_rounds_than_there_are_is_left_out(tmp_path):
  workdirs.write(tmp_path)
  told = json.dumps(workdirs.summary(('gemma', 'llama'), 2))
  (tmp_path / 'summary.json').write_text(told)
  run = run_lib.read(tmp_path)
  assert run.summary is None
  assert run.problems == [
    'summary.json left out: it is about 2 rounds, of which metrics.jsonl has 4'
  ]


def test_without_evaluations_other_files_tell_accuracies(tmp_path):
  workdirs.write(tmp_path, heldout_accuracy={'all': 0.4})
  (tmp_path / 'evaluations.jsonl').unlink()
  found = run_lib.read(tmp_path).evaluations['llama']
  assert [(one.rounds, one.overall) for one in found] == [
    (0, (0.25, None)), (1, (0.4, None)), (2, (0.4, None)), (3, (0.4, None)),
    (4, (0.4, None)),
  ]  # fmt: skip


def test_the_last_of_two_evaluations_counts(tmp_path):
  workdirs.write(tmp_path)
  again = workdirs.lines([workdirs.evaluation(4, 'llama', 0.9)])
  change(tmp_path, 'evaluations.jsonl', lambda text: text + again)
  found = run_lib.read(tmp_path).evaluations['llama']
  assert [one.overall[0] for one in found] == [0.25, 0.9]


@pytest.mark.parametrize(
  ('rounds', 'planned', 'state'),
  [
    (0, 4, 'before its first round of 4'),
    (2, 4, 'after 2 of 4 rounds: it still runs, or was stopped'),
    (4, 4, 'finished, 4 rounds'),
    (2, 'x', 'after 2 rounds: it still runs, or was stopped'),
  ],
)
def test_its_state_is_told(tmp_path, rounds, planned, state):
  workdirs.write(tmp_path, rounds=rounds, config={'train.rounds': planned})
  assert run_lib.read(tmp_path).state == state


def test_policies_that_train_elsewhere_have_names(tmp_path):
  workdirs.write(tmp_path, policies=('llama',), rescued_by={'a_peer': 1.0})
  run = run_lib.read(tmp_path)
  assert run.policies == ['llama']
  assert run.names == ['llama', 'a_peer']


def test_a_folder_without_a_run_is_refused(tmp_path):
  with pytest.raises(checks.InputError, match='nothing of a run in'):
    run_lib.read(tmp_path)
