"""The architecture's table of levels, held by the imports of every module.

  6   launch, configs
  5   training/loop   export
  4   evaluation   training: what the loop is made of
  3   algorithms  inspection  study  report  training/{batch,worker}  <- the seam
  2   training/{state,optimizer,update,objectives,checkpoint,metrics,display}
      mwra/meshes   data/pipeline
  1   HOST HALF (no jax)                     DEVICE HALF (no records)
      see thl sharing rewards data           models sampling losses
      mwra/{cost,planner}   bandit
  0   records  architecture  config  checks  files  texts  hugging_face

A module imports from lower levels, or from its own folder. The halves never
import each other, and below the seam nothing imports both.
"""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
LEVELS = {
  'records': 0,
  'architecture': 0,
  'config': 0,
  'checks': 0,
  'files': 0,
  'texts': 0,
  'hugging_face': 0,
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
  'training.state': 2,
  'training.optimizer': 2,
  'training.update': 2,
  'training.objectives': 2,
  'training.checkpoint': 2,
  'training.metrics': 2,
  'training.display': 2,
  'algorithms': 3,
  'inspection': 3,
  'study': 3,
  'report': 3,
  'training.batch': 3,
  'training.worker': 3,
  'evaluation': 4,
  'training': 4,
  'export': 5,
  'training.loop': 5,
}
HOST = {'see', 'thl', 'sharing', 'rewards', 'data', 'mwra', 'bandit'}
DEVICE = {'models', 'sampling', 'losses'}
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
        known = ['.'.join(parts[:n]) for n in (2, 1)]
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
  if level(module) < 2 and folder(module) not in DEVICE:
    assert not libraries & DEVICE_LIBRARIES, module


def test_every_module_has_a_level():
  assert not [module for module in MODULES if level(module) is None]
