"""The optimizer, from its config."""

from flax import nnx
import jax
import jax.numpy as jnp
import optax

from mrl_jax import checks

_DTYPES = {'float32': jnp.float32, 'bfloat16': jnp.bfloat16}
# Of the squared gradients' mean in bfloat16. It has 8 bits, and stays where it
# is when it should move by less than half of the last one.
_MAX_B2 = 0.99


def build(config, steps: int) -> optax.GradientTransformation:
  """An optimizer behind a global-norm clip: linear warm-up, then cosine decay.

  Args:
    config: fields of `optimizer` in `configs/base.py`.
    steps: updates in the whole run, at least 1; the decay ends with them.

  Raises:
    InputError: there is no such optimizer, or not in that dtype.
  """
  check(config)
  warmup = min(config.warmup_steps, steps - 1)
  rate = optax.warmup_cosine_decay_schedule(
    init_value=0.0,
    peak_value=config.learning_rate,
    warmup_steps=warmup,
    decay_steps=steps,
    end_value=config.learning_rate * config.final_fraction,
  )
  clipped = optax.chain(
    optax.clip_by_global_norm(config.clip_norm),
    OPTIMIZERS[config.name](config, rate),
  )
  return stored_as(_DTYPES[config.state_dtype], clipped)


def check(config, key: str = 'optimizer') -> None:
  """Refuses what `build` cannot make of the fields under `key`.

  Raises:
    InputError: the same as that of `build`.
  """
  checks.choose(config.name, OPTIMIZERS, f'{key}.name')
  checks.choose(config.state_dtype, _DTYPES, f'{key}.state_dtype')
  checks.require(
    config.state_dtype == 'float32' or config.b2 <= _MAX_B2,
    f'{key}.b2 = {config.b2}; in {config.state_dtype} a mean that is so slow '
    f'stands still. Give at most {_MAX_B2}, or state_dtype = float32',
  )


def stored_as(
  dtype, inner: optax.GradientTransformation
) -> optax.GradientTransformation:
  """Computes `inner` in float32, and keeps its matrices in `dtype`.

  Whatever dtype gradients and parameters have, `inner` sees them in float32,
  and the update is float32. Vectors stay so: they are small, and among them are
  sums over the rows of matrices. What is float32 anyway is left bit for bit.
  """

  def init(params):
    return _cast(inner.init(_cast(params, jnp.float32)), dtype, least_axes=2)

  def update(grads, state, params=None):
    updates, state = inner.update(
      *(_cast(tree, jnp.float32) for tree in (grads, state, params))
    )
    return updates, _cast(state, dtype, least_axes=2)

  return optax.GradientTransformation(init, update)


def places(
  optimizer: optax.GradientTransformation, params, param_places, other
):
  """Where each leaf of `optimizer.init(params)` lives; allocates nothing.

  Args:
    optimizer: any of which the state has trees like `params`, or parts of them.
    params: arrays, or their shapes.
    param_places: the sharding of each, in the same structure.
    other: the sharding of all else: counts, and sums over axes.

  Returns:
    Shardings in the structure of the state. A leaf has that of the parameter of
    the same path, if it has its shape too.
  """
  of_params = {
    path: (param.shape, place)
    for (path, param), place in zip(
      jax.tree_util.tree_leaves_with_path(params),
      jax.tree.leaves(param_places),
      strict=True,
    )
  }

  def place(path, leaf):
    tails = (path[i:] for i in range(len(path) + 1))
    param = next((of_params[tail] for tail in tails if tail in of_params), None)
    return param[1] if param and param[0] == leaf.shape else other

  return jax.tree_util.tree_map_with_path(
    place, jax.eval_shape(optimizer.init, params)
  )


def moment_bytes(config, params) -> float:
  """Bytes of the optimizer's state, a parameter; allocates nothing."""
  state = jax.eval_shape(build(config, steps=1).init, params)
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
  return size / sum(x.size for x in jax.tree.leaves(params))


def _adamw(config, rate):
  """AdamW (1711.05101)."""
  return optax.adamw(
    rate, b1=config.b1, b2=config.b2, weight_decay=config.weight_decay
  )


def _adafactor(config, rate):
  """Adafactor (1804.04235) with the rate and the weight decay of AdamW.

  The rate is not relative to the size of a parameter, so that it means what it
  does for AdamW. There is no first moment; the second decays by the paper's own
  schedule, and is a row and a column of a matrix.
  """
  return optax.chain(
    # Unlike with the paper's 128, heads of 64 are factored too.
    optax.scale_by_factored_rms(min_dim_size_to_factor=32),
    optax.clip_by_block_rms(1.0),
    optax.add_decayed_weights(config.weight_decay),
    optax.scale_by_learning_rate(rate),
  )


def _muon(config, rate):
  """Muon for the hidden matrices, and AdamW for all else.

  Updates are as large as those of AdamW (2502.16982), so that the rate means
  the same.
  """
  muon = optax.contrib.muon(
    rate,
    beta=config.b1,
    weight_decay=config.weight_decay,
    muon_weight_dimension_numbers=lambda params: _map(_sides, params),
    consistent_rms=0.2,
  )
  # Its own AdamW, for what has no sides, is one with Nesterov's momentum.
  return optax.partition(
    {'muon': muon, 'adamw': _adamw(config, rate)},
    lambda params: _map(lambda p: 'muon' if _sides(p) else 'adamw', params),
  )


def _map(function, params: nnx.State) -> nnx.State:
  return nnx.map_state(lambda _, p: p.replace(function(p)), params)


def _sides(param) -> optax.contrib.MuonDimensionNumbers | None:
  """The inputs and outputs of a hidden matrix; None for all else.

  It leads from 'embed' to all its other axes, or from them to it: the heads of
  a projection are one matrix. An adapter's matrices do so with 'rank'.
  """
  axes = param.axes
  near = 'rank' if 'rank' in axes else 'embed'
  if near not in axes or 'vocab' in axes or len(axes) < 2:
    return None
  one = axes.index(near)
  rest = tuple(i for i in range(len(axes)) if i != one)
  sides = (rest, (one,)) if one else ((one,), rest)
  return optax.contrib.MuonDimensionNumbers(*sides)


def _cast(tree, dtype, least_axes: int = 0):
  """With floating arrays of at least so many axes in `dtype`."""

  def cast(x):
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(dtype) if floating and x.ndim >= least_axes else x

  return jax.tree.map(cast, tree)


OPTIMIZERS = {'adamw': _adamw, 'adafactor': _adafactor, 'muon': _muon}
