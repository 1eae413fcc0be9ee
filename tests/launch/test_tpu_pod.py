"""The command that trains, as a user gives it."""

import errno
import json
import os
import pathlib
import random
import shlex
import signal
import subprocess
import sys
import time

from absl import logging
from absl.testing import flagsaver
import jax
import orbax.checkpoint as ocp
import pytest

from launch import tpu_pod
from mrl_jax import bucket
from mrl_jax import workdir as workdir_lib
from mrl_jax.analysis.report import page
from mrl_jax.training import job as job_lib
from mrl_jax.training import loop
from mrl_jax.training import stopping
from mrl_jax.update import checkpoint
from tests import exchanges
from tests import runs

ROOT = pathlib.Path(__file__).parents[2]
SMALL = (
  '--config.train.rounds=6',
  '--config.train.prompts=8',
  '--config.train.samples=4',
  '--config.warm_start.steps=10',
  '--config.eval.prompts=8',
  '--config.eval.samples=4',  # As in a round: one program samples for both.
  '--config.eval.batch=8',
  '--config.checkpoint.every=1',
  '--config.policies.llama.model.num_layers=1',
  '--config.policies.gemma.model.num_layers=1',
)


def command(*flags, config='configs/prp.py'):
  script = os.fspath(ROOT / 'launch' / 'tpu_pod.py')
  return [sys.executable, script, f'--config={config}', *map(str, flags)]


def run(*flags, config='configs/prp.py', timeout=300):
  return subprocess.run(
    command(*flags, config=config),
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=timeout,
    check=False,
  )


@pytest.fixture(scope='module')
def cache(tmp_path_factory):
  """The flag of a cache that runs share."""
  return f'--config.cache_dir={tmp_path_factory.mktemp("cache")}'


def rows(workdir):
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  return [{**json.loads(line), 'timing': 0} for line in lines]


@pytest.mark.parametrize(
  ('flag', 'message'),
  [
    ('--config.trian.rounds=3', 'Did you mean "train"'),
    ('--config.train.round=3', 'Did you mean "rounds"'),
    ('--config.train.rounds=many', 'invalid literal for int() with base 10'),
    ('--config=configs/nowhere.py', 'configs/nowhere.py'),
  ],
)
def test_a_wrong_flag_is_reported_without_a_traceback(tmp_path, flag, message):
  done = run(f'--workdir={tmp_path / "run"}', flag)
  assert done.returncode != 0
  assert message in done.stderr
  assert 'Traceback' not in done.stderr
  assert not (tmp_path / 'run').exists()


@pytest.fixture
def launch(monkeypatch):
  """Calls the command in this process, whose devices and cache stay the same."""
  monkeypatch.setattr(type(jax.config), 'update', lambda *_: None)
  # They change the process, of which this is one test only.
  monkeypatch.setattr(stopping.Stop, 'listen', lambda *_: None)
  monkeypatch.setattr(tpu_pod, 'silence', lambda *_: None)

  def launch(*flags):
    _, *command_line = command(*flags, config=ROOT / 'configs' / 'prp.py')
    monkeypatch.setattr(sys, 'argv', command_line)
    with flagsaver.flagsaver():
      tpu_pod.main(tpu_pod.parse(command_line))

  return launch


def test_a_mistake_ends_the_command_with_a_message(launch, tmp_path):
  message = 'train.rounds = 0; it must be at least 1'
  with pytest.raises(SystemExit, match=message):
    launch('--config.train.rounds=0', f'--workdir={tmp_path / "run"}')
  assert not (tmp_path / 'run').exists()


def test_a_stray_argument_is_refused_before_jax_is_imported(
  launch, monkeypatch
):
  monkeypatch.setitem(sys.modules, 'jax', None)
  with pytest.raises(SystemExit, match="not a flag: 'rounds=3'"):
    launch('rounds=3')


