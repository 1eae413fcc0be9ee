"""Small runs, which tests share."""

import contextlib
import functools
import io
import os
import tempfile
from typing import NamedTuple
from unittest import mock

import jax
import ml_collections
import msgspec
from rich import console as console_lib

from mrl_jax import bucket
from mrl_jax import workdir as workdir_lib
from mrl_jax.data import arithmetic
from mrl_jax.training import job as job_lib
from mrl_jax.training import loop
from mrl_jax.training import pretrained
from mrl_jax.training import progress as progress_lib
from mrl_jax.training import stopping
from mrl_jax.training import warm_start
from mrl_jax.training import worker as worker_lib
from mrl_jax.update import checkpoint
from tests import examples

ROUNDS = 2
Rows = dict[str, list[workdir_lib.RoundMetrics]]  # By policy.


class Run(NamedTuple):
  """A run, and what it printed."""

  summary: workdir_lib.Summary
  workdir: str
  shown: str


class Rounds(NamedTuple):
  """Rounds that were played without evaluations and checkpoints."""

  job: job_lib.Job
  progress: progress_lib.Progress
  rows: Rows


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory:
  return tempfile.TemporaryDirectory()  # Removed when the tests end.


def folder(name: str) -> str:
  return os.path.join(_temporary().name, name)


@functools.cache
def cache() -> str:
  """The cache of all runs; it has 60 prompts of every arithmetic family."""
  with mock.patch.object(arithmetic, 'MAX_EXAMPLES', 60):
    arithmetic.prepare(os.path.join(folder('cache'), 'tfds'), seed=0)
  return folder('cache')


def config(method: str = 'prp', **changes) -> ml_collections.ConfigDict:
  """A job of a few seconds in which every policy has something to gain."""
  return examples.run_config(
    **{
      'method.name': method,
      'reward.functions': ('exact', 'format'),
      'reward.weights': (1.0, 1.0),
      'train.rounds': ROUNDS,
      'cache_dir': cache(),
      **changes,
    }
  )


def alone(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """The job of llama without gemma."""
  with config.unlocked():
    del config.policies['gemma']
  return config


class Asked(stopping.Stop):
  """Somebody has asked the run to stop, before its first round."""

  def __init__(self):
    super().__init__()
    self.asked = True

  def leave(self):
    raise SystemExit(stopping.EXIT)


def console() -> console_lib.Console:
  return console_lib.Console(file=io.StringIO(), width=100)


def run(
  name: str,
  config: ml_collections.ConfigDict,
  shown: console_lib.Console | None = None,
  stop: stopping.Stop | None = None,
) -> Run:
  """Starts or resumes a run in the folder `name`."""
  shown = shown or console()
  summary = loop.run(
    job_lib.build(config, bucket.WorkDir(folder(name))), shown, stop
  )
  return Run(summary, folder(name), shown.file.getvalue())


def play(
  name: str, config: ml_collections.ConfigDict, rounds: int = ROUNDS
) -> Rounds:
  """Plays the first rounds of a run, without evaluations and checkpoints."""
  job, progress = (
    job_lib.build(config, bucket.WorkDir(folder(name))),
    progress_lib.Progress(),
  )
  rows = {policy: [] for policy in job.workers}
  with contextlib.closing(job):
    pretrained.start(job.workers, config, console())
    warm_start.run(job.workers, config, job.shared, console())
    job.node.open()
    for _ in range(rounds):
      for policy, row in loop.play_round(job, progress).items():
        rows[policy].append(_untimed(row))
  return Rounds(job, progress, rows)


def rows(workdir: str) -> Rows:
  """The rows of `metrics.jsonl` by policy, without times and evaluations."""
  by_policy = {}
  for line in examples.lines(os.path.join(workdir, workdir_lib.ROUNDS)):
    row = msgspec.convert(line, workdir_lib.RoundMetrics)
    by_policy.setdefault(row.policy, []).append(_untimed(row))
  return by_policy


def _untimed(row):
  return msgspec.structs.replace(
    row, timing=workdir_lib.Timing(), heldout_accuracy={}
  )


def newest_checkpoint(
  workdir: str, job: job_lib.Job | None = None
) -> tuple[dict, dict]:
  """The states of policies and of the host in the newest checkpoint of a run.

  `job` has the same models and devices; by default it is that of `finished`.
  """
  workers = (job or finished_job()).workers
  with contextlib.closing(
    checkpoint.Checkpoints(os.path.join(workdir, workdir_lib.CHECKPOINTS), 2)
  ) as checkpoints:
    states, host = checkpoints.restore(
      {name: worker.state for name, worker in workers.items()}
    )
  return jax.device_get(states), host


# The random keys of all sampling of `finished`.
KEYS = []


@functools.cache
def finished() -> Run:
  """A finished run. The name of its folder would be markup for a console."""
  sample = worker_lib.Worker.sample

  def sample_and_note(worker, prompts, per_prompt, key, *args, **kwargs):
    KEYS.append(tuple(jax.random.key_data(key).tolist()))
    return sample(worker, prompts, per_prompt, key, *args, **kwargs)

  with mock.patch.object(worker_lib.Worker, 'sample', sample_and_note):
    return run('a[/b]', config())


@functools.cache
def finished_job() -> job_lib.Job:
  """The job of `finished`, built again; its policies have no state yet."""
  return job_lib.build(config(), bucket.WorkDir(finished().workdir))
