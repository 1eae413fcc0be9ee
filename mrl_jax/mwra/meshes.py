"""From a plan to meshes of devices."""

from collections.abc import Sequence
import dataclasses
import math
from typing import NamedTuple

import jax
from jax.sharding import Mesh
import numpy as np

from mrl_jax import config
from mrl_jax.mwra import chips
from mrl_jax.mwra import planner
from mrl_jax.mwra import topology as topology_lib


class Meshes(NamedTuple):
  """The devices of a policy, which have two shapes."""

  train: Mesh
  decode: Mesh  # While sampling: its fsdp axis has size 1.


def build(
  plan: planner.Plan, devices: Sequence[jax.Device]
) -> dict[str, Meshes]:
  """The meshes of every policy; `devices` are those of `topology`."""

  def mesh(part, shape):
    chosen = np.array([devices[i] for i in part.devices])
    return Mesh(chosen.reshape(shape), config.MESH_AXES)

  return {
    name: Meshes(mesh(part, part.layout.train), mesh(part, part.layout.decode))
    for name, part in plan.items()
  }


def topology(devices: Sequence[jax.Device]) -> topology_lib.Topology:
  """Where devices are."""
  return topology_lib.build(
    [
      topology_lib.Place(
        process=device.process_index,
        coords=tuple(device.coords),
        core=device.core_on_chip,
        slice=getattr(device, 'slice_index', 0),  # Of several slices.
      )
      if device.platform == 'tpu'
      else topology_lib.Place(process=device.process_index)
      for device in devices
    ]
  )


def chip(devices: Sequence[jax.Device]) -> chips.Chip:
  """What the devices are, with the memory that the smallest one reports.

  Kinds that are not in the table have the speed of another one: plans then
  compare times of policies, but do not predict them.
  """
  kind, platform = devices[0].device_kind, devices[0].platform
  other = chips.CHIPS[_NOMINAL.get(platform, 'cpu')]
  return dataclasses.replace(
    chips.KINDS.get(kind, other), hbm_bytes=device_bytes(devices)
  )


_NOMINAL = {'gpu': 'h100', 'tpu': 'v5e'}


def device_bytes(devices: Sequence[jax.Device]) -> float:
  """The memory of the smallest device; infinite if no device reports it."""
  return min(map(_bytes, devices))


def _bytes(device) -> float:
  try:
    stats = device.memory_stats()
  except jax.errors.JaxRuntimeError:  # Only devices of this process report it.
    return chips.by_kind(device.device_kind).hbm_bytes
  return stats['bytes_limit'] if stats and 'bytes_limit' in stats else math.inf
