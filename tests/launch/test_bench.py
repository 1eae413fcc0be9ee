"""The benchmarks run and give figures; how fast they are is not a test."""

import importlib.util
import json
import math
import os
import pathlib
import subprocess
import sys

import pytest

from mrl_jax.bandit import methods

ROOT = pathlib.Path(__file__).parents[2]
THL = ('thl', '--tokens=200', '--repeats=2')


def run(*arguments, **environment):
  return subprocess.run(
    [sys.executable, 'launch/bench.py', *arguments],
    cwd=ROOT,
    env={**os.environ, **environment},
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )


def figures(done, path):
  assert done.returncode == 0, done.stderr
  thl = json.loads(path.read_text())['thl']
  flat = [
    number
    for value in thl.values()
    for number in (value.values() if isinstance(value, dict) else [value])
  ]
  assert all(math.isfinite(number) and number > 0 for number in flat)
  return thl


def test_thl_without_trl(tmp_path):
  # Stands before an installed one.
  stub = tmp_path / 'trl.py'
  stub.write_text('raise ModuleNotFoundError("No module named \'trl\'")')
  path = tmp_path / 'thl.json'
  done = run(*THL, f'--json={path}', PYTHONPATH=os.fspath(tmp_path))
  thl = figures(done, path)
  assert "to compare with GOLD: pip install -e '.[bench]'" in done.stdout
  assert thl['sender_tokens'] == 200
  assert thl['chunks'] <= 200 < thl['bytes']
  assert thl['best_ms'].keys() == thl['median_ms'].keys()
  assert 'THL align + carry' in thl['best_ms']
  assert not thl['gold_ratio']


@pytest.mark.skipif(
  not importlib.util.find_spec('trl'), reason="pip install -e '.[bench]'"
)
def test_thl_beside_gold(tmp_path):
  path = tmp_path / 'thl.json'
  thl = figures(run(*THL, f'--json={path}'), path)
  assert thl['gold_ratio'].keys() == thl['best_ms'].keys()
  assert thl['gold_ratio']['GOLD align'] == 1


def test_see_on_every_transport(tmp_path):
  path = tmp_path / 'see.json'
  done = run(
    'see', '--rounds=2', '--rollouts=8', '--response=4', f'--json={path}'
  )
  assert done.returncode == 0, done.stderr
  see = json.loads(path.read_text())['see']
  assert see['records'] == 16
  assert set(see['rates']) == {'in process', 'journal', 'gRPC'}
  for rates in see['rates'].values():
    assert all(math.isfinite(rate) and rate > 0 for rate in rates.values())


def test_memory_is_bounded_by_the_chunk(tmp_path):
  path = tmp_path / 'memory.json'
  done = run(
    'memory',
    *('--vocab=8192', '--rows=4', '--length=128', '--layers=1'),
    *('--d_model=64', '--chunk=32', f'--json={path}'),
  )
  assert done.returncode == 0, done.stderr
  memory = json.loads(path.read_text())['memory']
  logits = memory['logits_bytes']
  assert logits == 4 * 128 * 8192 * 4
  chunk, whole = (memory['temporary_bytes'][n] for n in ('32', '512'))
  assert logits <= whole['scoring'] < whole['gradient']
  assert chunk['scoring'] < logits / 4
  # There the gradients themselves weigh as much as the chunk's logits.
  assert chunk['gradient'] < min(logits, whole['gradient'] / 3)


def test_bandit_by_every_method(tmp_path):
  path = tmp_path / 'bandit.json'
  done = run(
    'bandit', '--groups=40', '--actions=3', '--samples=2', f'--json={path}'
  )
  assert done.returncode == 0, done.stderr
  bandit = json.loads(path.read_text())['bandit']
  assert bandit['groups'] == 40
  for taken in (bandit['samples_s'], bandit['closed_form_ms']):
    assert taken.keys() == methods.METHODS.keys()
    assert all(math.isfinite(time) and time > 0 for time in taken.values())


@pytest.mark.slow
def test_policies_beside_one_alone(tmp_path):
  path = tmp_path / 'policies.json'
  done = run(
    'policies', '--up_to=2', '--played=1', '--best_of=1', f'--json={path}'
  )
  assert done.returncode == 0, done.stderr
  policies = json.loads(path.read_text())['policies']
  assert set(policies) == {'grpo', 'prp', 'prp, one peer'}
  for by_count in policies.values():
    assert set(by_count) == {'1', '2'}
    one, two = (by_count[n]['s_a_round'] for n in '12')
    assert 0 < one < math.inf
    assert 0 < two < math.inf
    assert by_count['1']['x_alone'] == 1
    assert by_count['2']['x_alone'] == pytest.approx(two / (2 * one))
  # Only of those that exchange does each train on the rollouts of both.
  assert policies['prp']['2']['x_alone'] > policies['grpo']['2']['x_alone']


@pytest.mark.parametrize(
  ('arguments', 'told'),
  [
    (['thk'], "unknown benchmark 'thk'. Did you mean 'thl'? Known: bandit, "),
    ([], 'name a benchmark; known: thl, see, policies, memory, bandit'),
    (
      ['bandit', '--groups=6'],
      '6 groups; they must be a multiple of the batch',
    ),
    (['policies', '--up_to=0'], 'flag --up_to=0'),
    (['memory', '--chunk=0'], 'flag --chunk=0'),
    ([*THL, '--text=nowhere.txt'], "No such file or directory: 'nowhere.txt'"),
    (['thl', '--tokens=10000000'], '--tokens=10000000, but the text has'),
    (['thl', '--repeats=0'], 'flag --repeats=0'),
  ],
)
def test_a_mistake_is_told_without_a_traceback(arguments, told):
  done = run(*arguments)
  assert done.returncode != 0
  assert told in done.stderr
  assert 'Traceback' not in done.stderr
