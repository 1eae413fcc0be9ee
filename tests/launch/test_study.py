"""A study as a user asks for it: flags, runs and resumption."""

import fcntl
import io
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

from absl.testing import flagsaver
import pytest
from rich import console as console_lib

from launch import study as command
from mrl_jax import checks
from mrl_jax.analysis import study
from tests.analysis import workdirs

ROOT = pathlib.Path(__file__).parents[2]
SMALL = (
  '--config.train.rounds=2',
  '--config.train.prompts=8',
  '--config.train.samples=4',
  '--config.warm_start.steps=10',
  '--config.eval.prompts=8',
  '--config.eval.samples=2',
  '--config.eval.batch=8',
)


def start(*flags):
  script = os.fspath(ROOT / 'launch' / 'study.py')
  return subprocess.Popen(
    [sys.executable, script, *map(str, flags)],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    encoding='utf-8',
  )


def conduct(*flags, console):
  """Does what the command does, without a process."""
  with flagsaver.flagsaver():
    _, *rest = command.parse(['study.py', *map(str, flags)])
    return command.conduct(rest, console)


@pytest.fixture
def console():
  return console_lib.Console(
    file=io.StringIO(), width=120, markup=False, highlight=False
  )


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (['--methods=grp'], "Did you mean 'grpo'"),
    (['--methods=grpo,grpo'], 'arm grpo is given twice'),
    (['--methods=grpo', '--baseline=prp'], "unknown arm for --baseline 'prp'"),
    (['--methods=grpo', '--seeds=0,x'], "'x' is not a whole number"),
    (['--methods=grpo', '--seeds=1,1'], 'seed 1 is given twice'),
    (['--methods=grpo', '--config.train.round=3'], 'Did you mean "rounds"'),
    (['--methods=grpo', '--config.train.rounds=x'], 'invalid literal for int'),
    (['--methods=grpo', '--config.train.rounds=0'], 'at least 1'),
    (['--methods=grpo', '--config.reward.verifier=x'], 'unknown reward.verif'),
    (['--methods=grpo', '--config.train.rounds', '3'], "not a flag: '3'"),
    (['--methods=grpo', '--config.train.rounds'], 'write it without spaces'),
    (['--methods=grpo', '--config.seed=3'], 'set seeds with --seeds'),
    (['--methods=grpo', 'prp'], "not a flag: 'prp'"),
    (['--arm=grpo train.rounds=3'], 'is not LABEL=FILE KEY=VALUE'),
    (['--arm="a=grpo'], 'No closing quotation'),
    (['--arm=../a=grpo'], "'../a' cannot be the label"),
    (['--arm=cache=grpo'], "'cache' cannot be the label"),
    (['--arm=short=grpo train.rouns=3'], 'Did you mean "rounds"'),
    ([], 'name what to compare'),
    (['--report'], 'looked for ARM/seed-N'),
    (['--out=', '--methods=grpo'], 'name the folder of the study with --out'),
  ],
)  # fmt: skip
def test_a_mistake_is_reported_before_anything_runs(
  tmp_path, console, flags, message
):
  out = tmp_path / 'out'
  with pytest.raises(checks.InputError, match=re.escape(message)):
    conduct(f'--out={out}', *flags, console=console)
  assert not out.exists()


def config(label, arms, seed):
  return command.config(label, [*arms[label], f'--config.seed={seed}'])


def test_an_arm_is_a_file_with_changes(tmp_path):
  arms = command.arms(
    ['grpo'],
    ["mine=prp train.rounds=9 policies.llama.template='{prompt} = '"],
    ['--config.train.rounds=7', '-config.thl.max_tokens=5'],
    tmp_path,
  )
  assert config('grpo', arms, 3)['train.rounds'] == 7
  of_mine = config('mine', arms, 3)
  assert of_mine['method.name'] == 'prp'
  assert of_mine['train.rounds'] == 9
  assert of_mine['thl.max_tokens'] == 5
  assert of_mine['policies.llama.template'] == '{prompt} = '
  assert of_mine['seed'] == 3
  assert of_mine['cache_dir'] == os.fspath(tmp_path / 'cache')


