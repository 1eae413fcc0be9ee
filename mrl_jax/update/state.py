"""The state of one policy's training: a pytree, sharded over its mesh."""

import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import optax

from mrl_jax.architecture import ModelConfig
from mrl_jax.models import decoder
from mrl_jax.models import sharding
from mrl_jax.update import optimizer as optimizer_lib


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """What an update takes and gives back.

  Attributes:
    step: int32, updates done; the policy's version.
    params: parameters by name, those that are trained.
    opt_state: the optimizer's moments, sharded as the parameters are.
    reference: the parameters that it began with, where a KL penalty needs them.
  """

  step: jax.Array
  params: nnx.State
  opt_state: optax.OptState
  reference: nnx.State | None = None


def shardings(
  model: ModelConfig,
  optimizer: optax.GradientTransformation,
  mesh: Mesh,
  reference: bool = False,
) -> TrainState:
  """Where each leaf of the state lives; allocates nothing."""
  _, params, _ = decoder.abstract(model)
  places = sharding.params(params, mesh, sharding.TRAIN)
  opt_state = optimizer_lib.places(
    optimizer, params, places, sharding.replicated(mesh)
  )
  return TrainState(
    sharding.replicated(mesh), places, opt_state, places if reference else None
  )


def init_params(model: ModelConfig, mesh: Mesh, key: jax.Array) -> nnx.State:
  """Random parameters to train, made shard by shard where they live."""
  _, params, _ = decoder.abstract(model)
  places = sharding.params(params, mesh, sharding.TRAIN)
  return jax.jit(functools.partial(_init_params, model), out_shardings=places)(
    key
  )


def abstract(
  model: ModelConfig,
  optimizer: optax.GradientTransformation,
  mesh: Mesh,
  reference: bool = False,
) -> TrainState:
  """The shapes of a state and where it lives, without any arrays."""
  _, params, _ = decoder.abstract(model)
  shapes = jax.eval_shape(
    functools.partial(_fresh, optimizer=optimizer, reference=reference), params
  )
  return jax.tree.map(
    lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
    shapes,
    shardings(model, optimizer, mesh, reference),
  )


def fresh(
  params: nnx.State,
  model: ModelConfig,
  optimizer: optax.GradientTransformation,
  mesh: Mesh,
  reference: bool = False,
) -> TrainState:
  """The state of a policy that has these parameters and no updates yet.

  With `reference` it keeps a second copy of them.
  """
  places = shardings(model, optimizer, mesh, reference)
  init = functools.partial(_fresh, optimizer=optimizer, reference=reference)
  return jax.jit(init, out_shardings=places)(params)


def _fresh(params, *, optimizer, reference):
  return TrainState(
    jnp.int32(0),
    params,
    optimizer.init(params),
    params if reference else None,
  )


def _init_params(model, key):
  _, params, _ = decoder.split(decoder.Decoder(model, nnx.Rngs(key)))
  return params
