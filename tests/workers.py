"""A small policy at work, on four devices."""

import functools

import jax
from jax.sharding import Mesh
import numpy as np
import optax

from mrl_jax import algorithms
from mrl_jax import config
from mrl_jax.data import prompts
from mrl_jax.rewards import judge
from mrl_jax.training import inputs
from mrl_jax.training import packing
from mrl_jax.training import worker as worker_lib
from mrl_jax.update import state
from tests import examples


def judge_by_length(completions) -> list[judge.Judgement]:
  """Judges completions with an odd number of characters as correct."""
  return [
    judge.Judgement(1.0, 'correct')
    if len(completion.text) % 2
    else judge.Judgement(0.0, 'wrong')
    for completion in completions
  ]


@functools.cache
def worker() -> worker_lib.Worker:
  """The worker, which tests share; one of them trains it."""
  tokenizer = examples.tokenizer('byte_level')
  devices = np.array(jax.devices()[:4])
  worker = worker_lib.Worker(
    name='a',
    policy=inputs.PolicyInputs(tokenizer, prompts.plain('{prompt}\n'), ''),
    judge=judge_by_length,
    spec=state.StateSpec(
      model=examples.model(vocab_size=tokenizer.vocab_size, num_layers=1),
      mesh=Mesh(devices.reshape(1, 4, 1), config.MESH_AXES),
      optimizer=optax.adam(1e-3),
    ),
    decode_mesh=Mesh(devices.reshape(4, 1, 1), config.MESH_AXES),
    objectives=algorithms.build(examples.settings()).objectives(),
    rescores=False,
    packer=packing.Packer(
      context=8,
      lengths={'own': 6, 'peer': 6},
      ways=4,
      train=examples.train(micro_rows=8, packed_tokens=16),
    ),
    key=jax.random.key(0),
    config=examples.run_config(**{'train.logit_chunk': 64}),
  )
  worker.start_from()
  return worker