def test_complete_runs_are_not_made_again(tmp_path):
  arms = command.arms(
    ['grpo', 'prp'], [], ['--config.train.rounds=2'], tmp_path
  )
  for arm, seed in itertools.product(arms, (0, 1)):
    folder = tmp_path / arm / f'seed-{seed}'
    workdirs.write(folder, rounds=2, config=config(arm, arms, seed))
  (tmp_path / 'prp' / 'seed-0' / 'summary.json').unlink()

  def todo(arms, seeds):
    jobs = command.jobs(arms, seeds, tmp_path)
    return [(job.arm, job.seed) for job in jobs]

  assert todo(arms, [0, 1]) == [('prp', 0)]
  # Seed by seed, so that a part of a study compares all arms.
  assert todo(arms, [2, 3]) == [
    ('grpo', 2), ('prp', 2), ('grpo', 3), ('prp', 3)
  ]  # fmt: skip
  for flags in (['train.rounds=3'], ['train.rounds=2', 'train.prompts=64']):
    overrides = [f'--config.{flag}' for flag in flags]
    other = command.arms(['grpo'], [], overrides, tmp_path)
    assert todo(other, [0]) == [('grpo', 0)]


# Makes its warm starts, then trains; prints when it did what. A seed over 9
# fails. The run is copied from a template.
FAKE = """
import os, shutil, sys, time
folder, seed, template = sys.argv[1:]
print('cold', time.time(), flush=True)
time.sleep(0.1)
if int(seed) > 9:
  sys.exit('\\n'.join(f'line {n}' for n in range(99)))
os.makedirs(folder)
open(folder + '/metrics.jsonl', 'w').close()
print('warm', time.time(), flush=True)
time.sleep(0.2)
shutil.copytree(template, folder, dirs_exist_ok=True)
print('done', time.time(), flush=True)
"""


@pytest.fixture
def fake_job(tmp_path, monkeypatch):
  """Makes jobs whose run is a fake."""
  monkeypatch.setattr(command, '_POLL_S', 0.02)
  template = workdirs.write(tmp_path / 'template', after={'a': 0.75})

  def make(arm, seed, script=FAKE):
    folder = os.fspath(tmp_path / arm / f'seed-{seed}')
    words = (sys.executable, '-S', '-c', script, folder, str(seed), template)
    return command.Job(arm, seed, folder, words)

  return make


def times(job):
  lines = pathlib.Path(job.log).read_text().split()
  return dict(zip(lines[::2], map(float, lines[1::2]), strict=True))


def overlap(one, other):
  return one[0] < other[1] and other[0] < one[1]


def test_runs_share_the_warm_starts_of_their_seed(tmp_path, console, fake_job):
  jobs = [fake_job(arm, seed) for seed in (0, 1) for arm in 'abc']
  assert command.run(jobs, 3, console) == {}
  text = console.file.getvalue()
  for job in jobs:
    assert f'{job.arm}, seed {job.seed}: 25.0% → 75.0%, 26 s' in text
  assert '5 to go, about 0 min' in text
  assert study.read(os.fspath(tmp_path), 'abc', [0, 1]).missing == {}
  spans = {job: times(job) for job in jobs}
  for one, other in itertools.combinations(jobs, 2):
    cold = [(spans[job]['cold'], spans[job]['warm']) for job in (one, other)]
    assert one.seed != other.seed or not overlap(*cold)
  starts = sorted(span['cold'] for span in spans.values())
  ends = sorted(span['done'] for span in spans.values())
  assert starts[1] < ends[0]  # At least two at a time,
  assert all(starts[i + 3] > ends[i] for i in range(3))  # and never four.


def test_a_run_that_fails_is_named_and_the_others_continue(console, fake_job):
  jobs = [fake_job('a', 10), fake_job('a', 1), fake_job('b', 0, 'print(1)')]
  failed = command.run(jobs, 1, console)
  assert failed == {
    ('a', 10): f'failed: exit status 1; see {jobs[0].log}',
    ('b', 0): f'failed: not started; see {jobs[2].log}',
  }
  text = console.file.getvalue()
  assert f'a, seed 10 failed: exit status 1. The end of {jobs[0].log}:' in text
  assert 'line 78\n' not in text
  assert 'line 79\n' in text
  assert 'line 98\n' in text
  assert 'a, seed 1: 25.0% → 75.0%' in text


