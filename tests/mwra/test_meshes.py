import jax

from mrl_jax.mwra import cost
from mrl_jax.mwra import meshes
from mrl_jax.mwra import planner
from tests import examples


def test_policies_have_disjoint_meshes_of_the_planned_shape():
  models = {'a': examples.model(), 'b': examples.model()}
  shape = cost.RoundShape(
    rows=32,
    samples=1,
    sampled_prompts=32,
    prompt_tokens=8,
    response_tokens=8,
    micro_rows=32,
    logit_chunk=64,
  )
  plan = planner.plan(
    models, dict.fromkeys(models, shape), 8, divides=32, tensor=2
  )
  built = meshes.build(plan, jax.devices())
  devices = {name: set(mesh.devices.flat) for name, mesh in built.items()}
  assert not devices['a'] & devices['b']
  assert built['a'].shape == {'data': 1, 'fsdp': 2, 'tensor': 2}


def test_memory_of_devices_that_do_not_tell_is_unknown():
  assert meshes.device_bytes(jax.devices()) is None
