"""The command that writes a report anew, as a person runs it."""

import pathlib
import subprocess
import sys

from tests.analysis.report import workdirs

ROOT = pathlib.Path(__file__).parents[2]


def run(*arguments, options=(), cwd=ROOT):
  return subprocess.run(
    [sys.executable, *options, ROOT / 'launch' / 'report.py', *arguments],
    cwd=cwd,
    env={'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
    encoding='utf-8',
    timeout=120,
    check=False,
  )


def test_one_run_has_its_report_in_its_work_dir_without_jax(tmp_path):
  workdirs.write(tmp_path, rounds=1)
  done = run(tmp_path, options=['-X', 'importtime'])
  assert done.returncode == 0, done.stderr
  assert done.stdout == f'Report: {tmp_path / "report.html"}\n'
  assert (tmp_path / 'report.html').read_text().startswith('<!DOCTYPE html>')
  modules = {line.split('|')[-1].strip() for line in done.stderr.splitlines()}
  assert 'jinja2' in modules
  assert not modules & {'jax', 'flax', 'transformers', 'matplotlib.pyplot'}


def test_several_runs_have_a_page_in_the_current_folder(tmp_path):
  for name in ('a', 'b'):
    workdirs.write(tmp_path / name, rounds=1)
  done = run('a', 'b', cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  assert done.stdout == 'Report: comparison.html\n'
  assert '2 runs, side by side' in (tmp_path / 'comparison.html').read_text()


def test_a_mistake_is_told_without_a_traceback(tmp_path):
  done = run('nowhere\x1b', cwd=tmp_path)
  assert done.returncode != 0
  told = 'nothing of a run in nowhere\\x1b: looked for config.json'
  assert told in done.stderr
  assert 'Traceback' not in done.stderr
