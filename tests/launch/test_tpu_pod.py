"""The command, as a user gives it."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SMALL = (
  '--config.train.rounds=6',
  '--config.train.prompts=8',
  '--config.train.samples=4',
  '--config.train.row_multiple=16',
  '--config.warm_start.steps=10',
  '--config.eval.prompts=8',
  '--config.eval.samples=2',
  '--config.eval.batch=8',
  '--config.checkpoint.every=1',
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


def rows(workdir):
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  return [{**json.loads(line), 'timing': 0} for line in lines]


@pytest.mark.parametrize(
  ('flags', 'told'),
  [
    (['--config.trian.rounds=3'], 'Did you mean "train"'),
    (['--config.train.round=3'], 'Did you mean "rounds"'),
    (['--config.train.rounds=many'], 'invalid literal for int() with base 10'),
    (['--config.train.rounds=0'], 'train.rounds = 0; it must be at least 1'),
    (['rounds=3'], "not a flag: 'rounds=3'"),
  ],
)
def test_a_mistake_is_told_without_a_traceback(tmp_path, flags, told):
  done = run(*flags, f'--workdir={tmp_path / "run"}')
  assert done.returncode != 0
  assert told in done.stderr
  assert 'Traceback' not in done.stderr
  assert not (tmp_path / 'run').exists()


def test_a_missing_config_is_told():
  done = run(config='configs/nowhere.py')
  assert done.returncode != 0
  assert 'configs/nowhere.py' in done.stderr
  assert 'Traceback' not in done.stderr


@pytest.mark.slow
def test_a_killed_run_ends_as_if_it_had_not_been(tmp_path):
  cache = f'--config.cache_dir={tmp_path / "cache"}'
  whole, killed = tmp_path / 'whole', tmp_path / 'killed'
  assert run(*SMALL, cache, f'--workdir={whole}').returncode == 0
  flags = (*SMALL, cache, f'--workdir={killed}')
  process = subprocess.Popen(command(*flags), cwd=ROOT)
  deadline = time.monotonic() + 240
  while process.poll() is None and time.monotonic() < deadline:
    if len(list((killed / 'checkpoints').glob('round_*'))) >= 2:
      break
    time.sleep(0.01)
  process.send_signal(signal.SIGKILL)
  assert process.wait() == -signal.SIGKILL
  done = run(*flags)
  assert done.returncode == 0, done.stderr
  assert rows(killed) == rows(whole)
  summaries = [
    json.loads((folder / 'summary.json').read_text())
    for folder in (whole, killed)
  ]
  assert summaries[0].pop('seconds') > 0
  assert summaries[1].pop('seconds') > 0
  assert summaries[0] == summaries[1]
  for policy in ('gemma', 'llama'):
    assert parameters(whole, policy) == parameters(killed, policy)


def parameters(workdir, policy):
  """The bytes of a policy's last checkpoint, read without the package."""
  import jax
  import orbax.checkpoint as ocp

  path = workdir / 'checkpoints' / 'round_6' / policy
  with ocp.StandardCheckpointer() as checkpointer:
    leaves = jax.tree.leaves(checkpointer.restore(path))
  assert leaves
  return [bytes(memoryview(leaf)) for leaf in map(jax.device_get, leaves)]


@pytest.mark.slow
@pytest.mark.parametrize('method', ['grpo', 'xgrpo'])
def test_the_main_job_gains_fifteen_points(tmp_path, method):
  done = run(
    f'--workdir={tmp_path / "run"}',
    config=f'configs/{method}.py',
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
def test_real_tokenizers_and_questions(tmp_path):
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
    '--config.train.row_multiple=8',
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
