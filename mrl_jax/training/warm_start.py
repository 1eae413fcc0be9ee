"""Supervised training on worked examples, before any reinforcement."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import hashlib
import json
import os
import random

from flax import nnx
import ml_collections
import numpy as np
from rich import console as console_lib

from mrl_jax import config as config_lib
from mrl_jax import records
from mrl_jax.sharing import lesson as lesson_lib
from mrl_jax.training import checkpoint
from mrl_jax.training import display
from mrl_jax.training import optimizer as optimizer_lib
from mrl_jax.training import state as state_lib
from mrl_jax.training import update
from mrl_jax.training import worker as worker_lib


def run(
  workers: Mapping[str, worker_lib.Worker],
  examples: Mapping[str, Sequence[records.Prompt]],
  config: ml_collections.ConfigDict,
  cache: str,
  console: console_lib.Console,
) -> None:
  """Gives every policy its skills, or takes them from the cache."""
  steps = config.warm_start.steps
  if not steps:
    return
  totals = dict.fromkeys(workers, steps)
  with display.Live(console, 'warm start', totals) as live:
    for i, (name, worker) in enumerate(workers.items()):
      path = os.path.join(cache, 'warm_start', _digest(name, worker, config))
      params = checkpoint.restore_params(path, worker.state.params)
      if params is None:
        shown = demonstrations(
          examples[name],
          config.policies[name].warm_start_families,
          config.warm_start,
          config.reward.marker,
          config.seed * len(workers) + i,
        )
        params = train(
          worker,
          shown,
          config.warm_start,
          config.train.logit_chunk,
          lambda loss, name=name: live.advance(name, f'loss {loss:.3f}'),
        )
        checkpoint.save_params(path, params)
      worker.start_from(params)


def demonstrations(
  prompts: Sequence[records.Prompt],
  families: Sequence[str],
  config,
  marker: str,
  seed: int,
) -> Iterator[tuple[records.Prompt, str]]:
  """Endless prompts with their worked solutions.

  Surfaces (what stands before the '/' of a family) have equal shares; a family
  has a share of its surface as often as it is listed in `families`. In
  `config.rejected_share` of the solutions the answer's marker is replaced by
  one that the verifier does not accept.
  """
  by_family, by_surface = {}, {}
  for prompt in prompts:
    by_family.setdefault(prompt.family, []).append(prompt)
  for family in families:
    surface = family.partition('/')[0]
    by_surface.setdefault(surface, []).append(by_family[family])
  rng = random.Random(seed)
  while True:
    prompt = rng.choice(rng.choice(rng.choice([*by_surface.values()])))
    solution = prompt.solution
    if rng.random() < config.rejected_share:
      solution = solution.replace(marker, config.rejected_marker)
    yield prompt, solution


def train(
  worker: worker_lib.Worker,
  examples: Iterator[tuple[records.Prompt, str]],
  config,
  logit_chunk: int,
  on_step: Callable[[float], None],
) -> nnx.State:
  """Trains on `config.steps` batches; returns the parameters.

  The loss is the negative log-likelihood of the solution and the
  end-of-sequence after it, a mean over the tokens of the batch.
  """
  optimizer = optimizer_lib.build(config.optimizer, config.steps)
  step = update.build(
    worker.model,
    optimizer,
    worker.mesh,
    {'own': lambda logp_BT, rows: (logp_BT, {})},
    logit_chunk,
  )
  state = state_lib.fresh(
    worker.state.params, worker.model, optimizer, worker.mesh
  )
  for _ in range(config.steps):
    batch = [next(examples) for _ in range(config.batch)]
    state, sums = step(state, {'own': _pack(worker, batch)})
    on_step(float(sums['own/loss']))
  return state.params


def _pack(worker, batch) -> update.Rows:
  prompt_ids, rows = [], []
  for i, (prompt, solution) in enumerate(batch):
    ids = worker.tokenizer.encode(solution.encode())
    ids = np.append(ids, np.int32(worker.tokenizer.eos_id))
    zeros = np.zeros(len(ids), np.int32)
    prompt_ids.append(worker.prompt_ids(prompt))
    rows.append(lesson_lib.Row(i, ids, zeros, 1.0, zeros))
  weight = 1 / sum(len(row.ids) for row in rows)
  return worker.packer.pack(
    prompt_ids,
    [(row, weight) for row in rows],
    worker.packer.lengths['own'],
  )


def _digest(name, worker, config) -> str:
  """Names the folder of all that the warm start of a policy depends on."""
  parts = {
    'policy': config_lib.flat(config.policies[name]),
    'warm_start': config_lib.flat(config.warm_start),
    'data': config_lib.flat(config.data),
    'marker': config.reward.marker,
    'seed': config.seed,
    'tokenizer': worker.tokenizer.fingerprint,
    'context': worker.packer.context,
    'mesh': dict(worker.mesh.shape),
  }
  text = json.dumps(parts, sort_keys=True)
  return f'{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}'
