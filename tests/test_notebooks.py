"""Notebooks run from top to bottom, and are kept without outputs."""

import os
import pathlib
import subprocess
import sys

import nbclient
import nbformat
import pytest

from tests import studies

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / 'notebooks').glob('*.ipynb'))


def images(notebook):
  return [
    output
    for cell in notebook.cells
    for output in cell.get('outputs', [])
    if 'image/png' in output.get('data', {})
  ]


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_kept_without_outputs(path):
  for cell in nbformat.read(path, 4).cells:
    assert not cell.get('outputs')
    assert cell.get('execution_count') is None


def test_a_study_is_shown(tmp_path, monkeypatch):
  for arm, after in (('grpo', 0.5), ('sgt', 0.75)):
    for seed in (0, 1):
      folder = tmp_path / arm / f'seed-{seed}'
      studies.write(folder, {'a': after, 'b': after + seed / 8}, seed=seed)
  subprocess.run(
    [sys.executable, 'launch/study.py', f'--out={tmp_path}', '--report'],
    cwd=ROOT,
    check=True,
    capture_output=True,
  )
  monkeypatch.setenv('MRL_STUDY', os.fspath(tmp_path))
  notebook = nbformat.read(ROOT / 'notebooks' / 'study.ipynb', 4)
  nbclient.NotebookClient(
    notebook,
    timeout=120,
    resources={'metadata': {'path': os.fspath(ROOT / 'notebooks')}},
  ).execute()
  assert len(images(notebook)) == 3
  shown = [o for c in notebook.cells for o in c.get('outputs', [])]
  (table,) = [
    o['data']['text/markdown']
    for o in shown
    if 'text/markdown' in o.get('data', {})
  ]
  assert '| sgt | 2 |' in table
