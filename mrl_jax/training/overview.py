"""What a run is going to be, for the terminal and for `plan.json`."""

import jax

from mrl_jax import config as config_lib
from mrl_jax.training import job as job_lib

FILE = 'plan.json'


def of_job(job: job_lib.Job) -> dict:
  """Which policy is where, and what it is, as plain values.

  Memory is in bytes of each device, by the planner's estimate.
  """
  devices = jax.devices()
  return {
    'devices': f'{len(devices)} x {devices[0].device_kind}',
    'policies': {
      name: _of_policy(job.config.policies[name], part)
      for name, part in job.plan.items()
    },
    'elsewhere': {
      name: f'at {peer.address}' if peer.address else f'from {peer.journal}'
      for name, peer in job.config.see.peers.items()
      if peer.address or peer.journal
    },
    'prompts_skipped': job.inputs.skipped,
  }


def _of_policy(policy, part) -> dict:
  _, fsdp, _ = part.shape
  return {
    'model': policy.path or policy.model.family,
    'tokenizer': policy.tokenizer.path or policy.path or policy.tokenizer.kind,
    'parameters': part.model.num_params,
    'adapters': part.model.num_adapter_params,
    'vocabulary': part.model.vocab_size,
    'devices': list(part.devices),
    'mesh': dict(zip(config_lib.MESH_AXES, part.shape, strict=True)),
    'memory_bytes': part.cost.peak_bytes(fsdp) / len(part.devices),
    'load': part.load,
  }
