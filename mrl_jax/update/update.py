"""One update of a policy: pure, `state, parts -> state`."""

from collections.abc import Callable, Mapping
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
from mrl_jax.update import state as state_lib


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
    mask_BT: False at padding, and at tokens that are not trained on.
    chunk_BT: the chunk of each token, in [0, T); see `losses/prp.py`.
    mini_batch_B1: which mini-batch of the round it is, from 0.
    reference_logp_BT: under the reference policy, where there is one.
  """

  tokens_BS: jax.Array
  valid_BS: jax.Array
  old_logp_BT: jax.Array
  advantage_B1: jax.Array
  weight_BT: jax.Array
  mask_BT: jax.Array
  chunk_BT: jax.Array
  mini_batch_B1: jax.Array
  reference_logp_BT: jax.Array | None = None


# (logp_BT, one micro-batch of Rows) -> (objective_BT, statistics), which are
# sums over tokens, or maxima where the name begins with 'max_'.
Objective = Callable[[jax.Array, Rows], tuple[jax.Array, dict]]


def build(
  model: ModelConfig,
  optimizer: optax.GradientTransformation,
  mesh: Mesh,
  objectives: Mapping[str, Objective],
  logit_chunk: int,
  *,
  entropy_weight: float = 0.0,
  reference: bool = False,
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
    entropy_weight: of the mean entropy of own tokens, a bonus.
    reference: whether the state has a reference policy.

  Returns:
    A function of a `TrainState`, which it consumes, and of `Rows` in stacked
    micro-batches, by the names of `objectives`, and of the parameters that are
    not trained, where there are adapters. The statistics are those of the
    objectives, by 'part/name', with 'grad_norm'.
  """
  shardings = state_lib.shardings(model, optimizer, mesh, reference)
  gradients = {
    name: build_gradient(
      model,
      mesh,
      objective,
      logit_chunk,
      entropy_weight if name == 'own' else 0.0,
    )
    for name, objective in objectives.items()
  }
  apply = jax.jit(
    functools.partial(_apply, optimizer=optimizer),
    out_shardings=(shardings, sharding.replicated(mesh)),
    donate_argnums=0,
  )

  def update(
    state: state_lib.TrainState,
    parts: Mapping[str, Rows],
    frozen: nnx.State = decoder.NO_PARAMS,
  ):
    grads, statistics = [], {}
    with jax.set_mesh(mesh):
      for name, rows in parts.items():
        part_grads, sums = gradients[name](state.params, frozen, rows)
        grads.append(part_grads)
        statistics |= {f'{name}/{key}': value for key, value in sums.items()}
      state, statistics['grad_norm'] = apply(state, grads)
    return state, statistics

  return update


def build_gradient(
  model: ModelConfig,
  mesh: Mesh,
  objective: Objective,
  logit_chunk: int,
  entropy_weight: float = 0.0,
):
  """Jits `gradient(params, frozen, rows) -> (grads, statistics)` of a part."""
  graphdef, *parts = decoder.abstract(model)
  places = [sharding.params(part, mesh, sharding.TRAIN) for part in parts]
  return jax.jit(
    functools.partial(
      _gradient,
      graphdef=graphdef,
      objective=objective,
      logit_chunk=logit_chunk,
      entropy_weight=entropy_weight,
    ),
    in_shardings=(*places, sharding.rows(mesh, 1)),
    out_shardings=(places[0], sharding.replicated(mesh)),
  )


def build_scorer(model: ModelConfig, mesh: Mesh, logit_chunk: int):
  """Jits `score(params, frozen, rows) -> logp`, f32 [M, B, T] of stacked rows."""
  graphdef, *parts = decoder.abstract(model)
  places = [sharding.params(part, mesh, sharding.TRAIN) for part in parts]

  def score(params, frozen, rows: Rows):
    network = nnx.merge(graphdef, params, frozen)
    return jax.lax.map(
      lambda micro: logps.response_logps(
        network,
        micro.tokens_BS,
        micro.valid_BS,
        micro.weight_BT.shape[-1],
        logit_chunk,
      ),
      rows,
    )

  return jax.jit(
    score,
    in_shardings=(*places, sharding.rows(mesh, 1)),
    out_shardings=sharding.replicated(mesh),
  )


def _gradient(
  params,
  frozen,
  rows: Rows,
  *,
  graphdef,
  objective,
  logit_chunk,
  entropy_weight,
):
  """The gradient of a part's loss and its statistics, over micro-batches.

  Gradients are summed in float32, whatever the parameters are.
  """

  def loss(params, micro: Rows):
    scores = logps.response_logps(
      nnx.merge(graphdef, params, frozen),
      micro.tokens_BS,
      micro.valid_BS,
      micro.weight_BT.shape[-1],
      logit_chunk,
      entropy=bool(entropy_weight),
    )
    if not entropy_weight:
      objective_BT, statistics = objective(scores, micro)
    else:
      logp_BT, entropy_BT = scores
      objective_BT, statistics = objective(logp_BT, micro)
      objective_BT += entropy_weight * entropy_BT
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
    accumulate, optax.tree_utils.tree_zeros_like(params, jnp.float32), rows
  )
  return grads, {
    name: x_M.max(0) if name.startswith('max_') else x_M.sum(0)
    for name, x_M in by_micro.items()
  }


def _apply(state: state_lib.TrainState, grads_of_parts, *, optimizer):
  """Adds the parts' gradients, and takes one step of the optimizer."""
  grads = functools.reduce(optax.tree_utils.tree_add, grads_of_parts)
  updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  state = dataclasses.replace(
    state, step=state.step + 1, params=params, opt_state=opt_state
  )
  return state, optax.global_norm(grads)
