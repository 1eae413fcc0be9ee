from flax import nnx
import jax
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from mrl_jax import checks
from mrl_jax.models import decoder
from mrl_jax.models import sharding
from tests import decoders
from tests import examples


def test_mesh_axes_are_those_of_the_table():
  spec = sharding.param_spec(('embed', 'heads', 'head'))
  assert spec == PartitionSpec('fsdp', 'tensor', None)


def test_collisions_and_unknown_axes_raise():
  with pytest.raises(ValueError, match='collide'):
    sharding.param_spec(('heads', 'mlp'))
  with pytest.raises(KeyError, match='haeds'):
    sharding.param_spec(('haeds',))


def test_every_matrix_is_sharded_while_training():
  _, params, _ = decoder.abstract(examples.model())
  places = sharding.params(params, decoders.mesh(1, 2, 2))
  for path, place in nnx.to_flat_state(places):
    replicated = place.get_value().spec == PartitionSpec(None)
    assert replicated == ('norm' in str(path)), path


def test_one_error_lists_every_dimension_that_the_mesh_does_not_divide():
  _, params, _ = decoder.abstract(examples.model(vocab_size=49))
  with pytest.raises(checks.InputError, match='mesh does not divide') as error:
    sharding.params(params, decoders.mesh(1, 1, 4))
  assert 'embed_VD: vocab = 49 over tensor = 4' in str(error.value)
  assert 'kv_heads = 2 over tensor = 4' in str(error.value)


def test_by_rows_does_nothing_without_a_mesh():
  x = np.ones((4, 2), np.float32)
  assert sharding.by_rows(x) is x


def test_by_rows_spreads_rows_over_a_mesh():
  with jax.set_mesh(decoders.mesh(2, 2, 2)):
    placed = jax.jit(sharding.by_rows)(np.ones((4, 2), np.float32))
  assert placed.addressable_shards[0].data.shape == (1, 2)


def on_a_mesh_and_without(function, shape, *args):
  """Values and gradients in the first argument, computed in both ways."""

  def total(matrix, *rest):
    out = function(matrix, *rest)
    return (
      out * np.arange(out.size, dtype=np.float32).reshape(out.shape)
    ).sum()

  differentiated = jax.value_and_grad(total)
  with jax.set_mesh(decoders.mesh(*shape)):
    on_mesh = jax.jit(differentiated)(*args)
  return on_mesh, jax.jit(lambda *args: differentiated(*args))(*args)


MESHES = pytest.mark.parametrize('shape', [(2, 2, 2), (1, 4, 1), (4, 1, 2)])


@MESHES
def test_tokens_are_looked_up_on_a_mesh_as_without_one(shape):
  rng = np.random.default_rng(0)
  embed_VD = rng.normal(size=(6, 8)).astype(np.float32)
  tokens_BT = rng.integers(0, 6, (8, 3))

  def look_up(embed_VD, tokens_BT):
    return sharding.lookup(embed_VD, tokens_BT, 'float32')

  found, expected = on_a_mesh_and_without(look_up, shape, embed_VD, tokens_BT)
  for x, y in zip(found, expected, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-6)


@MESHES
def test_a_matrix_is_applied_to_the_tokens_of_each_device(shape):
  rng = np.random.default_rng(0)
  matrix_DV = rng.normal(size=(8, 6)).astype(np.float32)
  x_BTD = rng.normal(size=(8, 3, 8)).astype(np.float32)

  def apply(matrix_DV, x_BTD):
    return sharding.by_token(lambda m, x: (x @ m).sum(-1), matrix_DV, x_BTD)

  found, expected = on_a_mesh_and_without(apply, shape, matrix_DV, x_BTD)
  for x, y in zip(found, expected, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5)
