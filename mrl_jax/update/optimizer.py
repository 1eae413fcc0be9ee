"""The optimizer, from its config."""

from flax import nnx
import jax
import jax.numpy as jnp
import optax


def build(config, steps: int) -> optax.GradientTransformation:
  """An optimizer behind a global-norm clip: linear warm-up, then cosine decay.

  The decay ends with the `steps` updates of the whole run, at least 1.
  """
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
  return stored_as(config.state_dtype, clipped)


def stored_as(
  dtype, inner: optax.GradientTransformation
) -> optax.GradientTransformation:
  """Computes `inner` in float32, and stores the matrices of its state in `dtype`.

  Gradients and parameters of any dtype are cast to float32 for `inner`, and its
  update is float32. Vectors of the state stay float32: they are small, and some
  are sums over the rows of a matrix. With `dtype` float32, nothing changes.
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
  """The sharding of each leaf of `optimizer.init(params)`; allocates nothing.

  A leaf has the sharding, in `param_places`, of the parameter whose path ends its
  own path, if the two have the same shape: the state holds trees like `params`,
  or subtrees. All other leaves, counts and sums over axes, have `other`.
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
    tails = (path[i:] for i in range(len(path)))
    param = next((of_params[tail] for tail in tails if tail in of_params), None)
    return param[1] if param and param[0] == leaf.shape else other

  return jax.tree_util.tree_map_with_path(
    place, jax.eval_shape(optimizer.init, params)
  )


def moment_bytes(config, params) -> float:
  """Bytes of optimizer state per parameter; allocates nothing."""
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

  The rate is not scaled by the size of a parameter, so that it means the same
  as for AdamW. There is no first moment. The second moment of a matrix is
  stored as a row and a column, and decays by the paper's schedule.
  """
  return optax.chain(
    # The paper's 128 would leave heads of size 64 unfactored.
    optax.scale_by_factored_rms(min_dim_size_to_factor=32),
    optax.clip_by_block_rms(1.0),
    optax.add_decayed_weights(config.weight_decay),
    optax.scale_by_learning_rate(rate),
  )


def _muon(config, rate):
  """Muon for the hidden matrices, and AdamW for all other parameters.

  Updates are scaled to the size of AdamW's (2502.16982), so that the rate means
  the same.
  """
  muon = optax.contrib.muon(
    rate,
    beta=config.b1,
    weight_decay=config.weight_decay,
    muon_weight_dimension_numbers=lambda params: _map(_sides, params),
    consistent_rms=0.2,
  )
  # optax's Muon would treat the rest with an AdamW of Nesterov's momentum.
  return optax.partition(
    {'muon': muon, 'adamw': _adamw(config, rate)},
    lambda params: _map(lambda p: 'muon' if _sides(p) else 'adamw', params),
  )


def _map(function, params: nnx.State) -> nnx.State:
  return nnx.map_state(lambda _, p: p.replace(function(p)), params)


def _sides(param) -> optax.contrib.MuonDimensionNumbers | None:
  """Input and output axes of a hidden matrix; None for other parameters.

  One side is 'embed' (of an adapter, 'rank'), the other side is all other axes:
  the heads of a projection are one matrix. For example, ('embed', 'heads',
  'head') is a matrix from axis 0 to axes 1 and 2.
  """
  axes = param.axes
  side = 'rank' if 'rank' in axes else 'embed'
  if side not in axes or 'vocab' in axes or len(axes) < 2:
    return None
  axis = axes.index(side)
  rest = tuple(i for i in range(len(axes)) if i != axis)
  sides = (rest, (axis,)) if axis else ((axis,), rest)
  return optax.contrib.MuonDimensionNumbers(*sides)


def _cast(tree, dtype, least_axes: int = 0):
  """Casts floating-point arrays with at least `least_axes` axes to `dtype`."""

  def cast(x):
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(dtype) if floating and x.ndim >= least_axes else x

  return jax.tree.map(cast, tree)


OPTIMIZERS = {'adamw': _adamw, 'adafactor': _adafactor, 'muon': _muon}
