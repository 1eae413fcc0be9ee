import jax
import numpy as np

from mrl_jax.models import decoder as decoder_lib
from mrl_jax.models import sharding
from mrl_jax.sampling import move
from tests import decoders


def test_moved_weights_have_the_dtype_of_use_and_their_places_while_sampling():
  train, decode = decoders.mesh(1, 2, 1), decoders.mesh(2, 1, 1)
  for dtype in ('bfloat16', 'float32'):
    decoder = decoders.decoder(dtype=dtype)
    _, params, _ = decoder_lib.split(decoder)
    placed = jax.device_put(params, sharding.params(params, train))
    moved = move.build(decoder.config, train, decode)(placed)
    expected = decoder_lib.cast(params, dtype)
    places = sharding.params(params, decode)
    for x, y, place in zip(
      *map(jax.tree.leaves, (moved, expected, places)), strict=True
    ):
      assert x.dtype == y.dtype
      assert x.sharding.is_equivalent_to(place, x.ndim)
      np.testing.assert_array_equal(x, y)


def test_weights_that_are_as_sampling_needs_them_are_not_copied():
  mesh, decoder = decoders.mesh(2, 1, 1), decoders.decoder(dtype='bfloat16')
  _, params, _ = decoder_lib.split(decoder)
  placed = jax.device_put(params, sharding.params(params, mesh))
  moved = move.build(decoder.config, mesh, mesh)(placed)
  for (path, x), (_, y) in zip(
    moved.flat_state(), placed.flat_state(), strict=True
  ):
    # The scales of norms stay in float32.
    assert (x.get_value() is y.get_value()) == (path[-1] == 'scale')
