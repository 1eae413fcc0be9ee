import math

import jax

from mrl_jax.mwra import meshes
from mrl_jax.mwra import planner
from tests import examples


def test_policies_have_disjoint_meshes_of_the_planned_shape():
  models = {'a': examples.model(), 'b': examples.model()}
  plan = planner.plan(
    models,
    dict.fromkeys(models, examples.round_shape()),
    8,
    divides=32,
    tensor=2,
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
