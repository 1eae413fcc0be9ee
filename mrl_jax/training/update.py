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


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=['tokens_BS', 'valid_BS', 'old_logp_BT', 'advantage_B1',
               'weight_BT', 'chunk_BT'],
  meta_fields=[],
)  # fmt: skip
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
  graphdef = nnx.graphdef(
    nnx.eval_shape(lambda: decoder.Decoder(model, nnx.Rngs(0)))
  )
  places = state_lib.shardings(model, optimizer, mesh)
  one = sharding.replicated(mesh)

  def gradient(params, rows, objective):
    def loss(params, rows):
      logp_BT = logps.response_logps(
        nnx.merge(graphdef, params),
        rows.tokens_BS,
        rows.valid_BS,
        rows.weight_BT.shape[-1],
        logit_chunk,
      )
      objective_BT, statistics = objective(logp_BT, rows)
      return -jnp.sum(rows.weight_BT * objective_BT), statistics

    def accumulate(grads, rows):
      (value, sums), more = jax.value_and_grad(loss, has_aux=True)(params, rows)
      return jax.tree.map(jnp.add, grads, more), {'loss': value, **sums}

    grads, by_micro = jax.lax.scan(
      accumulate, jax.tree.map(jnp.zeros_like, params), rows
    )
    return grads, {name: sums_M.sum() for name, sums_M in by_micro.items()}

  def apply(state, grads_of_parts):
    grads = jax.tree.map(
      lambda *parts: sum(parts[1:], parts[0]), *grads_of_parts
    )
    changes, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, changes)
    state = state_lib.TrainState(state.step + 1, params, opt_state)
    return state, optax.global_norm(grads)

  gradients = {
    name: jax.jit(
      functools.partial(gradient, objective=objective),
      in_shardings=(places.params, sharding.rows(mesh, 1)),
      out_shardings=(places.params, one),
    )
    for name, objective in objectives.items()
  }
  apply = jax.jit(apply, out_shardings=(places, one), donate_argnums=0)

  def update(state: state_lib.TrainState, parts: Mapping[str, Rows]):
    grads, statistics = [], {}
    with jax.set_mesh(mesh):
      for name, rows in parts.items():
        more, sums = gradients[name](state.params, rows)
        grads.append(more)
        statistics |= {f'{name}/{key}': value for key, value in sums.items()}
      state, statistics['grad_norm'] = apply(state, grads)
    return state, statistics

  return update