@pytest.mark.parametrize(
  ('error', 'ends_with', 'message'),
  [
    (KeyboardInterrupt(), SystemExit, '75'),
    (OSError(errno.ENOSPC, 'no room'), SystemExit, 'Make room, then go on.'),
    (FloatingPointError('nan'), FloatingPointError, 'nan'),
  ],
)
def test_a_run_that_stops_early_has_a_report(
  launch, tmp_path, monkeypatch, capsys, error, ends_with, message
):
  def build(config, home):
    workdir_lib.prepare(home.folder, config)
    workdir_lib.claim(home.folder, config, inputs='', tokenizers={}, weights={})

  def stop(*_):
    raise error

  monkeypatch.setattr(job_lib, 'build', build)
  monkeypatch.setattr(loop, 'run', stop)
  with pytest.raises(ends_with, match=message):
    launch(f'--workdir={tmp_path / "run"}')
  assert f'Report: {tmp_path}/run/report.html' in capsys.readouterr().out
  assert (tmp_path / 'run' / 'report.html').exists()


def test_a_failing_report_does_not_replace_the_error_of_the_run(
  launch, tmp_path, monkeypatch, caplog
):
  def fail(*_):
    raise FloatingPointError('nan')

  def no_report(*_):
    raise OSError('the disk is full')

  monkeypatch.setattr(job_lib, 'build', lambda *_: None)
  monkeypatch.setattr(loop, 'run', fail)
  monkeypatch.setattr(page, 'write', no_report)
  logging.use_absl_handler()
  with pytest.raises(FloatingPointError, match='nan'):
    launch(f'--workdir={tmp_path / "run"}')
  assert 'the disk is full' in caplog.text


def test_the_report_of_a_finished_run():
  workdir, shown = runs.finished().workdir, runs.console()
  tpu_pod.write_report(bucket.WorkDir(workdir), shown)
  assert shown.file.getvalue() == f'Report: {workdir}/report.html\n'
  report = pathlib.Path(workdir, 'report.html').read_text()
  assert 'finished, 2 rounds' in report


@pytest.fixture(scope='module')
def whole(tmp_path_factory, cache):
  """A run that nobody stopped, and the seconds that it takes."""
  for name in ('cold', 'whole'):  # The first fills the cache.
    began, workdir = time.monotonic(), tmp_path_factory.mktemp(name) / 'run'
    done = run(*LONGER, cache, f'--workdir={workdir}')
    assert done.returncode == 0, done.stderr
  return workdir, time.monotonic() - began


LONGER = (
  *SMALL,
  '--config.train.rounds=12',
  '--config.checkpoint.every=5',
  '--config.eval.every=4',
)
STOPS = int(os.environ.get('MRL_TEST_STOPS', '2'))  # Of each kind.


@pytest.mark.slow
@pytest.mark.parametrize('stop', range(STOPS))
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGKILL])
def test_a_run_stopped_at_any_moment_ends_as_if_it_had_not_been(
  tmp_path, cache, whole, number, stop
):
  finished, seconds = whole
  moment = random.Random(f'{number} {stop}').uniform(0.1, 1) * seconds
  flags = (*LONGER, cache, f'--workdir={tmp_path / "run"}')
  with subprocess.Popen(
    command(*flags), cwd=ROOT, stderr=subprocess.PIPE, text=True
  ) as process:
    time.sleep(moment)
    process.send_signal(number)
    _, said = process.communicate(timeout=30)  # All that a machine gives.
  if number == signal.SIGTERM and process.returncode == stopping.EXIT:
    *_, resume = said.splitlines()
    assert shlex.split(resume) == ['python', *command(*flags)[1:]]
    assert 'Traceback' not in said
  else:  # Killed, finished before, or Python had just begun.
    assert process.returncode in (0, -number)
  done = run(*flags)
  assert done.returncode == 0, done.stderr
  assert_same_runs(tmp_path / 'run', finished)


@pytest.mark.slow
@pytest.mark.parametrize('kib', [24, 2600])
def test_a_full_disk_is_one_sentence_and_the_run_goes_on_with_more(
  tmp_path, cache, whole, kib
):
  disk = tmp_path / 'disk'
  disk.mkdir()
  mount = ['mount', '-t', 'tmpfs', '-o', f'size={kib}k', 'tmpfs', disk]
  if subprocess.run(mount, capture_output=True, check=False).returncode:
    pytest.skip('only root can make a small disk')
  try:
    flags = (*LONGER, cache, f'--workdir={disk / "run"}')
    done = run(*flags)
    assert done.returncode == 1
    *_, sentence, resume = done.stderr.splitlines()
    assert 'cannot be written: No space left on device. Make room' in sentence
    assert ('No checkpoint was written yet' in sentence) == (kib < 2000)
    assert shlex.split(resume) == ['python', *command(*flags)[1:]]
    assert 'Traceback' not in done.stderr
    subprocess.run(['mount', '-o', 'remount,size=99m', disk], check=True)
    done = run(*flags)
    assert done.returncode == 0, done.stderr
    assert_same_runs(disk / 'run', whole[0])
  finally:
    subprocess.run(['umount', disk], check=True)


