"""Moves the weights of a policy from its training mesh to its sampling mesh."""

import functools

import jax
from jax.sharding import Mesh

from mrl_jax.architecture import ModelConfig
from mrl_jax.models import decoder as decoder_lib
from mrl_jax.models import sharding


def build(model: ModelConfig, train: Mesh, decode: Mesh, part: int = 0):
  """Builds `move(params)` from the training mesh to the sampling mesh.

  It casts the parameters to the dtype in which they are used. `part` is 0 for
  trained and 1 for frozen parameters, as `decoder.split` has them. The meshes
  have the same devices in the same order. What does not change is not copied.
  """
  like, target = _targets(model, decode, part)
  source = sharding.params(like, train)
  return functools.partial(jax.tree.map, _convert, like, source, target)


def abstract(model: ModelConfig, train: Mesh, decode: Mesh, part: int = 0):
  """Shapes and shardings of what `move` of `build` returns."""
  params = decoder_lib.abstract(model)[1 + part]

  def moved(x, like, source, target):
    stays = _stays(x, like, source, target)
    place = source if stays else target
    return jax.ShapeDtypeStruct(x.shape, like.dtype, sharding=place)

  like, target = _targets(model, decode, part)
  return jax.tree.map(moved, params, like, sharding.params(like, train), target)


def _targets(model, decode, part):
  """Shapes and dtypes of what sampling uses, and its shardings."""
  params = decoder_lib.abstract(model)[1 + part]
  cast = functools.partial(decoder_lib.cast, dtype=model.dtype)
  return jax.eval_shape(cast, params), sharding.params(params, decode)


def _stays(x, like, source, target) -> bool:
  return x.dtype == like.dtype and source.is_equivalent_to(target, x.ndim)


def _convert(like, source, target, x):
  """One array at a time: all at once, XLA would hold the result twice."""
  if _stays(x, like, source, target):
    return x
  return _converter(like.dtype, target)(x)


@functools.cache
def _converter(dtype, target):
  return jax.jit(lambda x: x.astype(dtype), out_shardings=target)
