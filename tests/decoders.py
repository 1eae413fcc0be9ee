"""Small decoders with random parameters, their logits, and meshes."""

import functools

from flax import nnx
import jax
from jax.sharding import Mesh
import numpy as np

from mrl_jax import config as config_lib
from mrl_jax.models import decoder as decoder_lib
from mrl_jax.models import families
from tests import examples


@functools.cache
def decoder(family: str = 'llama', **changes) -> decoder_lib.Decoder:
  """A decoder of a family; shared, so do not change it.

  All parameters are random, also those that are initially all equal: a test
  would not notice if such parameters were mixed up.
  """
  config = families.build(family, **{**examples.SIZES, **changes})
  graphdef, *parts = decoder_lib.abstract(config)
  rng = np.random.default_rng(0)

  def random(path, param):
    values = rng.normal(scale=0.2, size=param.shape)
    if path[-1] == 'scale':
      values += 1 - config.norm_offset
    return param.replace(values.astype(param.dtype))

  return nnx.merge(graphdef, *(nnx.map_state(random, part) for part in parts))


def logits(decoder, tokens_BS, row_BS=None) -> np.ndarray:
  """Next-token logits [B, S, V] at every position, by one forward pass.

  `row_BS` has the ids of packed rows, or is True where tokens of one are.
  """
  if row_BS is None:
    row_BS = np.ones(tokens_BS.shape, bool)
  graphdef, params = nnx.split(decoder)
  return np.asarray(_logits(graphdef, params, tokens_BS, row_BS))


@functools.partial(jax.jit, static_argnums=0)
def _logits(graphdef, params, tokens_BS, row_BS):
  decoder = nnx.merge(graphdef, params)
  return decoder.logits(decoder(tokens_BS, row_BS))


def mesh(*shape: int) -> Mesh:
  """A mesh of the first devices, with sizes of (data, fsdp, tensor)."""
  devices = np.array(jax.devices()[: int(np.prod(shape))])
  return Mesh(devices.reshape(shape), config_lib.MESH_AXES)
