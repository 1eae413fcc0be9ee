"""A reader of work dirs reads what it can, and names everything else."""

import dataclasses
import datetime

import pytest

from mrl_jax import checks
from mrl_jax import workdir
from mrl_jax.analysis import run as run_lib
from tests.analysis import workdirs

FILES = sorted(run_lib.FILES)


def read(folder, **changes):
  return run_lib.read(workdirs.write(folder, **changes))


def test_a_finished_run_is_read_without_problems(tmp_path):
  run = read(tmp_path)
  assert run.problems == []
  assert run.state == 'finished, 4 rounds'
  assert run.policies == ['gemma', 'llama']
  assert [row.round for row in run.rows['llama']] == [0, 1, 2, 3]
  assert run.rows['gemma'][3] == workdirs.row(3, 'gemma', ['llama'])
  assert run.settings.clip_high == 0.28
  assert run.plan.policies['gemma'] == workdirs.PLAN
  assert run.evaluations['llama'][0].best == [workdirs.COMPLETION]
  assert run.evaluations['gemma'][1].overall == (0.75, 0.02)
  age = datetime.datetime.now(datetime.UTC) - run.written
  assert abs(age.total_seconds()) < 600


def test_seconds_outside_the_phases_of_all_rounds_are_the_start(tmp_path):
  run = read(tmp_path)
  assert run.phases() == {
    'start': 26 - 4 * 4, 'sampling': 4, 'updates': 10, 'other': 2,
  }  # fmt: skip
  lines = (tmp_path / 'metrics.jsonl').read_text().splitlines(True)
  (tmp_path / 'metrics.jsonl').write_text(''.join(lines[2:]))
  assert 'start' not in run_lib.read(tmp_path).phases()


def test_the_seconds_of_a_round_are_the_median_of_those_known(tmp_path):
  times = [9.0, 1.0, None, 2.0]
  rows = [
    workdirs.row(r, 'llama', timing=workdir.Timing(seconds=seconds))
    for r, seconds in enumerate(times)
  ]
  assert read(tmp_path, rows=rows).round_seconds == 2


def test_totals_are_the_same_with_and_without_a_summary(tmp_path):
  timing = workdir.Timing(elapsed=26, waited={'llama': 0.25, 'gemma': 0.25})
  whole = read(tmp_path, timing=timing)
  (tmp_path / 'summary.json').unlink()
  summed = run_lib.read(tmp_path)
  assert summed.summary is None
  assert whole.fates()['gemma->llama']['rollout']['used'] == 28
  assert summed.fates() == whole.fates()
  assert summed.seconds == whole.seconds == 26
  assert summed.totals.timing.waited['gemma->llama'] == 1
  assert whole.totals.timing.waited == {}
  assert summed.totals.residuals['gemma->llama'].segmentation_error == 0.25
  assert [*map(dataclasses.asdict, summed.totals.residuals.values())] == [
    *map(dataclasses.asdict, whole.totals.residuals.values())
  ]


def test_rescues_are_weighted_by_the_number_of_failed_prompts(tmp_path):
  run = read(
    tmp_path,
    rounds=2,
    rows=[
      workdirs.row(0, 'llama', all_fail_groups=0.6, rescued_by={'gemma': 1}),
      workdirs.row(1, 'llama', all_fail_groups=0.2, rescued_by={'gemma': 0}),
      workdirs.row(1, 'gemma', all_fail_groups=0, rescued_by={'llama': 1}),
    ],
  )
  assert run.rescues() == {('gemma', 'llama'): pytest.approx(0.75)}


def test_refusals_are_of_the_exchange_training_rows_and_answers(tmp_path):
  workdirs.write(
    tmp_path,
    refused={'false_success': 2, 'incompatible': 0},
    verified={'correct': 3, 'timeout': 1},
  )
  summary = workdirs.summary(
    dict.fromkeys(workdirs.POLICIES, 0.5),
    4,
    refusals={'gemma->llama': {'logp': 5}},
    messages_refused={'token': 1},
  )
  workdir.write(tmp_path, workdir.SUMMARY, summary)
  assert run_lib.read(tmp_path).refusals() == {
    'gemma->llama': {'logp': 5},
    'messages': {'token': 1},
    'training rows of gemma': {'false_success': 8},
    'training rows of llama': {'false_success': 8},
    'answers of gemma': {'timeout': 4},
    'answers of llama': {'timeout': 4},
  }


@pytest.mark.parametrize(
  ('old', 'new', 'problem'),
  [
    ('"reward": 0.5', '"reward": "high"', 'Expected `float | null`, got `str`'),
    (
      '"round": 1', '"round": 1?',
      "it is not JSON: Expecting ',' delimiter at character 12",
    ),
    ('"round": 1', f'"round": 1{"0" * 30}', 'it has an integer of 31 digits'),
    ('[1, 0', '[0', '40 bins in place of 41'),
    ('"round": 1', f'"deep": {"[" * 20_000}', 'it is nested too deeply'),
  ],
)  # fmt: skip
def test_a_damaged_line_costs_only_itself(tmp_path, old, new, problem):
  workdirs.write(tmp_path)
  path = tmp_path / 'metrics.jsonl'
  lines = path.read_text().splitlines(True)
  assert old in lines[2]
  lines[2] = lines[2].replace(old, new, 1)
  path.write_text(''.join(lines))
  run = run_lib.read(tmp_path)
  (found,) = run.problems
  assert found.startswith(f'metrics.jsonl, line 3 left out: {problem}')
  assert [row.round for row in run.rows['gemma']] == [0, 2, 3]
  assert [row.round for row in run.rows['llama']] == [0, 1, 2, 3]


