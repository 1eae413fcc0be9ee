import contextlib
import functools
import json
import os
import random
import shutil

from absl import logging
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


@pytest.fixture(scope='module')
def two(tmp_path_factory):
  """A folder with checkpoints of one and of two rounds."""
  folder = tmp_path_factory.mktemp('two')
  with checkpoints(folder) as written:
    for rounds in (1, 2):
      states = {'a': state(float(rounds)), 'b': state()}
      written.save(rounds, states, {'rounds': rounds})
  return folder


def damage(folder, seed):
  """Cuts, changes or deletes a file of the newest checkpoint."""
  dice = random.Random(seed)
  files = [p for p in (folder / 'round_2').rglob('*') if p.is_file()]
  path = dice.choice(sorted(files))
  data = bytearray(path.read_bytes())
  how = ('cut', 'flip', 'delete')[seed % 3]
  if how == 'delete':
    path.unlink()
    return
  if how == 'cut':
    del data[dice.randrange(len(data)) :]
  else:
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
  path.write_bytes(data)


@pytest.mark.parametrize(
  'seeds',
  [range(3), pytest.param(range(60), marks=pytest.mark.slow)],
  ids=['few', 'sixty'],
)
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(
  two, tmp_path, seeds
):
  found = []
  for seed in seeds:
    folder = tmp_path / str(seed)
    shutil.copytree(two, folder)
    damage(folder, seed)
    with checkpoints(folder) as read:
      states, host = read.restore({'a': state(), 'b': state()})
      rounds = host['rounds']
      assert_same(states, {'a': state(float(rounds)), 'b': state()})
      assert (folder / 'damaged-round_2').exists() == (rounds == 1)
      read.save(2, {'a': state(), 'b': state()}, {})  # As the run goes on.
    assert checkpoint.newest(str(folder)) == 2
    found.append(rounds)
  assert {*found} <= {1, 2}  # No restore needs some of the files.
  assert found.count(1) > len(found) / 2


def flip(path):
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


def test_damage_is_named_and_without_a_sound_checkpoint_nothing_starts(
  two, tmp_path, caplog
):
  folder = tmp_path / 'run'
  shutil.copytree(two, folder)
  flip(folder / 'round_2' / 'a' / '_METADATA')
  with pytest.raises(checks.InputError, match="'a/_METADATA' has changed"):
    checkpoint.read_params(str(folder), None, 'b', state().params)
  logging.use_absl_handler()
  with caplog.at_level('WARNING', logger='absl'), checkpoints(folder) as read:
    assert read.restore({'a': state(), 'b': state()})[1] == {'rounds': 1}
  assert (
    f"{folder}/round_2 is damaged: 'a/_METADATA' has changed" in caplog.text
  )
  assert 'kept as damaged-round_2' in caplog.text
  flip(folder / 'round_1' / 'digests.json')
  for _ in range(2):  # Nor does it begin anew if it is tried again.
    with (
      checkpoints(folder) as read,
      pytest.raises(checks.InputError, match='has damaged checkpoints only'),
    ):
      read.restore({'a': state(), 'b': state()})


def test_digests_are_of_all_that_a_restore_reads(two):
  folder = two / 'round_2'
  digests = json.loads((folder / 'digests.json').read_text())
  others = {
    os.path.relpath(path, folder)
    for path in folder.rglob('*')
    if path.is_file()
  } - digests.keys()
  assert {os.path.basename(name) for name in others} == {
    'digests.json',
    '_CHECKPOINT_METADATA',
    'commit_success.txt',
  }


def test_a_checkpoint_is_replaced_if_there_is_another(tmp_path):
  with checkpoints(tmp_path) as written:
    before = [
      written.save(1, {'a': state()}, {'evaluated': False}),
      written.save(1, {'a': state()}, {'evaluated': True}),  # It is the last.
      written.save(2, {'a': state()}, {'evaluated': False}),
      written.save(2, {'a': state()}, {'evaluated': True}),
    ]
  assert before == [None, 1, 1, 1]
  for rounds, evaluated in ((2, True), (1, False)):
    with checkpoints(tmp_path) as read:
      assert read.newest == checkpoint.newest(str(tmp_path)) == rounds
      assert read.restore({'a': state()})[1] == {'evaluated': evaluated}
    shutil.rmtree(tmp_path / f'round_{rounds}')
  assert checkpoint.newest(str(tmp_path / 'none')) is None


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