def test_no_two_processes_make_the_same_run(console, fake_job):
  job = fake_job('a', 0)
  os.makedirs(os.path.dirname(job.log))
  with open(job.log, 'a') as log:
    log.write('of another')
    log.flush()
    fcntl.flock(log, fcntl.LOCK_EX)
    failed = command.run([job, fake_job('b', 0)], 1, console)
    assert failed == {('a', 0): 'another process makes this run'}
  assert pathlib.Path(job.log).read_text() == 'of another'


@pytest.mark.parametrize(
  'number',
  [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)],
)
def test_an_interrupt_stops_the_runs_and_says_how_to_resume(tmp_path, number):
  process = start(f'--out={tmp_path}', '--methods=grpo', '--seeds=0', *SMALL)
  path = tmp_path / 'grpo' / 'seed-0.log'
  deadline = time.monotonic() + 60
  while not path.exists():
    assert process.poll() is None, process.stderr.read()
    assert time.monotonic() < deadline
    time.sleep(0.05)
  time.sleep(0.3)  # The log exists a moment before the run.
  process.send_signal(number)
  _, error = process.communicate(timeout=60)
  assert process.returncode != 0
  assert 'The same command resumes the study' in error
  assert 'Traceback' not in error
  with open(path) as log:  # No process writes to it any more.
    fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_report_is_of_all_arms_and_names_what_is_missing(tmp_path, console):
  for arm, seed in itertools.product(('grpo', 'prp', 'a.b'), (0, 1)):
    workdirs.write(
      tmp_path / arm / f'seed-{seed}', config={'method.name': arm, 'seed': seed}
    )
  (tmp_path / 'cache').mkdir()
  assert conduct(f'--out={tmp_path}', '--report', console=console)
  assert 'MISSING' not in console.file.getvalue()
  arms = json.loads((tmp_path / 'study.json').read_text())['arms']
  assert [*arms] == ['a.b', 'grpo', 'prp']
  (tmp_path / 'prp' / 'seed-1' / 'summary.json').write_text('{')
  (tmp_path / 'sgt').mkdir()
  (tmp_path / 'sgt' / 'seed-0.log').touch()
  assert not conduct(f'--out={tmp_path}', '--report', console=console)
  text = console.file.getvalue()
  assert 'MISSING: prp, seed 1: summary.json left out: it is not JSON' in text
  assert 'MISSING: sgt, seed 0: not started' in text


@pytest.mark.slow
def test_a_study_from_its_command_to_its_figures(tmp_path):
  flags = (
    f'--out={tmp_path}', '--methods=grpo', '--seeds=0', '--parallel=2',
    '--arm=mine=grpo method.clip_high=0.3', *SMALL,
  )  # fmt: skip
  process = start(*flags)
  out, error = process.communicate(timeout=600)
  assert process.returncode == 0, out + error
  assert 'mine is grpo with method.clip_high=0.3.' in out
  arms = json.loads((tmp_path / 'study.json').read_text())['arms']
  assert arms['mine']['rollouts'] == 2 * 8 * 4 * 2
  assert arms['mine']['other_starts'] == []
  assert arms['mine']['difference']['error'] is None
  assert 'warm start of llama: taken from' in (
    (tmp_path / 'mine' / 'seed-0.log').read_text()
  )
  for name in ('curves.png', 'stability_support.png'):
    assert (tmp_path / name).read_bytes().startswith(b'\x89PNG')
  # Asked again, it makes only what is not complete, and shows why that fails.
  shutil.rmtree(tmp_path / 'grpo' / 'seed-0')
  arms = command.arms(['grpo'], [], SMALL, tmp_path)
  changed = {**config('grpo', arms, 0), 'train.prompts': 64}
  workdirs.write(tmp_path / 'grpo' / 'seed-0', rounds=2, config=changed)
  process = start(*flags)
  out, error = process.communicate(timeout=600)
  assert process.returncode == 1
  assert 'Traceback' not in error
  assert '2 runs, 1 of them complete' in out
  assert 'was written by another config' in out
  assert 'train.prompts: 64 there, 8 now' in out
  assert 'MISSING: grpo, seed 0: failed: exit status 1; see ' in out
