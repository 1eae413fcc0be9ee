"""A run of two processes, against the same run of one process."""

import os

import jax
import msgspec
import numpy as np
import pytest

from mrl_jax import config as config_lib
from mrl_jax.training import job as job_lib
from tests import hosts
from tests import runs


def config(name):
  """A job in which policies train in turn, on all devices; it has its own cache."""
  cache = runs.folder(f'cache-{name}')
  os.makedirs(cache)
  os.symlink(os.path.join(runs.cache(), 'tfds'), os.path.join(cache, 'tfds'))
  return runs.config(
    **{
      'cache_dir': cache,
      'mwra.time_share': True,
      'sample.refills': 1,
      'warm_start.steps': 5,
      'eval.prompts': 8,
    }
  )


def leaves(tree, prefix=''):
  """Numbers, texts and lists of a nested dict, by path."""
  if not isinstance(tree, dict):
    return {prefix: tree}
  return {
    path: leaf
    for name, part in tree.items()
    for path, leaf in leaves(part, f'{prefix}/{name}').items()
  }


def assert_close(ours, theirs):
  ours, theirs = leaves(ours), leaves(theirs)
  assert ours.keys() == theirs.keys()
  for path, x in ours.items():
    if isinstance(x, float):
      assert theirs[path] == pytest.approx(x, rel=1e-3, abs=1e-4), path
    else:
      assert theirs[path] == x, path


@pytest.mark.slow
def test_two_processes_train_as_one_does(monkeypatch):
  together = runs.folder('two')
  flat = config_lib.flat(config('two'))
  assert hosts.values(hosts.run('train', together, flat)) == [None, None]
  devices, mine = jax.devices()[:4], config('one')
  monkeypatch.setattr(jax, 'devices', lambda: devices)
  alone = runs.run('one', mine).workdir
  for policy, rows in runs.rows(alone).items():
    for row, other in zip(rows, runs.rows(together)[policy], strict=True):
      assert_close(*map(msgspec.to_builtins, (row, other)))
  job = job_lib.build(mine, alone)
  (states, host), (other, other_host) = (
    runs.newest_checkpoint(folder, job) for folder in (alone, together)
  )
  for x, y in zip(jax.tree.leaves(states), jax.tree.leaves(other), strict=True):
    np.testing.assert_allclose(x, y, atol=2e-4)
  for part in (host, other_host):
    part['progress'].pop('seconds')
    part.pop('exchange')
  assert_close(host, other_host)
