"""Supervised training on worked examples, before any reinforcement."""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import os
import random

from flax import nnx
import jax
import ml_collections
import msgspec
import numpy as np
from rich import console as console_lib

from mrl_jax import config as config_lib
from mrl_jax import hugging_face
from mrl_jax import records
from mrl_jax.models import hf_weights
from mrl_jax.sharing import lesson
from mrl_jax.training import display
from mrl_jax.training import worker as worker_lib
from mrl_jax.update import checkpoint
from mrl_jax.update import objectives
from mrl_jax.update import optimizer as optimizer_lib
from mrl_jax.update import state as state_lib
from mrl_jax.update import update


def run(
  workers: Mapping[str, worker_lib.Worker],
  examples: Mapping[str, Sequence[records.Prompt]],
  config: ml_collections.ConfigDict,
  cache: str,
  console: console_lib.Console,
) -> None:
  """Gives every policy its skills, or takes them from the cache."""
  if not config.warm_start.steps:
    return
  students = {}
  for name, worker in workers.items():
    path = os.path.join(
      cache, 'warm_start', cache_name(worker, examples[name], config)
    )
    params = checkpoint.restore_params(path, worker.state.params)
    if params is None:
      students[name] = Student(worker, examples[name], config), path
    else:
      console.print(f'warm start of {name}: taken from {path}', markup=False)
      worker.start_from(params)
  steps = config.warm_start.steps
  with display.Live(
    console, 'warm start', dict.fromkeys(students, steps)
  ) as live:
    for _ in range(steps):
      losses = {name: student.step() for name, (student, _) in students.items()}
      for name, loss in losses.items():
        live.advance(name, f'loss {float(loss):.3f}')
  for student, path in students.values():
    checkpoint.save_params(path, student.params)
    student.worker.start_from(student.params)


class Student:
  """A policy that is shown demonstrations, a batch at a time.

  The loss is the negative log-likelihood of the solution and the
  end-of-sequence after it, a mean over the tokens of the batch.
  """

  def __init__(
    self,
    worker: worker_lib.Worker,
    examples: Sequence[records.Prompt],
    config: ml_collections.ConfigDict,
  ):
    self.worker = worker
    self._batch = config.warm_start.batch
    self._demonstrations = demonstrations(
      examples,
      config.policies[worker.name].warm_start_families,
      config.warm_start,
      config.reward.marker,
      seed=f'{config.seed}-{worker.name}',
    )
    optimizer = optimizer_lib.build(
      config.warm_start.optimizer, config.warm_start.steps
    )
    self._update = update.build(
      worker.model,
      optimizer,
      worker.mesh,
      {'own': objectives.log_likelihood},
      config.train.logit_chunk,
    )
    self._state = state_lib.fresh(
      worker.state.params, worker.model, optimizer, worker.mesh
    )

  @property
  def params(self) -> nnx.State:
    return self._state.params

  def step(self):
    """Learns from the next batch; returns its loss, still on its way."""
    prompt_ids, rows = [], []
    for i in range(self._batch):
      prompt, solution = next(self._demonstrations)
      prompt_ids.append(self.worker.prompt_ids(prompt))
      rows.append(self._row(i, solution))
    weight = 1 / sum(len(row.ids) for row in rows)
    packer = self.worker.packer
    packed = packer.pack(
      prompt_ids, [(row, weight) for row in rows], packer.lengths['own']
    )
    self._state, statistics = self._update(
      self._state, {'own': packed}, self.worker.frozen
    )
    return statistics['own/loss']

  def _row(self, prompt: int, solution: str) -> lesson.Row:
    tokenizer = self.worker.tokenizer
    ids = tokenizer.encode(solution.encode())
    ids = np.append(ids, np.int32(tokenizer.eos_id))
    zeros, all_of_it = np.zeros(len(ids), np.int32), np.ones(len(ids), bool)
    return lesson.Row(prompt, ids, zeros, 1.0, zeros, all_of_it)


def demonstrations(
  prompts: Sequence[records.Prompt],
  families: Sequence[str],
  config: ml_collections.ConfigDict,
  marker: str,
  seed: int | str,
) -> Iterator[tuple[records.Prompt, str]]:
  """Endless prompts with their worked solutions.

  Surfaces (the part of a family before '/') are drawn equally often; within a
  surface, a family is drawn as often as it is listed in `families`. In
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


def cache_name(
  worker: worker_lib.Worker,
  examples: Sequence[records.Prompt],
  config: ml_collections.ConfigDict,
) -> str:
  """Names all that the warm start of a policy depends on."""
  policy = config_lib.flat(config.policies[worker.name])
  del policy['listens_to']  # Nobody listens to anybody yet.
  parts = {
    'policy': policy,
    'warm_start': config_lib.flat(config.warm_start),
    'examples': msgspec.to_builtins(examples),
    'marker': config.reward.marker,
    'seed': config.seed,
    'weights': _weights(config.policies[worker.name].path),
    'tokenizer': worker.tokenizer.fingerprint,
    'template': dataclasses.asdict(worker.template),
    # What the order of sums depends on, and with it their rounding.
    'shapes': [
      worker.packer.context,
      worker.packer.lengths['own'],
      worker.packer.multiple,
      worker.packer.micro_rows,
      config.train.logit_chunk,
    ],
    'mesh': dict(worker.mesh.shape),
    'device': worker.mesh.devices.flat[0].device_kind,
    'jax': jax.__version__,
  }
  return f'{worker.name}-{config_lib.digest(parts)}'


def _weights(path) -> str:
  """The fingerprint of the weights at a path; '' without one."""
  folder = hugging_face.weights_folder(path) if path else ''
  return folder and hf_weights.fingerprint(folder)
