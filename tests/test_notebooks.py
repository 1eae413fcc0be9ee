"""Notebooks run from top to bottom, and are stored without outputs."""

import ast
import os
import pathlib
import re
import subprocess
import sys

from IPython.core import inputtransformer2
import nbclient
import nbformat
import pytest
from rich import console as console_lib

from mrl_jax.analysis import study
from mrl_jax.analysis import study_report
from tests.analysis import workdirs

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = {p.stem: p for p in sorted((ROOT / 'notebooks').glob('*.ipynb'))}
DEFINITIONS = (
  ast.FunctionDef,
  ast.AsyncFunctionDef,
  ast.ClassDef,
  ast.Lambda,
)
# A run so small that it learns nothing.
SMALL = (
  '--config.train.rounds=2',
  '--config.train.prompts=8',
  '--config.train.samples=4',
  '--config.train.mini_batches=1',
  '--config.warm_start.steps=0',
  '--config.eval.prompts=8',
  '--config.eval.samples=2',
  '--config.eval.batch=8',
  '--config.mwra.emulated_devices=2',
  '--config.policies.llama.model.num_layers=1',
  '--config.policies.gemma.model.num_layers=1',
)

each = pytest.mark.parametrize('name', NOTEBOOKS)


def cells(name):
  return nbformat.read(NOTEBOOKS[name], 4).cells


def python(cell):
  """What IPython makes of a cell."""
  return inputtransformer2.TransformerManager().transform_cell(cell.source)


def execute(name, folder):
  """A notebook, run in a folder; a cell that raises is an error."""
  notebook = nbformat.read(NOTEBOOKS[name], 4)
  nbclient.NotebookClient(
    notebook,
    timeout=240,
    resources={'metadata': {'path': os.fspath(folder)}},
  ).execute()
  return notebook


def shown(notebook, kind):
  """Its outputs of a MIME type."""
  return [
    output['data'][kind]
    for cell in notebook.cells
    for output in cell.get('outputs', [])
    if kind in output.get('data', {})
  ]


@each
def test_a_notebook_is_stored_without_outputs(name):
  notebook = nbformat.read(NOTEBOOKS[name], nbformat.NO_CONVERT)
  nbformat.validate(notebook)
  assert (notebook.nbformat, notebook.nbformat_minor) >= (4, 5)
  for cell in notebook.cells:
    assert not cell.get('outputs')
    assert cell.get('execution_count') is None


@each
def test_a_notebook_begins_with_a_title_and_the_same_installation(name):
  title, install, *_ = cells(name)
  assert title.cell_type == 'markdown'
  assert title.source.startswith('# ')
  (first, *_) = NOTEBOOKS
  assert install.source == cells(first)[1].source


@each
def test_a_notebook_imports_and_never_defines(name):
  for cell in cells(name):
    if cell.cell_type == 'code':
      found = [
        node
        for node in ast.walk(ast.parse(python(cell)))
        if isinstance(node, DEFINITIONS)
      ]
      assert not found, ast.unparse(found[0])


@each
def test_a_notebook_names_no_address_but_those_of_papers(name):
  for cell in cells(name):
    for address in re.findall(r'\w+://[^\s)\'"]*', cell.source):
      assert address.startswith('https://arxiv.org/abs/'), address


# Runs the cell where nothing is installed; commands of pip are only printed.
ELSEWHERE = """
import subprocess

class Shell:
  def system(self, line):
    subprocess.run(line.format(**globals()), shell=True, check=False)

  def run_line_magic(self, name, line):
    print(name, line.format(**globals()))

get_ipython = Shell
"""


def install(folder, repository):
  """What the installing cell prints and raises, and then ROOT and the path."""
  (name, *_) = NOTEBOOKS
  source = python(cells(name)[1])
  assert source.count("REPOSITORY = ''") == 1
  source = source.replace(
    "REPOSITORY = ''", f'REPOSITORY = {os.fspath(repository)!r}'
  )
  after = 'import launch\nprint(ROOT, launch.__path__[0], sep="\\n")'
  done = subprocess.run(
    [sys.executable, '-I', '-S', '-c', f'{ELSEWHERE}\n{source}\n{after}'],
    cwd=folder,
    capture_output=True,
    text=True,
    check=False,
  )
  return done.stdout.splitlines(), done.stderr


