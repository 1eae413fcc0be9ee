"""The command that plans, as a user gives it."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is None, reason="pip install -e '.[tpu]'"
)


def run(*flags):
  return subprocess.run(
    [sys.executable, 'launch/plan.py', *flags],
    cwd=ROOT,
    env={**os.environ, 'HF_HUB_OFFLINE': '1'},
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )


def test_a_pair_is_planned_without_weights_data_or_network(tmp_path):
  path = tmp_path / 'plan.json'
  done = run('--config=configs/pairs/mrl.py', f'--json={path}')
  assert done.returncode == 0, done.stderr
  assert 'Plan for 2 x cpu' in done.stdout
  figures = json.loads(path.read_text())
  assert figures['proofs'] == {}
  qwen2, qwen3 = figures['plan']['policies'].values()
  assert (qwen2['parameters'], qwen3['parameters']) == (
    1_543_714_304,
    1_720_574_976,
  )
  assert not {*qwen2['devices']} & {*qwen3['devices']}


@needs_libtpu
def test_an_unknown_slice_is_refused_and_known_ones_are_listed():
  done = run('--config=configs/xgrpo.py', '--topology=v5litepod-8')
  assert done.returncode == 1
  assert "no TPU slice 'v5litepod-8'" in done.stderr
  assert 'v5e: 2x2, 2x4' in done.stderr
  assert 'Traceback' not in done.stderr


@pytest.mark.slow
@needs_libtpu
def test_xla_checks_a_plan_for_a_slice_that_is_not_there(tmp_path):
  path = tmp_path / 'plan.json'
  done = run(
    '--config=configs/xgrpo.py',
    '--config.policies.llama.model.num_layers=1',
    '--config.policies.gemma.model.num_layers=1',
    '--config.mwra.time_share=True',
    '--topology=v5e:2x2',
    '--compile',
    f'--json={path}',
  )
  assert done.returncode == 0, done.stderr
  proofs = json.loads(path.read_text())['proofs']
  assert {*proofs} == {'llama', 'gemma'}
  for results in proofs.values():
    names = [result['program'] for result in results]
    assert names == ['own gradient', 'update', 'prefill', 'decoding']
    for result in results:
      assert 0 < result['memory']['arguments'] < 2**30
      assert result['capacity'] == 15.75 * 2**30
    received = results[0]['collectives'].values()
    assert sum(total['bytes'] for total in received) > 0
