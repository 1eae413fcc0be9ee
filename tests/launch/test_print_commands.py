"""The commands for Cloud TPU, as a user asks for them and workers get them."""

import importlib.util
import os
import pathlib
import shlex
import subprocess
import sys

from absl.testing import flagsaver
import pytest

from launch import tpu_pod
from mrl_jax import config as config_lib
from mrl_jax.mwra import cloud as cloud_lib
from mrl_jax.mwra import commands
from mrl_jax.see import security
from tests import exchanges

ROOT = pathlib.Path(__file__).parents[2]
FILE = 'configs/four.py'
needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is None, reason="pip install -e '.[tpu]'"
)


def run(*flags):
  return subprocess.run(
    [sys.executable, ROOT / 'launch/tpu_pod.py', '--print_commands', *flags],
    cwd=ROOT,
    env={**os.environ, 'HF_HUB_OFFLINE': '1'},
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )


def started(lines):
  """The flags that each worker's process gets, by the policy it trains."""
  found = {}
  for line in lines:
    if 'keep_running.sh' in line:
      (command,) = (
        word.removeprefix('--command=')
        for word in shlex.split(line)
        if word.startswith('--command=')
      )
      words = shlex.split(command)
      script, end = words.index('launch/tpu_pod.py'), words.index('>>')
      flags = words[script + 1 : end]
      found[flags[-1].rpartition('/')[2]] = flags
  return found


@pytest.fixture
def parsed(monkeypatch):
  """The config that the command has with some flags."""

  def parsed(flags):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, 'argv', ['tpu_pod.py', *flags])
    with flagsaver.flagsaver():
      tpu_pod.parse(sys.argv)
      return tpu_pod.CONFIG.value.copy_and_resolve_references()

  return parsed


def test_every_worker_gets_flags_that_the_command_takes(parsed):
  given = {'sample.stop': ('\n',), 'train.rounds': 3, 'method.how': ''}
  config = parsed([f'--config={FILE}'])
  names = list(config.policies)
  place = cloud_lib.Cloud(
    project='mine',
    folder='gs://bucket/run',
    slices=cloud_lib.parse_slices([f'{n}=v6e:2x2@us-east5-b' for n in names]),
  )
  steps = commands.steps(config, FILE, given, place)
  flags = started(line for step in steps for line in step.lines)
  assert {*flags} == {*names}
  shared = set()
  for name in names:
    own = parsed(flags[name])
    config_lib.check(own)
    assert config_lib.trained_here(own) == [name]
    addresses = {k: own.policies[k].address for k in names if k != name}
    assert addresses == {k: f'{place.name(k)}:9400' for k in addresses}
    security.Network(
      listen=own.see.listen,
      addresses=addresses,
      **own.see.tls,
    ).check()
    assert own.see.tls.cert == f'tls/{name}.pem'
    assert own.cluster.coordinator == 'auto'
    assert (own.sample.stop, own.train.rounds) == (('\n',), 3)
    everywhere = config_lib.of_all_processes(config_lib.flat(own))
    shared.add(config_lib.digest(everywhere))
  assert len(shared) == 1  # Or the slices would refuse each other's records.


@needs_libtpu
def test_the_command_plans_each_policy_on_its_slice_and_prints_the_rest():
  done = run(
    *('--config=configs/xgrpo.py', '--config.train.rounds=9', '--spot'),
    *('--project=mine', '--workdir=gs://bucket/run'),
    *('--slice=llama=v5e:2x2@us-west4-a', '--slice=gemma=v6e:2x2@us-east5-b'),
  )
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  notes = [line for line in lines if 'by the plan' in line]
  assert notes[0].startswith('# llama on v5e:2x2: ')
  assert notes[1].startswith('# gemma on v6e:2x2: ')
  flags = started(lines)
  assert flags['llama'][:2] == [
    '--config=configs/xgrpo.py',
    '--config.train.rounds=9',
  ]
  assert sum('--spot' in line for line in lines) == 2


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (['--slice=qwen3=v5e:2x4@us-west4-a'], 'policy qwen2_math has no slice'),
    (
      ['--slice=qwen3=v5e:2x4@z-a', '--slice=qwen2_math=v5e:2x2@z-a'],
      'qwen2_math on v5e:2x2: ',
    ),
  ],
)
def test_a_policy_without_a_slice_or_too_large_for_it_is_refused(
  tmp_path, flags, message
):
  data = tmp_path / 'data.jsonl'
  data.write_text('{"problem": "1", "answer": "1"}\n')
  done = run(
    *(
      '--config=configs/pairs/mrl.py',
      '--config.policies.qwen2_math.path=Qwen/Qwen3-4B',
    ),
    *(f'--config.data.jsonl.{part}={data}' for part in ('train', 'heldout')),
    *('--project=mine', '--workdir=gs://bucket/run', *flags),
  )
  assert done.returncode == 1
  assert message in done.stderr
  assert 'Traceback' not in done.stderr
  assert not done.stdout


