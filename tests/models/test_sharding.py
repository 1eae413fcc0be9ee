from flax import nnx
import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from mrl_jax import checks
from mrl_jax import config
from mrl_jax.models import decoder
from mrl_jax.models import sharding
from tests import examples


def mesh(*shape):
  devices = np.array(jax.devices()[: int(np.prod(shape))])
  return Mesh(devices.reshape(shape), config.MESH_AXES)


def params(**changes):
  return nnx.state(
    nnx.eval_shape(
      lambda: decoder.Decoder(examples.model(**changes), nnx.Rngs(0))
    )
  )


def test_axes_follow_the_table():
  spec = sharding.param_spec(('embed', 'heads', 'head'), sharding.TRAIN)
  assert spec == PartitionSpec('fsdp', 'tensor', None)
  spec = sharding.param_spec(('embed', 'heads', 'head'), sharding.DECODE)
  assert spec == PartitionSpec(None, 'tensor', None)


def test_collisions_and_unknown_axes_raise():
  with pytest.raises(ValueError, match='collide'):
    sharding.param_spec(('heads', 'mlp'), sharding.TRAIN)
  with pytest.raises(KeyError, match='haeds'):
    sharding.param_spec(('haeds',), sharding.TRAIN)


def test_every_matrix_is_sharded_while_training():
  places = sharding.params(params(), mesh(1, 2, 2), sharding.TRAIN)
  for path, place in nnx.to_flat_state(places):
    whole = PartitionSpec(None)
    assert (place.get_value().spec == whole) == ('norm' in str(path)), path


def test_all_that_the_mesh_does_not_divide_is_told_at_once():
  with pytest.raises(checks.InputError, match='mesh does not divide') as error:
    sharding.params(params(vocab_size=49), mesh(1, 1, 4), sharding.TRAIN)
  assert 'embed_VD: vocab = 49 over tensor = 4' in str(error.value)
  assert 'kv_heads = 2 over tensor = 4' in str(error.value)


def test_by_rows_needs_no_mesh():
  x = np.ones((4, 2), np.float32)
  assert sharding.by_rows(x) is x


def test_by_rows_spreads_rows_over_a_mesh():
  with jax.set_mesh(mesh(2, 2, 2)):
    placed = jax.jit(sharding.by_rows)(np.ones((4, 2), np.float32))
  assert placed.addressable_shards[0].data.shape == (1, 2)
