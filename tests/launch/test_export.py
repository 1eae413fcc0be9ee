import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def run(*flags):
  return subprocess.run(
    [sys.executable, os.fspath(ROOT / 'launch' / 'export.py'), *flags],
    capture_output=True,
    text=True,
    check=False,
  )


@pytest.mark.parametrize(
  ('flags', 'told'),
  [
    (('--checkpoint=x',), 'Flag --policy must have a value'),
    (
      ('--checkpoint=/nowhere', '--policy=llama', '--out=x'),
      '/nowhere is not the work dir of a run',
    ),
    (
      ('--checkpoint=/nowhere', '--policy=llama', f'--out={ROOT}'),
      f'--out={ROOT} is there already',
    ),
  ],
)
def test_a_mistake_is_told_without_a_traceback(flags, told):
  done = run(*flags)
  assert done.returncode != 0
  assert told in done.stdout + done.stderr
  assert 'Traceback' not in done.stderr


def test_nothing_but_flags_is_taken():
  flags = ('--checkpoint=/nowhere', '--policy=llama', '--out=x')
  assert "not a flag: 'llama'" in run(*flags, 'llama').stderr
