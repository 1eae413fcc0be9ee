"""The command that exports a policy, as a user gives it."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests import runs

ROOT = pathlib.Path(__file__).parents[2]


def run(*flags, **environment):
  return subprocess.run(
    [sys.executable, os.fspath(ROOT / 'launch' / 'export.py'), *flags],
    capture_output=True,
    text=True,
    check=False,
    env={**os.environ, **environment},
  )


def test_a_policy_of_a_finished_run_is_exported(tmp_path):
  out = tmp_path / 'out'
  workdir = runs.finished().workdir
  done = run(f'--checkpoint={workdir}', '--policy=llama', f'--out={out}')
  assert done.returncode == 0, done.stderr
  assert done.stdout == f'llama after 2 rounds is in {out}\n'
  about = json.loads((out / 'config.json').read_text())
  assert about['model_type'] == 'llama'
  assert {'model.safetensors', 'tokenizer.json'} <= {*os.listdir(out)}


def test_a_stray_argument_is_refused_before_jax_is_imported(tmp_path):
  (tmp_path / 'jax.py').write_text('raise ImportError("too early")')
  flags = ('--checkpoint=x', '--policy=llama', '--out=y', 'llama')
  done = run(*flags, PYTHONPATH=os.fspath(tmp_path))
  assert done.stderr == "not a flag: 'llama'\n"


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (('--checkpoint=x',), 'Flag --policy must have a value'),
    (
      ('--checkpoint=/nowhere', '--policy=llama', '--out=x'),
      '/nowhere is not the work dir of a run',
    ),
  ],
)
def test_a_mistake_is_reported_without_a_traceback(flags, message):
  done = run(*flags)
  assert done.returncode != 0
  assert message in done.stdout + done.stderr
  assert 'Traceback' not in done.stderr
