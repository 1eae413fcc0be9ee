"""From a plan to meshes of devices."""

from collections.abc import Sequence
import math
from typing import NamedTuple

import jax
from jax.sharding import Mesh
import numpy as np

from mrl_jax import config
from mrl_jax.mwra import chips
from mrl_jax.mwra import planner


class Meshes(NamedTuple):
  """The devices of a policy, which have two shapes."""

  train: Mesh
  decode: Mesh  # While sampling: its fsdp axis has size 1.


def build(
  plan: planner.Plan, devices: Sequence[jax.Device]
) -> dict[str, Meshes]:
  """The meshes of every policy; `devices` are in the planner's order."""

  def mesh(part, shape):
    chosen = np.array([devices[i] for i in part.devices])
    return Mesh(chosen.reshape(shape), config.MESH_AXES)

  return {
    name: Meshes(mesh(part, part.shape), mesh(part, part.decode_shape))
    for name, part in plan.items()
  }


def device_bytes(devices: Sequence[jax.Device]) -> float:
  """The memory of the smallest device; infinite if no device reports it."""
  return min(map(_bytes, devices))


def _bytes(device) -> float:
  try:
    stats = device.memory_stats()
  except jax.errors.JaxRuntimeError:  # Only devices of this process report it.
    return chips.by_kind(device.device_kind).hbm_bytes
  return stats['bytes_limit'] if stats and 'bytes_limit' in stats else math.inf
