import contextlib
import functools
import shutil

import jax
from jax.sharding import Mesh
import numpy as np
import optax
import pytest

from mrl_jax import checks
from mrl_jax import config
from mrl_jax.update import checkpoint
from mrl_jax.update import state as state_lib
from tests import examples


@functools.cache
def state(fill=0.0):
  """A state that is sharded over four devices, all of whose values are equal."""
  devices = np.array(jax.devices()[:4]).reshape(1, 4, 1)
  spec = state_lib.StateSpec(
    model=examples.model(num_layers=1),
    mesh=Mesh(devices, config.MESH_AXES),
    optimizer=optax.adam(1e-3),
  )
  return jax.tree.map(
    lambda x: jax.device_put(np.full(x.shape, fill, x.dtype), x.sharding),
    spec.abstract(),
  )


def checkpoints(folder, keep=2):
  return contextlib.closing(checkpoint.Checkpoints(str(folder), keep))


def assert_same(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(x, y)
    assert x.sharding == y.sharding


def test_states_come_back_with_their_values_and_shardings(tmp_path):
  with checkpoints(tmp_path) as written:
    written.save(3, {'a': state(), 'b': state(1.0)}, {'rounds': 3})
  with checkpoints(tmp_path) as read:
    states, host = read.restore({'a': state(1.0), 'b': state()})
  assert_same(states, {'a': state(), 'b': state(1.0)})
  assert host == {'rounds': 3}


def test_the_newest_checkpoints_are_kept_and_known_once_they_are_whole(
  tmp_path,
):
  with checkpoints(tmp_path) as written:
    before = [
      written.save(rounds, {'a': state()}, {'rounds': rounds})
      for rounds in range(4)
    ]
  assert before == [None, 0, 1, 2]
  assert sorted(x.name for x in tmp_path.iterdir()) == ['round_2', 'round_3']
  with checkpoints(tmp_path) as read:
    assert read.restore({'a': state()})[1] == {'rounds': 3}


def test_a_half_written_checkpoint_is_removed_and_never_read(tmp_path):
  with checkpoints(tmp_path) as written:
    written.save(1, {'a': state()}, {'rounds': 1})
  half = tmp_path / 'round_2.orbax-checkpoint-tmp'
  shutil.copytree(tmp_path / 'round_1', half)
  shutil.rmtree(half / 'a')
  with checkpoints(tmp_path) as read:
    assert read.restore({'a': state()})[1] == {'rounds': 1}
  assert not half.exists()


def test_nothing_is_restored_from_nothing(tmp_path):
  with checkpoints(tmp_path) as read:
    assert read.restore({'a': state()}) is None
  path = str(tmp_path / 'params')
  assert checkpoint.restore_params(path, state().params) is None


def test_folders_may_be_relative(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  checkpoint.save_params('params', state().params)
  assert_same(
    checkpoint.restore_params('params', state(1.0).params), state().params
  )
  with checkpoints('rounds') as written:
    written.save(1, {'a': state()}, {})
  assert (tmp_path / 'rounds' / 'round_1').is_dir()


def test_the_parameters_of_one_policy_can_be_read_alone(tmp_path):
  with pytest.raises(checks.InputError, match='has no checkpoint yet'):
    checkpoint.read_params(str(tmp_path), None, 'a', state().params)
  with checkpoints(tmp_path) as written:
    for rounds in (1, 2):
      states = {'a': state(float(rounds)), 'b': state()}
      written.save(rounds, states, {})
  for rounds, expected in ((None, 2), (1, 1)):
    params, found = checkpoint.read_params(
      str(tmp_path), rounds, 'a', state().params
    )
    assert found == expected
    assert_same(params, state(float(expected)).params)
  with pytest.raises(checks.InputError, match='of 9 rounds, but of 1, 2'):
    checkpoint.read_params(str(tmp_path), 9, 'a', state().params)
