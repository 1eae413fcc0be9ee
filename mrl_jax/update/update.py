"""One update of a policy: pure, `state, parts -> state`."""

from collections.abc import Mapping
import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import optax

from mrl_jax.architecture import ModelConfig
from mrl_jax.models import decoder
from mrl_jax.models import logps
from mrl_jax.models import sharding
from mrl_jax.update import objectives as objectives_lib
from mrl_jax.update import state as state_lib


def build(
  spec: state_lib.StateSpec,
  objectives: Mapping[str, objectives_lib.Objective],
  logit_chunk: int,
  temperature: float = 1.0,
):
  """Builds `update(state, parts, frozen) -> (state, statistics)`.

  Each part's gradient is compiled by itself, so that the numbers of shapes of
  the parts add up rather than multiply. With one part the update is that of
  this part, bit for bit, whatever other objectives there are.

  It consumes the `TrainState`. `parts` has `PackedRows` in stacked micro-batches
  by the names of `objectives`, and `frozen` the parameters under adapters.
  Statistics are those of the objectives, by 'part/name', with 'grad_norm'. The
  logits of `logit_chunk` tokens are in memory at once. The policy is
  softmax(logits / temperature).
  """
  gradients = {
    name: build_gradient(
      spec.model, spec.mesh, objective, logit_chunk, temperature
    )
    for name, objective in objectives.items()
  }

  zeros, apply = build_zeros(spec.model, spec.mesh), build_apply(spec)

  def update(
    state: state_lib.TrainState,
    parts: Mapping[str, objectives_lib.PackedRows],
    frozen: nnx.State = decoder.NO_PARAMS,
  ):
    statistics = {}
    with jax.set_mesh(spec.mesh):
      grads = zeros()
      for name, rows in parts.items():
        grads, sums = gradients[name](grads, state.params, frozen, rows)
        statistics |= {f'{name}/{key}': value for key, value in sums.items()}
      state, statistics['grad_norm'] = apply(state, grads)
    return state, statistics

  return update


def build_zeros(model: ModelConfig, mesh: Mesh):
  """Jits `zeros() -> grads`, in float32 whatever the dtype of the parameters."""
  _, params, _ = decoder.abstract(model)
  return jax.jit(
    lambda: jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params),
    out_shardings=sharding.params(params, mesh),
  )


def build_apply(spec: state_lib.StateSpec):
  """Jits `apply(state, grads) -> (state, norm of grads)`; it consumes the state."""

  @functools.partial(
    jax.jit,
    out_shardings=(spec.shardings(), sharding.replicated(spec.mesh)),
    donate_argnums=0,
  )
  def apply(state: state_lib.TrainState, grads):
    updates, opt_state = spec.optimizer.update(
      grads, state.opt_state, state.params
    )
    params = optax.apply_updates(state.params, updates)
    state = dataclasses.replace(
      state, step=state.step + 1, params=params, opt_state=opt_state
    )
    return state, optax.global_norm(grads)

  return apply


def build_gradient(
  model: ModelConfig,
  mesh: Mesh,
  objective: objectives_lib.Objective,
  logit_chunk: int,
  temperature: float = 1.0,
):
  """Jits `gradient(grads, params, frozen, rows) -> (grads, statistics)`.

  It adds the gradients of a part, one micro-batch after another, to `grads`,
  which it consumes.
  """
  graphdef, *parts = decoder.abstract(model)
  places = [sharding.params(part, mesh) for part in parts]

  def gradient(grads, params, frozen, rows: objectives_lib.PackedRows):
    def loss(params, micro):
      network = nnx.merge(graphdef, params, frozen)
      scores = _scores(
        network, micro, logit_chunk, temperature, objective.reads_entropy
      )
      objective_BT, statistics = objective.function(scores, micro)
      return -jnp.sum(micro.weight_BT * objective_BT), statistics

    def accumulate(grads, micro):
      (value, sums), micro_grads = jax.value_and_grad(loss, has_aux=True)(
        params, micro
      )
      grads = optax.tree_utils.tree_add(grads, micro_grads)
      return grads, {'loss': value, **sums}

    grads, by_micro = jax.lax.scan(accumulate, grads, rows)
    return grads, {
      name: x_M.max(0) if name.startswith('max_') else x_M.sum(0)
      for name, x_M in by_micro.items()
    }

  return jax.jit(
    gradient,
    in_shardings=(places[0], *places, sharding.rows(mesh, 1)),
    out_shardings=(places[0], sharding.replicated(mesh)),
    donate_argnums=0,
    compiler_options=sharding.compiler_options(mesh),
  )


def build_scorer(
  model: ModelConfig, mesh: Mesh, logit_chunk: int, temperature: float = 1.0
):
  """Jits `score(params, frozen, rows) -> logp`, f32 [M, B, T] of stacked rows."""
  graphdef, *parts = decoder.abstract(model)
  places = [sharding.params(part, mesh) for part in parts]

  def score(params, frozen, rows: objectives_lib.PackedRows):
    network = nnx.merge(graphdef, params, frozen)
    return jax.lax.map(
      lambda micro: _scores(network, micro, logit_chunk, temperature).logp_BT,
      rows,
    )

  return jax.jit(
    score,
    in_shardings=(*places, sharding.rows(mesh, 1)),
    out_shardings=sharding.replicated(mesh),
    compiler_options=sharding.compiler_options(mesh),
  )


def _scores(network, micro, logit_chunk, temperature, entropy=False):
  return logps.response_scores(
    network,
    micro.tokens_BS,
    micro.valid_BS,
    micro.weight_BT.shape[-1],
    logit_chunk,
    entropy,
    temperature,
  )
