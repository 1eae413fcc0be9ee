"""From a plan to meshes of devices."""

from collections.abc import Sequence
import math

import jax
from jax.sharding import Mesh
import numpy as np

from mrl_jax import config
from mrl_jax.mwra import planner


def build(plan: planner.Plan, devices: Sequence[jax.Device]) -> dict[str, Mesh]:
  """The mesh of every policy; `devices` are in the planner's order."""
  return {
    name: Mesh(
      np.array([devices[i] for i in part.devices]).reshape(part.shape),
      config.MESH_AXES,
    )
    for name, part in plan.items()
  }


def device_bytes(devices: Sequence[jax.Device]) -> float:
  """The memory of the smallest device; infinite if no device reports it."""
  stats = [device.memory_stats() for device in devices]
  limits = [s['bytes_limit'] for s in stats if s and 'bytes_limit' in s]
  return min(limits, default=math.inf)