@pytest.mark.parametrize('hook', ['threading', 'sys', 'unraisable', 'log'])
def test_a_known_error_is_not_printed_by_threads_and_the_log(hook, capfd):
  child = f"""
import errno, sys, threading
from absl import logging
from launch import tpu_pod
from mrl_jax import files

class Fails:
  def __del__(self):
    raise self.error

def fail(error):
  if {hook!r} == 'threading':
    def work():
      raise error
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
  elif {hook!r} == 'unraisable':
    fails = Fails()
    fails.error = error
    del fails
  else:
    try:
      raise error
    except Exception:
      if {hook!r} == 'log':
        logging.exception('failed')
      else:
        sys.excepthook(*sys.exc_info())

logging.use_absl_handler()
tpu_pod.silence(files.no_room)
fail(OSError(errno.ENOSPC, 'full'))
fail(RuntimeError('Event loop is closed'))
fail(ValueError('unknown'))
"""
  subprocess.run([sys.executable, '-c', child], cwd=ROOT, check=True)
  said = capfd.readouterr().err
  assert 'ValueError: unknown' in said
  assert 'full' not in said
  assert 'closed' not in said


def assert_same_runs(workdir, other):
  """Compares all that is no time, and each bit of the last checkpoints."""
  assert rows(workdir) == rows(other)
  evaluations = [f / 'evaluations.jsonl' for f in (workdir, other)]
  assert evaluations[0].read_bytes() == evaluations[1].read_bytes()
  summaries = [
    json.loads((folder / 'summary.json').read_text())
    for folder in (workdir, other)
  ]
  for summary in summaries:
    assert summary.pop('timing')['seconds'] > 0
  assert summaries[0] == summaries[1]
  for policy in ('gemma', 'llama'):
    assert parameters(workdir, policy) == parameters(other, policy)


@pytest.mark.slow
def test_a_process_outlives_its_peer_and_hears_it_when_it_resumes(
  tmp_path, cache
):
  ports = {name: exchanges.free_address() for name in ('llama', 'gemma')}
  rounds = 24

  def start(name, peer):
    with open(tmp_path / f'{name}.log', 'a') as log:
      return subprocess.Popen(
        command(
          *SMALL,
          f'--config.train.rounds={rounds}',
          cache,
          f'--config.see.listen={ports[name]}',
          f'--config.policies.{peer}.address={ports[peer]}',
          '--config.see.wait_s=5',
          f'--workdir={tmp_path / name}',
        ),
        cwd=ROOT,
        stdout=log,
        stderr=log,
      )

  def played(name):
    path = tmp_path / name / 'metrics.jsonl'
    return rows(tmp_path / name) if path.exists() else []

  def log(name):
    return (tmp_path / f'{name}.log').read_text()

  llama, gemma = start('llama', 'gemma'), start('gemma', 'llama')
  wait_until(lambda: len(played('gemma')) >= 4)
  gemma.kill()
  gemma.wait()
  wait_until(lambda: 'llama heard nothing from gemma' in log('llama'))
  alone = len(played('llama'))
  wait_until(lambda: len(played('llama')) >= alone + 3)
  llama.send_signal(signal.SIGSTOP)  # It must not end before gemma is back.
  gemma = start('gemma', 'llama')
  wait_until(lambda: 'Resuming after round' in log('gemma'))
  llama.send_signal(signal.SIGCONT)
  assert (llama.wait(timeout=300), gemma.wait(timeout=300)) == (0, 0)

  heard = [row['peer_records'] > 0 for row in rows(tmp_path / 'llama')]
  assert len(heard) == rounds
  assert heard[0]
  assert False in heard
  assert heard[-1]
  assert all(row['peer_records'] for row in rows(tmp_path / 'gemma'))
  summaries = {
    name: json.loads((tmp_path / name / 'summary.json').read_text())
    for name in ports
  }
  for sender, receiver in (('llama', 'gemma'), ('gemma', 'llama')):
    pair = f'{sender}->{receiver}'
    for kind, sent in summaries[sender]['sent'][pair].items():
      received = summaries[receiver]['exchange'][pair][kind]
      for row in (sent, received):
        total = row.pop('published')
        row.pop('bytes')
        assert total == sum(row.values())
      assert sent['evicted'] == sent['refused'] == sent['waiting'] == 0
      if receiver == 'gemma':  # It was killed, and got all records again.
        arrived = sum(received.values()) - received['duplicate']
        assert (
          arrived
          == sent['acknowledged']
          == (rounds * 8 * {'rollout': 4, 'group_stats': 1}[kind])
        )


