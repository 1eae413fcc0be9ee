import contextlib
import functools

import jax
from jax.sharding import Mesh
import numpy as np
import optax

from mrl_jax import config
from mrl_jax.update import checkpoint
from mrl_jax.update import state as state_lib
from tests import examples


@functools.cache
def state(seed=0):
  devices = np.array(jax.devices()[:4]).reshape(1, 4, 1)
  mesh = Mesh(devices, config.MESH_AXES)
  params = state_lib.init_params(examples.model(), mesh, jax.random.key(seed))
  return state_lib.fresh(params, examples.model(), optax.adam(1e-3), mesh)


def checkpoints(folder, keep=2):
  return contextlib.closing(checkpoint.Checkpoints(str(folder), keep))


def assert_same(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(x, y)
    assert x.sharding == y.sharding


def test_states_come_back_with_their_values_and_places(tmp_path):
  with checkpoints(tmp_path) as written:
    written.save(3, {'a': state(), 'b': state(1)}, {'rounds': 3})
  with checkpoints(tmp_path) as read:
    states, host = read.restore({'a': state(1), 'b': state()})
  assert_same(states['a'], state())
  assert_same(states['b'], state(1))
  assert host == {'rounds': 3}


def test_the_newest_are_kept(tmp_path):
  with checkpoints(tmp_path) as written:
    for rounds in range(4):
      written.save(rounds, {'a': state()}, {'rounds': rounds})
  assert len(list(tmp_path.iterdir())) == 2
  with checkpoints(tmp_path) as read:
    assert read.restore({'a': state()})[1] == {'rounds': 3}


def test_nothing_is_restored_from_nothing(tmp_path):
  with checkpoints(tmp_path) as read:
    assert read.restore({'a': state()}) is None
  path = str(tmp_path / 'params')
  assert checkpoint.restore_params(path, state().params) is None


def test_folders_may_be_relative(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  checkpoint.save_params('params', state().params)
  assert_same(
    checkpoint.restore_params('params', state(1).params), state().params
  )
  with checkpoints('rounds') as written:
    written.save(1, {'a': state()}, {})
  assert (tmp_path / 'rounds' / 'round_1').is_dir()


def test_parameters_alone(tmp_path):
  path = str(tmp_path / 'params')
  checkpoint.save_params(path, state().params)
  assert_same(checkpoint.restore_params(path, state(1).params), state().params)


def test_a_checkpoint_is_known_once_it_is_whole(tmp_path):
  with checkpoints(tmp_path) as written:
    assert written.save(1, {'a': state()}, {}) is None
    assert written.save(2, {'a': state()}, {}) == 1
    assert written.save(3, {'a': state()}, {}) == 2