@pytest.mark.parametrize(
  ('statuses', 'runs', 'status'),
  [
    ([0], 1, 0),
    ([75, 1, 137, 0], 4, 0),  # 75: another host was lost.
    ([1] * 9, 5, 1),
  ],
)
def test_a_run_that_fails_is_started_again(tmp_path, statuses, runs, status):
  left = tmp_path / 'left'
  left.write_text(''.join(f'{number}\n' for number in statuses))
  once = f"""
    status=$(head -n 1 {left}); sed -i 1d {left}; exit $status"""
  script = ROOT / 'launch' / 'keep_running.sh'
  shell = 'sleep() { :; }; export -f sleep; "$@"'
  done = subprocess.run(
    ['bash', '-c', shell, '-', 'bash', script, 'bash', '-c', once],
    cwd=tmp_path,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == status, done.stderr
  assert len(left.read_text().split()) == len(statuses) - runs


def test_a_run_is_started_once_and_stopped(tmp_path, parsed):
  """By the commands that workers get; a script stands in for Python."""
  home = tmp_path / 'mrl_jax'
  (home / 'launch').mkdir(parents=True)
  script = (ROOT / 'launch' / 'keep_running.sh').read_text(encoding='utf-8')
  (home / 'launch' / 'keep_running.sh').write_text(
    script.replace('--wait 60', '--wait 1'), encoding='utf-8'
  )
  python = home / '.venv' / 'bin' / 'python'
  python.parent.mkdir(parents=True)
  python.write_text(
    '#!/bin/bash\n'
    "trap 'echo stopped; exit 75' TERM; echo began\n"
    'for _ in {1..200}; do sleep .1; done\n'
  )
  python.chmod(0o755)
  config = parsed([f'--config={FILE}'])
  names = list(config.policies)
  place = cloud_lib.Cloud(
    project='mine',
    folder='gs://bucket/run',
    slices=cloud_lib.parse_slices([f'{n}=v6e:2x2@us-east5-b' for n in names]),
  )
  found = {
    step.title.split()[0].strip('.,'): step.lines[0]
    for step in commands.steps(config, FILE, {}, place)
  }

  def run(title):
    """As ssh does: until nothing holds the output."""
    (command,) = (
      word.removeprefix('--command=')
      for word in shlex.split(found[title])
      if word.startswith('--command=')
    )
    # Not to stop what else runs on this machine.
    command = command.replace('aunch/tpu_pod.py', f'aunch/{tmp_path.name}.py')
    subprocess.run(
      ['bash', '-c', command],
      cwd=tmp_path,
      capture_output=True,
      timeout=10,
      check=True,
    )

  def wait_for(text):
    log = home / 'run.log'
    exchanges.wait_until(
      lambda: log.exists() and log.read_text(encoding='utf-8') == text
    )

  run('Start')
  wait_for('began\n')
  run('Start')
  refused = 'Not started: a run goes on in this folder. Stop it first.\n'
  wait_for(f'began\n{refused}')
  run('Stop')
  wait_for(f'began\n{refused}stopped\n')
  run('Start')
  wait_for(f'began\n{refused}stopped\nbegan\n')
  run('Stop')