def wait_until(condition):
  deadline = time.monotonic() + 300
  while not condition():
    assert time.monotonic() < deadline, 'waited in vain'
    time.sleep(0.05)


def parameters(workdir, policy):
  """The bytes of a policy's last checkpoint, read without the package."""
  newest = checkpoint.newest(workdir / 'checkpoints')
  path = workdir / 'checkpoints' / f'round_{newest}' / policy
  with ocp.StandardCheckpointer() as checkpointer:
    leaves = jax.tree.leaves(checkpointer.restore(path))
  assert leaves
  return [bytes(memoryview(leaf)) for leaf in map(jax.device_get, leaves)]


@pytest.mark.slow
def test_the_default_job_gains_fifteen_points(tmp_path, cache, monkeypatch):
  # As users run it: so long a run is faster with optimised programs.
  monkeypatch.delenv('XLA_FLAGS')
  done = run(
    cache,
    f'--workdir={tmp_path / "run"}',
    '--config.train.rounds=60',  # The first rounds gain most.
    config='configs/xgrpo.py',
    timeout=900,
  )
  assert done.returncode == 0, done.stderr
  summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
  gains = [
    policy['heldout_accuracy']['after'] - policy['heldout_accuracy']['before']
    for policy in summary['policies'].values()
  ]
  assert sum(gains) / len(gains) >= 0.15


@pytest.mark.slow
def test_a_run_with_real_tokenizers_and_questions(tmp_path):
  folder = os.environ.get('MRL_TEST_DATA')
  if not folder:
    pytest.skip('MRL_TEST_DATA does not name a folder of real data')
  data = pathlib.Path(folder)
  done = run(
    f'--config.policies.llama.tokenizer.path={data / "tokenizers/llama3"}',
    f'--config.policies.gemma.tokenizer.path={data / "tokenizers/llama2"}',
    '--config.data.source=jsonl',
    f'--config.data.jsonl.train={data / "math/gsm8k_train.jsonl"}',
    f'--config.data.jsonl.heldout={data / "math/gsm8k_test.jsonl"}',
    '--config.reward.marker=####',
    '--config.warm_start.steps=0',
    '--config.train.rounds=3',
    '--config.train.prompts=8',
    '--config.train.samples=4',
    '--config.train.micro_rows=16',
    '--config.train.logit_chunk=256',
    '--config.sample.max_prompt_tokens=128',
    '--config.sample.max_tokens=32',
    '--config.thl.max_tokens=256',
    '--config.eval.prompts=8',
    '--config.eval.samples=4',
    '--config.eval.batch=8',
    f'--workdir={tmp_path / "run"}',
  )
  assert done.returncode == 0, done.stderr
  assert '128,256' in done.stdout
  assert '32,000' in done.stdout
  assert 'prompts are too long and were skipped' in done.stdout
  assert 'THL residual' in done.stdout
  summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
  for pair in ('llama->gemma', 'gemma->llama'):
    residual = summary['residuals'][pair]
    carried = residual['rollouts'] - sum(residual['refused'].values())
    assert residual['rollouts'] == 3 * 8 * 4
    assert carried == residual['rollouts']
    assert residual['receiver_tokens'] > residual['sender_tokens'] > 0
