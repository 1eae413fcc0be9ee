"""A small policy at work."""

import functools

import jax
from jax.sharding import Mesh
import numpy as np
import optax

from mrl_jax import algorithms
from mrl_jax import config
from mrl_jax.data import prompts
from mrl_jax.training import packing as batch
from mrl_jax.training import worker as worker_lib
from tests import examples


@functools.cache
def worker() -> worker_lib.Worker:
  """A policy on four devices; what it has learnt is left as it is."""
  tokenizer = examples.tokenizer('byte_level')
  devices = np.array(jax.devices()[:4]).reshape(1, 4, 1)
  worker = worker_lib.Worker(
    'a',
    model=examples.model(vocab_size=tokenizer.vocab_size),
    tokenizer=tokenizer,
    template=prompts.plain('{prompt}\n'),
    mesh=Mesh(devices, config.MESH_AXES),
    optimizer=optax.adam(1e-3),
    objectives=algorithms.build(examples.run_config().method).objectives,
    packer=batch.Packer(
      context=8,
      lengths={'own': 6, 'peer': 6},
      multiple=4,
      micro_rows=8,
      mini_batches=1,
      aggregation='token_mean',
    ),
    logit_chunk=64,
    mask_truncated=False,
    key=jax.random.key(0),
  )
  worker.start_from()
  return worker
