"""One update of a policy: pure, `state, parts -> state`."""

import collections
from collections.abc import Mapping, Sequence
import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
import optax

from mrl_jax.architecture import ModelConfig
from mrl_jax.models import decoder
from mrl_jax.models import logps
from mrl_jax.models import sharding
from mrl_jax.update import objectives as objectives_lib
from mrl_jax.update import state as state_lib


class Update:
  """An update on one mini-batch: `update(state, parts, frozen)`.

  Each part's gradient is compiled by itself, once for each shape of its
  micro-batches, so that the numbers of shapes of the parts add up rather than
  multiply. With one part the update is that of this part, bit for bit, whatever
  other objectives there are.
  """

  def __init__(
    self,
    spec: state_lib.StateSpec,
    objectives: Mapping[str, objectives_lib.Objective],
    logit_chunk: int,
    temperature: float = 1.0,
  ):
    """The policy is softmax(logits / temperature).

    The logits of `logit_chunk` tokens are in memory at once.
    """
    self._mesh = spec.mesh
    self.gradients = {
      name: build_gradient(
        spec.model, spec.mesh, objective, logit_chunk, temperature
      )
      for name, objective in objectives.items()
    }
    self.zeros = build_zeros(spec.model, spec.mesh)
    self.apply = build_apply(spec)

  def __call__(
    self,
    state: state_lib.TrainState,
    parts: Mapping[str, Sequence[objectives_lib.PackedRows]],
    frozen: nnx.State = decoder.NO_PARAMS,
  ) -> tuple[state_lib.TrainState, dict[str, list[jax.Array]]]:
    """Returns the next state, and statistics of every micro-batch.

    Args:
      state: is consumed.
      parts: micro-batches by the names of the objectives. One without
        micro-batches is skipped: an update without any signal is still a step.
      frozen: the parameters under adapters.

    Statistics are those of the objectives, by 'part/name', with 'grad_norm'; see
    `joined`.
    """
    statistics = collections.defaultdict(list)
    with jax.set_mesh(self._mesh):
      grads = self.zeros()
      for part, micro_batches in parts.items():
        for rows in micro_batches:
          grads, found = self.gradients[part](
            grads, state.params, frozen, placed(rows, self._mesh)
          )
          for name, x in found.items():
            statistics[f'{part}/{name}'].append(x)
      state, norm = self.apply(state, grads)
    return state, {**statistics, 'grad_norm': [norm]}


def placed(
  rows: objectives_lib.PackedRows, mesh: Mesh
) -> objectives_lib.PackedRows:
  """A micro-batch on its devices, so that one program serves all of them."""
  return sharding.put(rows, sharding.rows(mesh))


def joined(
  statistics: Mapping[str, Sequence[np.ndarray]],
) -> dict[str, np.ndarray]:
  """Statistics of all micro-batches: sums, or maxima of 'part/max_...'."""
  return {
    name: functools.reduce(np.maximum if '/max_' in name else np.add, found)
    for name, found in statistics.items()
  }


def build_zeros(model: ModelConfig, mesh: Mesh):
  """Jits `zeros() -> grads`, in float32 whatever the dtype of the parameters."""
  _, params, _ = decoder.abstract(model)

  def zeros():
    return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)

  return jax.jit(zeros, out_shardings=sharding.params(params, mesh))


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

  It adds the gradients of a micro-batch to `grads`, which it consumes.
  """
  graphdef, *parts = decoder.abstract(model)
  places = [sharding.params(part, mesh) for part in parts]

  def gradient(grads, params, frozen, rows: objectives_lib.PackedRows):
    def loss(params):
      network = nnx.merge(graphdef, params, frozen)
      scores = _scores(
        network, rows, logit_chunk, temperature, objective.reads_entropy
      )
      objective_BS, statistics = objective.function(scores, rows)
      return -jnp.sum(rows.weight_BS * objective_BS), statistics

    (value, sums), more = jax.value_and_grad(loss, has_aux=True)(params)
    return optax.tree_utils.tree_add(grads, more), {'loss': value, **sums}

  return jax.jit(
    gradient,
    in_shardings=(places[0], *places, sharding.rows(mesh)),
    out_shardings=(places[0], sharding.replicated(mesh)),
    donate_argnums=0,
    compiler_options=sharding.compiler_options(mesh),
  )


def build_scorer(
  model: ModelConfig, mesh: Mesh, logit_chunk: int, temperature: float = 1.0
):
  """Jits `score(params, frozen, rows) -> logp`, f32 [B, S] of a micro-batch."""
  graphdef, *parts = decoder.abstract(model)
  places = [sharding.params(part, mesh) for part in parts]

  def score(params, frozen, rows: objectives_lib.PackedRows):
    network = nnx.merge(graphdef, params, frozen)
    return _scores(network, rows, logit_chunk, temperature).logp_BS

  return jax.jit(
    score,
    in_shardings=(*places, sharding.rows(mesh)),
    out_shardings=sharding.replicated(mesh),
    compiler_options=sharding.compiler_options(mesh),
  )


def _scores(network, rows, logit_chunk, temperature, entropy=False):
  """Scores of response tokens; 0 at prompts and padding."""
  scores = logps.response_scores(
    network, rows.tokens_BS, rows.row_BS, logit_chunk, entropy, temperature
  )
  return jax.tree.map(
    lambda x_BS: jnp.where(rows.is_response_BS, x_BS, 0.0), scores
  )
