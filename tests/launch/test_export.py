"""The command that exports a policy, as a user gives it."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests import runs

ROOT = pathlib.Path(__file__).parents[2]


def run(*flags):
  return subprocess.run(
    [sys.executable, os.fspath(ROOT / 'launch' / 'export.py'), *flags],
    capture_output=True,
    text=True,
    check=False,
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


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (('--checkpoint=x',), 'Flag --policy must have a value'),
    (
      ('--checkpoint=x', '--policy=llama', '--out=y', 'llama'),
      "not a flag: 'llama'",
    ),
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
