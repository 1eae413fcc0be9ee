"""One update of a policy: pure, `state, parts -> state`."""

from collections.abc import Callable, Mapping
import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import optax

from mrl_jax.config import ModelConfig
from mrl_jax.models import decoder
from mrl_jax.models import logps
from mrl_jax.models import sharding
from mrl_jax.training import state as state_lib


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
  """Rows of one kind: a policy's own, or its peers'.

  Stacked micro-batches have one more axis, M, in front.

  Attributes:
    tokens_BS: left-padded prompts, then right-padded responses.
    valid_BS: False at padding.
    old_logp_BT: log-probabilities under the policy that sampled; 0 at
      padding.
    advantage_B1: of each row.
    weight_BT: of each token in the loss, 0 at padding. They carry the
      averaging over the whole mini-batch, so that a plain sum over
      micro-batches and devices is the loss.
    chunk_BT: the chunk of each token, in [0, T); see `losses/prp.py`.
  """

  tokens_BS: jax.Array
  valid_BS: jax.Array
  old_logp_BT: jax.Array
  advantage_B1: jax.Array
  weight_BT: jax.Array
  chunk_BT: jax.Array


# (logp_BT, one micro-batch of Rows) -> (objective_BT, sums of statistics)
Objective = Callable[[jax.Array, Rows], tuple[jax.Array, dict]]


def build(
  model: ModelConfig,
  optimizer: optax.GradientTransformation,
  mesh: Mesh,
  objectives: Mapping[str, Objective],
  logit_chunk: int,
):
  """Builds `update(state, parts) -> (state, statistics)`.

  Each part's gradient is compiled by itself, so that the shapes of parts add
  up rather than multiply. With one part the update is that of this part, bit
  for bit, whatever other objectives there are.

  Args:
    model: the policy's architecture.
    optimizer: as given to `state.fresh`.
    mesh: of the state.
    objectives: what to maximise on each part, by the part's name.
    logit_chunk: tokens whose logits are in memory at once.

  Returns:
    A function of a `TrainState`, which it consumes, and of `Rows` in stacked
    micro-batches, by the names of `objectives`. The statistics are sums over
    tokens, by 'part/name', with 'grad_norm'.
  """
  graphdef, _ = decoder.abstract(model)
  shardings = state_lib.shardings(model, optimizer, mesh)
  one = sharding.replicated(mesh)
  gradients = {
    name: jax.jit(
      functools.partial(
        _gradient,
        graphdef=graphdef,
        objective=objective,
        logit_chunk=logit_chunk,
      ),
      in_shardings=(shardings.params, sharding.rows(mesh, 1)),
      out_shardings=(shardings.params, one),
    )
    for name, objective in objectives.items()
  }
  apply = jax.jit(
    functools.partial(_apply, optimizer=optimizer),
    out_shardings=(shardings, one),
    donate_argnums=0,
  )

  def update(state: state_lib.TrainState, parts: Mapping[str, Rows]):
    grads, statistics = [], {}
    with jax.set_mesh(mesh):
      for name, rows in parts.items():
        part_grads, sums = gradients[name](state.params, rows)
        grads.append(part_grads)
        statistics |= {f'{name}/{key}': value for key, value in sums.items()}
      state, statistics['grad_norm'] = apply(state, grads)
    return state, statistics

  return update


def _gradient(params, rows: Rows, *, graphdef, objective, logit_chunk):
  """The gradient of a part's loss and its statistics, over micro-batches."""

  def loss(params, micro: Rows):
    logp_BT = logps.response_logps(
      nnx.merge(graphdef, params),
      micro.tokens_BS,
      micro.valid_BS,
      micro.weight_BT.shape[-1],
      logit_chunk,
    )
    objective_BT, statistics = objective(logp_BT, micro)
    return -jnp.sum(micro.weight_BT * objective_BT), statistics

  def accumulate(grads, micro):
    (value, sums), micro_grads = jax.value_and_grad(loss, has_aux=True)(
      params, micro
    )
    return optax.tree_utils.tree_add(grads, micro_grads), {
      'loss': value,
      **sums,
    }

  grads, by_micro = jax.lax.scan(
    accumulate, optax.tree_utils.tree_zeros_like(params), rows
  )
  return grads, {name: sums_M.sum() for name, sums_M in by_micro.items()}


def _apply(state: state_lib.TrainState, grads_of_parts, *, optimizer):
  """Adds the parts' gradients, and takes one step of the optimizer."""
  grads = functools.reduce(optax.tree_utils.tree_add, grads_of_parts)
  updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  state = state_lib.TrainState(state.step + 1, params, opt_state)
  return state, optax.global_norm(grads)
