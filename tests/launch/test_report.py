"""The command that writes a report, as a person runs it."""

import pathlib
import subprocess
import sys

import pytest

from tests.analysis import workdirs

ROOT = pathlib.Path(__file__).parents[2]


def run(*arguments, cwd):
  return subprocess.run(
    [sys.executable, ROOT / 'launch' / 'report.py', *arguments],
    cwd=cwd,
    env={'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
    encoding='utf-8',
    timeout=120,
    check=False,
  )


def test_one_run_has_its_report_in_its_work_dir(tmp_path):
  workdirs.write(tmp_path, rounds=1)
  done = run(tmp_path, cwd=tmp_path)
  assert done.stdout == f'Report: {tmp_path / "report.html"}\n', done.stderr
  assert (tmp_path / 'report.html').read_text().startswith('<!DOCTYPE html>')


@pytest.mark.slow
def test_several_runs_have_a_page_in_the_current_folder(tmp_path):
  for name in ('a', 'b'):
    workdirs.write(tmp_path / name, rounds=1)
  done = run('a', 'b', cwd=tmp_path)
  assert done.stdout == 'Report: comparison.html\n', done.stderr
  assert '2 runs, side by side' in (tmp_path / 'comparison.html').read_text()
  done = run('nowhere\x1b', cwd=tmp_path)
  assert done.returncode != 0
  message = 'no run in nowhere\\x1b: looked for config.json'
  assert message in done.stderr
  assert 'Traceback' not in done.stderr


def test_analysis_imports_no_jax():
  modules = (
    'launch.study, mrl_jax.analysis.study_report, '
    'mrl_jax.analysis.exchange_report, mrl_jax.analysis.report.comparison, '
    'mrl_jax.analysis.figures.thl'
  )
  heavy = "{'jax', 'flax', 'transformers', 'matplotlib.pyplot'}"
  code = f'import sys, {modules}; print(*{heavy} & {{*sys.modules}})'
  done = subprocess.run(
    [sys.executable, '-c', code],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  assert done.stdout == '\n'