def test_elsewhere_a_notebook_asks_for_its_repository(tmp_path):
  printed, error = install(tmp_path, '')
  assert not printed
  assert error.endswith(
    'AssertionError: set REPOSITORY to an address that git can clone from\n'
  )


def test_elsewhere_a_notebook_clones_and_installs_its_repository(tmp_path):
  repository, folder = tmp_path / 'theirs', tmp_path / 'mine'
  folder.mkdir()
  for package in ('mrl_jax', 'launch'):
    (repository / package).mkdir(parents=True)
    (repository / package / '__init__.py').touch()
  for words in (
    ('init', '-q'),
    ('add', '.'),
    ('-c', 'user.name=a', '-c', 'user.email=a@b', 'commit', '-qm', 'a'),
  ):
    subprocess.run(['git', *words], cwd=repository, check=True)
  printed, error = install(folder, repository)
  (clone,) = folder.iterdir()
  assert printed == [
    f'pip install -q -e {clone.name}',
    os.fspath(clone),
    os.fspath(clone / 'launch'),
  ], error


@pytest.mark.slow
def test_a_rollout_is_carried(tmp_path, monkeypatch):
  monkeypatch.delenv('MRL_TEST_DATA', raising=False)
  notebook = execute('thl_tour', tmp_path)
  assert len(shown(notebook, 'image/png')) == 3
  _, refused, limited = shown(notebook, 'text/markdown')
  assert re.findall(r'`(\w+)` \|$', refused, re.M) == [
    'round_trip', 'too_long', 'residual', 'empty', 'ids'
  ]  # fmt: skip
  carried = [int(n.replace(',', '')) for n in re.findall(
    r'^\| [\d.]+ \| ([\d,]+)', limited, re.M
  )]  # fmt: skip
  assert carried == sorted(set(carried))
  assert not [*tmp_path.iterdir()]  # It installs nothing here.


@pytest.mark.slow
def test_the_methods_are_compared_on_a_bandit(tmp_path):
  notebook = execute('bandit_tradeoff', tmp_path)
  assert len(shown(notebook, 'image/png')) == 9


@pytest.mark.slow
def test_a_study_is_shown(tmp_path, monkeypatch):
  for arm, after in (('grpo', 0.5), ('sgt', 0.75)):
    for seed in (0, 1):
      workdirs.write(
        tmp_path / arm / f'seed-{seed}',
        after={'a': after, 'b': after + seed / 8},
        config={'seed': seed},
      )
  found = study.read(str(tmp_path), ['grpo', 'sgt'], [0, 1])
  study_report.write(str(tmp_path), found, 'grpo', console_lib.Console())
  monkeypatch.setenv('MRL_STUDY', os.fspath(tmp_path))
  notebook = execute('study', ROOT / 'notebooks')
  assert len(shown(notebook, 'image/png')) == 3
  (table,) = shown(notebook, 'text/markdown')
  assert '| sgt | 2 |' in table


@pytest.mark.slow
def test_a_run_is_made_and_shown(tmp_path, monkeypatch):
  monkeypatch.setenv('MRL_FLAGS', ' '.join(SMALL))
  notebook = execute('first_run', tmp_path)
  assert len(shown(notebook, 'image/png')) == 5
  (table,) = shown(notebook, 'text/markdown')
  assert re.findall(r'^\| (\w+) \| \d', table, re.M) == [
    'gemma', 'llama', 'mean'
  ]  # fmt: skip
  (frame,) = [
    text for text in shown(notebook, 'text/html') if '<iframe' in text
  ]
  assert ' sandbox ' in frame
  (report,) = tmp_path.glob('runs/*/report.html')
  printed = ''.join(
    output.get('text', '')
    for cell in notebook.cells
    for output in cell.get('outputs', [])
  )
  assert f'{report}\n' in printed
  assert '\x1b' not in printed  # Lines, and no moving cursor.
  assert '16 used' in ''.join(shown(notebook, 'text/plain'))
