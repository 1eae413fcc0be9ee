"""The state of one policy's training: a pytree, sharded over its mesh."""

import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import optax

from mrl_jax.config import ModelConfig
from mrl_jax.models import decoder
from mrl_jax.models import sharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """What an update takes and gives back.

  Attributes:
    step: int32, updates done; the policy's version.
    params: parameters by name, float32.
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
  _, params = decoder.abstract(model)
  places = sharding.params(params, mesh, sharding.TRAIN)
  opt_state = optax.tree_utils.tree_map_params(
    optimizer,
    lambda _, place: place,
    jax.eval_shape(optimizer.init, params),
    places,
    transform_non_params=lambda _: sharding.replicated(mesh),
  )
  return TrainState(
    sharding.replicated(mesh), places, opt_state, places if reference else None
  )


def init_params(model: ModelConfig, mesh: Mesh, key: jax.Array) -> nnx.State:
  """Random parameters, made shard by shard where they live."""
  _, params = decoder.abstract(model)
  places = sharding.params(params, mesh, sharding.TRAIN)
  return jax.jit(functools.partial(_init_params, model), out_shardings=places)(
    key
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

  def init(params):
    return TrainState(
      jnp.int32(0),
      params,
      optimizer.init(params),
      params if reference else None,
    )

  places = shardings(model, optimizer, mesh, reference)
  return jax.jit(init, out_shardings=places)(params)


def _init_params(model, key):
  return nnx.state(decoder.Decoder(model, nnx.Rngs(key)))