def test_a_last_line_that_a_kill_cut_short_is_left_out(tmp_path):
  workdirs.write(tmp_path, rounds=3)
  path = tmp_path / 'metrics.jsonl'
  path.write_text(path.read_text()[:-20])
  run = run_lib.read(tmp_path)
  assert run.problems == ['metrics.jsonl, line 6 left out: its end is missing']
  assert [len(rows) for rows in run.rows.values()] == [3, 2]
  assert run.state == 'after 3 of 4 rounds: still running, or stopped'


def test_bytes_that_are_not_text_are_named(tmp_path):
  workdirs.write(tmp_path)
  path = tmp_path / 'metrics.jsonl'
  path.write_bytes(b'\xff\xfe\n' + path.read_bytes())
  run = run_lib.read(tmp_path)
  (problem,) = run.problems
  assert problem.startswith('metrics.jsonl, line 1 left out: ')
  assert len(run.rows['gemma']) == 4


def test_numbers_that_are_not_finite_are_named(tmp_path):
  workdirs.write(tmp_path, grad_norm=float('nan'))
  workdirs.change(tmp_path, 'metrics.jsonl', 'NaN', '1')
  run = run_lib.read(tmp_path)
  assert run.problems == [
    'metrics.jsonl, line 2: numbers that are not finite are not shown; the '
    'same in 6 more lines'
  ]
  assert len(run.rows['gemma']) == 4


@pytest.mark.parametrize('name', FILES)
def test_a_missing_or_damaged_file_is_named_and_the_others_are_read(
  tmp_path, name
):
  workdirs.write(tmp_path)
  path = tmp_path / name
  path.unlink()
  run = run_lib.read(tmp_path)
  assert run.problems == [f'{name} is missing: {run_lib.FILES[name]}']
  assert run.rounds == 4
  assert run.policies == ['gemma', 'llama']
  path.mkdir()
  assert 'Is a directory' in run_lib.read(tmp_path).problems[0]
  path.rmdir()
  for text in ('[1]\n', '{"a": 1\n', '"x"\n'):
    path.write_text(text)
    run = run_lib.read(tmp_path)
    (problem,) = run.problems
    assert problem.startswith(name)
    assert 'left out' in problem
    assert run.policies == ['gemma', 'llama']


def test_a_config_of_another_version_is_named(tmp_path):
  workdirs.write(tmp_path)
  (tmp_path / 'config.json').write_text('{"method.name": "prp", "seed": 0}')
  run = run_lib.read(tmp_path)
  assert run.problems == [
    'config.json left out: another version of mrl_jax wrote it, in a format '
    'that this one cannot read'
  ]
  assert run.config == {}
  assert run.state == 'finished, 4 rounds'


def test_a_summary_of_fewer_rounds_than_are_written_is_left_out(tmp_path):
  workdirs.write(tmp_path)
  workdirs.change(tmp_path, 'summary.json', '"rounds": 4', '"rounds": 2')
  run = run_lib.read(tmp_path)
  assert run.summary is None
  assert run.problems == [
    'summary.json left out: it is about 2 rounds, but metrics.jsonl has 4'
  ]


def test_the_last_of_two_evaluations_counts(tmp_path):
  workdirs.write(tmp_path)
  with open(tmp_path / 'evaluations.jsonl', 'a') as f:
    f.write(workdirs.lines([workdirs.evaluation(4, 'llama', 0.9)]))
  evaluations = run_lib.read(tmp_path).evaluations['llama']
  assert [e.overall[0] for e in evaluations] == [0.25, 0.9]


@pytest.mark.parametrize(
  ('rounds', 'planned', 'state'),
  [
    (0, 4, 'before its first round of 4'),
    (2, 4, 'after 2 of 4 rounds: still running, or stopped'),
    (2, 'x', 'after 2 rounds: still running, or stopped'),
  ],
)
def test_the_state_tells_the_progress(tmp_path, rounds, planned, state):
  run = read(tmp_path, rounds=rounds, config={'train.rounds': planned})
  assert run.state == state


def test_policies_of_other_processes_have_names(tmp_path):
  method = {'capability': {'another': 1.0}, 'admitted': 0.5}
  run = read(
    tmp_path, policies=('llama',), rescued_by={'a_peer': 1.0}, method=method
  )
  assert run.policies == ['llama']
  assert run.names == ['llama', 'a_peer', 'another']


def test_a_folder_without_a_run_is_refused(tmp_path):
  with pytest.raises(checks.InputError, match='no run in'):
    run_lib.read(tmp_path)
