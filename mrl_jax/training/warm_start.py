"""Supervised training on worked examples, before any reinforcement."""

import collections
from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import os
import random
import threading

import jax
import ml_collections
import msgspec
import numpy as np
from rich import console as console_lib

from mrl_jax import config as config_lib
from mrl_jax import hugging_face
from mrl_jax import records
from mrl_jax.models import hf_weights
from mrl_jax.sharing import rows as rows_lib
from mrl_jax.training import display
from mrl_jax.training import parallel
from mrl_jax.training import worker as worker_lib
from mrl_jax.update import checkpoint
from mrl_jax.update import objectives
from mrl_jax.update import optimizer as optimizer_lib
from mrl_jax.update import update


def run(
  workers: Mapping[str, worker_lib.Worker],
  config: ml_collections.ConfigDict,
  cache: str,
  console: console_lib.Console,
) -> None:
  """Trains every policy on demonstrations, or loads the result from the cache."""
  steps, trainers = config.warm_start.steps, {}
  if not steps:
    return
  for name, worker in workers.items():
    path = os.path.join(cache, 'warm_start', cache_name(worker, config))
    params = checkpoint.restore_params(path, worker.state.params)
    if params is None:
      trainers[name] = Trainer(worker, config), path
    else:
      console.print(f'warm start of {name}: taken from {path}', markup=False)
      worker.start_from(params)
  totals = dict.fromkeys(trainers, steps)
  cancelled = threading.Event()
  with display.live(console, 'warm start', totals) as advance:

    def train(worker):
      trainer, before = trainers[worker.name][0], []
      for _ in range(steps):
        if cancelled.is_set():
          break
        loss = trainer.step()
        # The loss of the step before: the device may be at work on this one.
        note = f'loss {sum(map(float, before)):.3f}' if before else ''
        advance(worker.name, note)
        before = loss

    training = {name: workers[name] for name in trainers}
    collections.deque(parallel.each(train, training, cancelled.set), maxlen=0)
  for name, (trainer, path) in trainers.items():
    checkpoint.save_params(path, trainer.state.params)
    workers[name].start_from(trainer.state.params)


class Trainer:
  """Supervised training of one policy.

  The loss is the negative log-likelihood of the solution and of the
  end-of-sequence after it, a mean over the tokens of the batch.
  """

  def __init__(
    self, worker: worker_lib.Worker, config: ml_collections.ConfigDict
  ):
    self._worker, self._batch = worker, config.warm_start.batch
    self._demonstrations = demonstrations(
      worker.policy.examples,
      config.policies[worker.name].warm_start_families,
      config.warm_start,
      config.reward.marker,
      seed=f'{config.seed}-{worker.name}',
    )
    optimizer = optimizer_lib.build(
      config.warm_start.optimizer, config.warm_start.steps
    )
    spec = dataclasses.replace(
      worker.spec, optimizer=optimizer, reference=False
    )
    self._update = update.Update(
      spec, {'own': objectives.LOG_LIKELIHOOD}, config.train.logit_chunk
    )
    self.state = spec.fresh(worker.state.params)
    self._encoded = functools.cache(self._encode)

  def step(self) -> list[jax.Array]:
    """Updates on the next batch; returns the terms of its loss.

    The device may still be working on them.
    """
    packer, prompt_ids, rows = self._worker.packer, [], []
    for i in range(self._batch):
      prompt, ids = self._encoded(*next(self._demonstrations))
      prompt_ids.append(prompt)
      rows.append(rows_lib.demonstration(i, ids))
    weight = 1 / sum(len(row.ids) for row in rows)
    packed = packer.pack(prompt_ids, [(row, weight) for row in rows], 'own')
    self.state, statistics = self._update(
      self.state, {'own': packed}, self._worker.frozen
    )
    return statistics['own/loss']

  def _encode(self, prompt, solution):
    """The tokens of a prompt and of its solution."""
    policy = self._worker.policy
    ids = policy.tokenizer.encode(solution.encode())
    ids = np.append(ids, np.int32(policy.tokenizer.eos_id))
    return policy.prompt_ids(prompt), ids


def demonstrations(
  prompts: Sequence[records.Prompt],
  families: Sequence[str],
  config: ml_collections.ConfigDict,
  marker: str,
  seed: int | str,
) -> Iterator[tuple[records.Prompt, str]]:
  """Draws prompts with their worked solutions, without end.

  Surfaces (the part of a family before '/') are drawn equally often; within a
  surface, a family is drawn as often as it is listed in `families`. In a share
  `config.rejected_share` of the solutions, a marker that the verifier does not
  accept replaces the marker of the answer.
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


def cache_name(
  worker: worker_lib.Worker, config: ml_collections.ConfigDict
) -> str:
  """A name that digests everything the warm start of a policy depends on."""
  policy = config_lib.flat(config.policies[worker.name])
  for key in ('address', 'journal', 'listens_to'):  # Of the exchange alone.
    del policy[key]
  folder = policy['path'] and hugging_face.weights_folder(policy['path'])
  packer, mesh = worker.packer, worker.spec.mesh
  parts = {
    'policy': policy,
    'warm_start': config_lib.flat(config.warm_start),
    'examples': msgspec.to_builtins(worker.policy.examples),
    'marker': config.reward.marker,
    'seed': config.seed,
    'weights': folder and hf_weights.fingerprint(folder),
    'tokenizer': worker.policy.tokenizer.fingerprint,
    'template': dataclasses.asdict(worker.policy.template),
    # These decide the order of sums, and with it their rounding.
    'shapes': [
      'packed rows',
      packer.slots('own'),
      packer.train.micro_rows,
      config.train.logit_chunk,
    ],
    'mesh': dict(mesh.shape),
    'device': mesh.devices.flat[0].device_kind,
    'jax': jax.__version__,
  }
  return f'{worker.name}-{config_lib.digest(parts)}'
