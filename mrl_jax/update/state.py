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
  """What an update takes and gives back."""

  step: jax.Array  # int32, number of updates so far; the policy's version.
  params: nnx.State  # Trained parameters by name.
  opt_state: optax.OptState  # Moments, sharded as the parameters are.
  reference: nnx.State | None = None  # Initial parameters, for a KL penalty.


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateSpec:
  """What a `TrainState` consists of, and where it lives."""

  model: ModelConfig
  mesh: Mesh
  optimizer: optax.GradientTransformation
  reference: bool = False  # Whether the state keeps the initial parameters.

  @functools.cached_property
  def _params(self) -> nnx.State:
    return decoder.abstract(self.model)[1]

  def shardings(self) -> TrainState:
    """The sharding of every leaf of the state; allocates nothing."""
    params = sharding.params(self._params, self.mesh)
    replicated = sharding.replicated(self.mesh)
    opt_state = optimizer_lib.places(
      self.optimizer, self._params, params, replicated
    )
    reference = params if self.reference else None
    return TrainState(replicated, params, opt_state, reference)

  def abstract(self) -> TrainState:
    """Shapes and shardings of the state; allocates nothing."""
    return jax.tree.map(
      lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
      jax.eval_shape(self._init, self._params),
      self.shardings(),
    )

  def random_params(self, key: jax.Array) -> nnx.State:
    """Random trained parameters, made shard by shard where they live."""

    def make(key):
      return decoder.split(decoder.Decoder(self.model, nnx.Rngs(key)))[1]

    return jax.jit(make, out_shardings=self.shardings().params)(key)

  def fresh(self, params: nnx.State) -> TrainState:
    """The state of a policy with these parameters, before any update."""
    return self._fresh(params)

  @functools.cached_property
  def _fresh(self):
    return jax.jit(self._init, out_shardings=self.shardings())

  def _init(self, params):
    return TrainState(
      jnp.int32(0),
      params,
      self.optimizer.init(params),
      params if self.reference else None,
    )
