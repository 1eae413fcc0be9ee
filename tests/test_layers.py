"""The package's table of levels, held by the imports of every module.

  5   analysis: reading and drawing runs          training never imports it
  4   training: loop, job, worker, evaluation, export
  3   algorithms: the table of methods             <- the seam of the halves
  2   update   mwra/meshes   data/pipeline   workdir, bucket
      cluster, member: the processes that train together
  1   HOST HALF (no jax)                     DEVICE HALF (no records)
      see thl sharing rewards data           models sampling losses
      mwra/{cost,planner}   bandit
  0   records  architecture  parameters  config  checks  files  texts
      processes  hugging_face  chat_templates

A module imports from lower levels, or from its own folder. Below the seam no
module imports both halves. launch/ and configs/ import everything.
"""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
LEVELS = {
  'records': 0,
  'architecture': 0,
  'parameters': 0,
  'config': 0,
  'config_keys': 0,
  'chat_templates': 0,
  'checks': 0,
  'files': 0,
  'processes': 0,
  'texts': 0,
  'hugging_face': 0,
  'member': 1.5,
  'cluster': 1.5,
  'see': 1,
  'thl': 1,
  'sharing': 1,
  'rewards': 1,
  'data': 1,
  'mwra': 1,
  'bandit': 1,
  'models': 1,
  'sampling': 1,
  'losses': 1,
  'mwra.meshes': 2,
  'data.pipeline': 2,
  'workdir': 2,
  'bucket': 2.5,
  'update': 2,
  'algorithms': 3,
  'training': 4,
  'analysis': 5,
}
HOST = {'see', 'thl', 'sharing', 'rewards', 'data', 'mwra', 'bandit'}
DEVICE = {'models', 'sampling', 'losses', 'update'}
NEIGHBOURS = {('sharing', 'thl'), ('sampling', 'models')}
DEVICE_LIBRARIES = {'jax', 'flax', 'optax', 'orbax', 'grain'}

MODULES = {
  '.'.join(path.relative_to(ROOT / 'mrl_jax').with_suffix('').parts): path
  for path in (ROOT / 'mrl_jax').rglob('*.py')
  if path.name != '__init__.py'
}


def level(module):
  return LEVELS.get(module, LEVELS.get(module.partition('.')[0]))


def folder(module):
  return module.partition('.')[0] if '.' in module else ''


def imports(path):
  """Modules of this package, and top-level names of libraries."""
  own, libraries = set(), set()
  for node in ast.walk(ast.parse(path.read_text())):
    names = []
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path}: imports are absolute'
      names = [f'{node.module}.{alias.name}' for alias in node.names]
    for name in names:
      if name.startswith('mrl_jax.'):
        parts = name.removeprefix('mrl_jax.').split('.')
        known = ['.'.join(parts[:n]) for n in (3, 2, 1)]
        own.add(next(m for m in known if m in MODULES))
      else:
        libraries.add(name.partition('.')[0])
  return own, libraries


@pytest.mark.parametrize('module', sorted(MODULES))
def test_imports_point_down(module):
  own, _ = imports(MODULES[module])
  for other in own:
    pair = (folder(module), folder(other))
    assert level(other) < level(module) or (
      level(other) == level(module)
      and (pair[0] == pair[1] or pair in NEIGHBOURS)
    ), f'{module} (level {level(module)}) imports {other} ({level(other)})'


@pytest.mark.parametrize('module', sorted(MODULES))
def test_the_halves_meet_only_at_the_seam(module):
  own, libraries = imports(MODULES[module])
  folders = {folder(other) for other in own} | {folder(module)}
  if level(module) < 3:
    assert not (folders & HOST and folders & DEVICE), module
  if level(module) < 1.5 and folder(module) not in DEVICE:
    assert not libraries & DEVICE_LIBRARIES, module


def test_every_module_has_a_level():
  assert not [module for module in MODULES if level(module) is None]


def test_training_loads_no_library_that_only_drawing_or_remote_peers_need():
  code = (
    'import sys, mrl_jax.training.loop\n'
    "print(*({'matplotlib', 'jinja2', 'mrl_jax.see.rpc'} & sys.modules.keys()))"
  )
  loaded = subprocess.run(
    [sys.executable, '-c', code],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  assert loaded.stdout.split() == []
