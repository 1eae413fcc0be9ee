"""How arrays are sharded: tables from the names of axes to mesh axes."""

from collections.abc import Mapping

from flax import nnx
import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from mrl_jax import checks

ROWS = ('data', 'fsdp')  # Rows of a batch are sharded over both axes.

# Parameters in training: every matrix is sharded over `fsdp`.
TRAIN = {
  'embed': 'fsdp',
  'vocab': 'tensor',
  'heads': 'tensor',
  'kv_heads': 'tensor',
  'mlp': 'tensor',
  'head': None,
  'norm': None,
  'rank': None,
}
# Sampling would gather parameters over `fsdp` for every token; instead, every
# part of `fsdp` holds a copy.
DECODE = {**TRAIN, 'embed': None}


def param_spec(axes: tuple[str, ...], table: Mapping) -> PartitionSpec:
  """The partition of an array with the named `axes`.

  Raises KeyError if an axis is not in the table, and ValueError if two axes
  would be on the same mesh axis.
  """
  spec = tuple(table[axis] for axis in axes)
  used = [name for name in spec if name is not None]
  if len(set(used)) < len(used):
    raise ValueError(f'axes {axes} collide on the mesh: {spec}')
  return PartitionSpec(*spec)


def params(state: nnx.State, mesh: Mesh, table: Mapping) -> nnx.State:
  """The sharding of every parameter, in the structure of `state`.

  Raises InputError, which lists all dimensions that the mesh does not divide.
  """
  wrong = []

  def place(path, param):
    spec = param_spec(param.axes, table)
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
