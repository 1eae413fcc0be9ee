"""How arrays are sharded: tables from the names of axes to mesh axes."""

from collections.abc import Callable

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from mrl_jax import checks

ROWS = ('data', 'fsdp')  # Rows of a batch are sharded over both axes.

# Of parameters. While sampling, the mesh has an fsdp axis of size 1: parameters
# would be gathered over it for every token.
PARAMS = {
  'embed': 'fsdp',
  'vocab': 'tensor',
  'heads': 'tensor',
  'kv_heads': 'tensor',
  'mlp': 'tensor',
  'head': None,
  'norm': None,
  'rank': None,
}


# From some size on, XLA for TPU writes a product with a gathered operand as a ring
# of sends ('windowed einsum'), and a chip receives twice the bytes. Never, below
# operands of so many MiB.
_TPU = {'xla_jf_spmd_threshold_for_windowed_einsum_mib': str(2**20)}


def param_spec(axes: tuple[str, ...]) -> PartitionSpec:
  """The partition of an array with the named `axes`.

  Raises KeyError if an axis is not in the table, and ValueError if two axes
  would be on the same mesh axis.
  """
  spec = tuple(PARAMS[axis] for axis in axes)
  used = [name for name in spec if name is not None]
  if len(set(used)) < len(used):
    raise ValueError(f'axes {axes} collide on the mesh: {spec}')
  return PartitionSpec(*spec)


def params(state: nnx.State, mesh: Mesh) -> nnx.State:
  """The sharding of every parameter, in the structure of `state`.

  Raises InputError, which lists all dimensions that the mesh does not divide.
  """
  wrong = []

  def place(path, param):
    spec = param_spec(param.axes)
    for size, axis, name in zip(param.shape, spec, param.axes, strict=True):
      if axis is not None and size % mesh.shape[axis]:
        wrong.append(
          f'{".".join(map(str, path))}: {name} = {size} over '
          f'{axis} = {mesh.shape[axis]}'
        )
    return param.replace(NamedSharding(mesh, spec))

  placed = nnx.map_state(place, state)
  checks.require(
    not wrong, 'the mesh does not divide the model:\n  ' + '\n  '.join(wrong)
  )
  return placed


def rows(mesh: Mesh, dim: int = 0) -> NamedSharding:
  """The sharding of a batch whose rows are dimension `dim`."""
  return NamedSharding(mesh, PartitionSpec(*(None,) * dim, ROWS))


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


def by_rows(x: jax.Array) -> jax.Array:
  """Constrains activations to be sharded by rows; does nothing without a mesh.

  Unconstrained, XLA may shard a product over its contracted axis and compute
  every row on every device.
  """
  if jax.sharding.get_abstract_mesh().empty:
    return x
  return jax.lax.with_sharding_constraint(x, PartitionSpec(ROWS))


def put(tree, place: NamedSharding):
  """A tree of arrays on devices, those of other processes included.

  Every process has the whole arrays of the host, the same ones.
  """
  if place.is_fully_addressable:
    return jax.device_put(tree, place)
  return jax.tree.map(lambda x: _put(x, place), tree)


def arguments(tree, places):
  """Arrays of the host as arguments of a program that has these shardings.

  A program that runs in this process alone takes them as they are.
  """
  if jax.tree.leaves(places)[0].is_fully_addressable:
    return tree
  return jax.tree.map(_put, tree, places)


def _put(x, place):
  if isinstance(x, jax.Array) and not x.is_fully_addressable:
    return jax.device_put(x, place)
  if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
    data = _put(np.asarray(jax.random.key_data(x)), place)
    return jax.random.wrap_key_data(data)
  x = np.asarray(x)
  return jax.make_array_from_callback(x.shape, place, lambda index: x[index])


def compiler_options(mesh: Mesh) -> dict[str, str]:
  """Options of XLA for programs that gather parameters and scatter gradients."""
  return _TPU if mesh.devices.flat[0].platform == 'tpu' else {}


def platform() -> str:
  """The platform that is compiled for, which need not be this machine's."""
  mesh = jax.sharding.get_abstract_mesh()
  device = None if mesh.empty else mesh.abstract_device
  return device.platform if device else jax.default_backend()


def by_device(function: Callable, inputs, outputs) -> Callable:
  """Applies a function to the part of its arguments that each device has.

  `inputs` and `outputs` are partitions over the mesh; without a mesh, the
  function is returned as it is.
  """
  if jax.sharding.get_abstract_mesh().empty:
    return function
  return jax.shard_map(
    function, in_specs=inputs, out_specs=outputs, check_vma=False
  )


def by_token(function: Callable, matrix: jax.Array, *arrays: jax.Array):
  """Applies `function(matrix, *arrays)` to the tokens that each device has.

  Arrays [B, T, ...] have their rows on the devices of `ROWS`, and their
  positions on those of the tensor axis; so has the result. The matrix is gathered
  once, and its gradient is summed over the devices once: `function` may use it
  many times.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return function(matrix, *arrays)

  def local(part, *arrays):
    # By an axis of its own: on TPU, XLA would sum with an all-reduce otherwise.
    parts = jax.lax.all_gather(part, 'fsdp')
    return function(parts.reshape(-1, *part.shape[1:]), *arrays)

  length, tokens = arrays[0].shape[1], PartitionSpec(ROWS, 'tensor')
  extra = -length % mesh.shape['tensor']
  result = by_device(
    local, (PartitionSpec('fsdp'), *(tokens for _ in arrays)), tokens
  )(
    matrix,
    *(
      jnp.pad(x, [(0, 0), (0, extra)] + [(0, 0)] * (x.ndim - 2)) for x in arrays
    ),
  )
  return jax.tree.map(lambda x_BT: x_BT[:, :length], result)


def lookup(embed_VD: jax.Array, tokens_BT: jax.Array, dtype: str) -> jax.Array:
  """The embeddings [B, T, D] of tokens; moves them, and not the table.

  Each part of the fsdp axis looks its columns up for the rows of all parts.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.shape['fsdp'] == 1:
    return embed_VD[tokens_BT].astype(dtype)

  def local(embed_Vd, tokens_BT):
    tokens_BT = jax.lax.all_gather(tokens_BT, 'fsdp', tiled=True)
    x_BTd = embed_Vd[tokens_BT].astype(dtype)
    return jax.lax.all_to_all(x_BTd, 'fsdp', 0, 2, tiled=True)

  rows = PartitionSpec(ROWS)
  return by_device(local, (PartitionSpec(None, 'fsdp'), rows), rows)(
    embed_VD, tokens_BT
  )
