import functools

from flax import nnx
import jax
from jax.sharding import Mesh
import numpy as np
import optax

from mrl_jax import config
from mrl_jax.update import state as state_lib
from tests import examples

MODEL = examples.model()


def mesh(first):
  devices = np.array(jax.devices()[first : first + 4]).reshape(1, 2, 2)
  return Mesh(devices, config.MESH_AXES)


def spec(mesh):
  return state_lib.StateSpec(
    model=MODEL, mesh=mesh, optimizer=optax.adamw(1e-3)
  )


@functools.cache
def fresh(first):
  made = spec(mesh(first))
  return made.fresh(made.random_params(jax.random.key(0)))


def test_two_policies_live_on_disjoint_devices():
  one, other = (
    {d for x in jax.tree.leaves(fresh(first)) for d in x.devices()}
    for first in (0, 4)
  )
  assert one == set(jax.devices()[:4])
  assert other == set(jax.devices()[4:])


def test_nothing_that_the_table_shards_is_replicated():
  state = fresh(0)
  moments = state.opt_state[0]
  for tree in (state.params, moments.mu, moments.nu):
    for path, param in nnx.to_flat_state(tree):
      x = param.get_value()
      (shard, *_) = x.addressable_shards
      whole = 'norm' in str(path)
      assert shard.data.size == (x.size if whole else x.size // 4), path


def test_where_parameters_live_does_not_change_them():
  one = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), config.MESH_AXES)
  alone = spec(one).random_params(jax.random.key(0))
  for x, y in zip(
    jax.tree.leaves(alone), jax.tree.leaves(fresh(0).params), strict=True
  ):
    np.testing.assert_allclose(x, y, rtol=1e-6)


def test_shapes_and_shardings_are_known_without_arrays():
  abstract = spec(mesh(0)).abstract()
  for x, y in zip(*map(jax.tree.leaves, (abstract, fresh(0))), strict=True):
    assert (x.shape, x.dtype, x.sharding) == (y.shape, y.dtype, y.sharding)
