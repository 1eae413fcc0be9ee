import math
import types

import jax
import pytest

from mrl_jax.mwra import chips
from mrl_jax.mwra import layouts
from mrl_jax.mwra import meshes
from mrl_jax.mwra import planner
from tests import examples


def test_policies_have_disjoint_meshes_of_the_planned_shape():
  models = {'a': examples.model(), 'b': examples.model()}
  plan = planner.plan(
    models,
    dict.fromkeys(models, examples.round_shape()),
    meshes.topology(jax.devices()),
    meshes.chip(jax.devices()),
    choices=layouts.Choices(data=1, tensor=2, decode_tensor=2),
  )
  built = meshes.build(plan, jax.devices())
  devices = {name: set(m.train.devices.flat) for name, m in built.items()}
  assert not devices['a'] & devices['b']
  assert built['a'].train.shape == {'data': 1, 'fsdp': 2, 'tensor': 2}
  assert built['a'].decode.shape == {'data': 2, 'fsdp': 1, 'tensor': 2}
  train, decode = (list(mesh.devices.flat) for mesh in built['a'])
  assert train == decode


def test_device_memory_is_unknown_if_no_device_reports_it():
  assert meshes.device_bytes(jax.devices()) == math.inf


def device(**fields):
  """A device of another process, or one that reports its memory."""
  stats = fields.pop('stats', None)
  fields = {'process_index': 0, 'memory_stats': lambda: stats, **fields}
  return types.SimpleNamespace(**fields)


def test_a_chip_has_the_memory_that_the_smallest_device_reports():
  devices = [
    device(
      device_kind='TPU v5p', platform='tpu', stats={'bytes_limit': gib * 2**30}
    )
    for gib in (95, 94)
  ]
  chip = meshes.chip(devices)
  assert chip.hbm_bytes == 94 * 2**30
  assert chip.flops == chips.CHIPS['v5p'].flops


@pytest.mark.parametrize(
  ('platform', 'like'), [('gpu', 'h100'), ('tpu', 'v5e'), ('metal', 'cpu')]
)
def test_a_device_that_is_in_no_table_has_its_own_memory(platform, like):
  unknown = device(
    device_kind='Z 9000', platform=platform, stats={'bytes_limit': 2**34}
  )
  chip = meshes.chip([unknown])
  assert chip.hbm_bytes == 2**34
  assert chip.flops == chips.CHIPS[like].flops


def test_tpus_have_coordinates_and_others_are_in_a_line():
  tpus = [
    device(platform='tpu', coords=[x, y, 0], core_on_chip=0, slice_index=0)
    for y in range(2)
    for x in range(2)
  ]
  assert meshes.topology(tpus).grids[0].shape == (1, 2, 2, 1)
  assert meshes.topology(jax.devices()).grids[0].shape == (1, 8)
