"""The run: rounds of sampling, exchanging and learning."""

import collections
import contextlib
import json
import math
import os
import time
import zlib

from absl import logging
import jax
import ml_collections
import numpy as np
from rich import console as console_lib

from mrl_jax import config as config_lib
from mrl_jax import files
from mrl_jax.analysis.report import page
from mrl_jax.see import ledger as ledger_lib
from mrl_jax.sharing import capability
from mrl_jax.sharing import lesson as lesson_lib
from mrl_jax.sharing import publish
from mrl_jax.training import display
from mrl_jax.training import dynamic_sampling as refill
from mrl_jax.training import evaluation
from mrl_jax.training import job as job_lib
from mrl_jax.training import metrics
from mrl_jax.training import overview as overview_lib
from mrl_jax.training import pretrained
from mrl_jax.training import progress as progress_lib
from mrl_jax.training import statistics
from mrl_jax.training import warm_start
from mrl_jax.training import worker as worker_lib
from mrl_jax.update import checkpoint

_SAMPLE, _EVALUATE, _REFILL = range(3)  # Streams of a policy's random key.


def run(
  config: ml_collections.ConfigDict,
  workdir: str,
  console: console_lib.Console,
) -> dict:
  """Trains all policies of `config` and returns what `summary.json` says.

  Called again with the same config and work dir it goes on from the newest
  checkpoint, and ends as if it had never stopped.
  """
  began = time.monotonic()
  job = job_lib.build(config, workdir)
  overview = overview_lib.of_job(job)
  path = os.path.join(workdir, overview_lib.FILE)
  files.write(path, json.dumps(overview, indent=1))
  display.show_start(console, workdir, overview)
  try:
    return begin_or_resume(job, console, began)
  finally:  # A report is written of a run that ends early, too.
    path = page.write(workdir)
    console.print(f'Report: {path}', soft_wrap=True, markup=False)


def begin_or_resume(
  job: job_lib.Job, console: console_lib.Console, began: float
) -> dict:
  """Plays the rounds that are left; returns what `summary.json` says."""
  config, workdir = job.config, job.workdir
  checkpoints = checkpoint.Checkpoints(
    os.path.join(workdir, checkpoint.FOLDER), config.checkpoint.keep
  )
  with (
    contextlib.closing(checkpoints),
    contextlib.closing(job.node),
    contextlib.closing(job.judge),
  ):
    pretrained.freeze(job.workers, config, console)
    progress = progress_lib.resume(job, checkpoints)
    done = progress and progress.rounds
    with contextlib.closing(
      metrics.Writer(workdir, done, config_lib.flat(config))
    ) as writer:
      if progress is None:
        progress = start(job, writer, console)
        progress_lib.save(job, progress, checkpoints)
      elif progress.rounds:
        console.print(f'Resuming after round {progress.rounds}.')
      job.node.open()
      began -= progress.seconds
      train(job, progress, checkpoints, writer, console, began)
  return finish(job, progress, console)


def start(
  job: job_lib.Job, writer: metrics.Writer, console: console_lib.Console
) -> progress_lib.Progress:
  """Gives the policies their parameters, and evaluates what they then can."""
  pretrained.start(job.workers, job.config, console)
  warm_start.run(
    job.workers, job.inputs.examples, job.config, job.cache, console
  )
  return progress_lib.Progress(accuracy={0: evaluate(job, 0, writer)})


def train(
  job: job_lib.Job,
  progress: progress_lib.Progress,
  checkpoints: checkpoint.Checkpoints,
  writer: metrics.Writer,
  console: console_lib.Console,
  began: float,
) -> None:
  """Plays the rounds that are left, and writes down each."""
  config = job.config
  totals = dict.fromkeys(job.workers, config.train.rounds)

  def due(every):
    return (
      progress.rounds % every == 0 or progress.rounds == config.train.rounds
    )

  job.watch.lap()  # What comes before the rounds is not of them.
  with display.Live(console, 'round', totals, progress.rounds) as live:
    while progress.rounds < config.train.rounds:
      round = progress.rounds
      rows = play_round(job, progress)
      if due(config.eval.every):
        with job.watch('evaluation'):
          accuracy = evaluate(job, progress.rounds, writer)
        progress.accuracy[progress.rounds] = accuracy
      progress.seconds = time.monotonic() - began
      phases = job.watch.lap()
      _check_finite(rows, round)
      for name, row in rows.items():
        if progress.rounds in progress.accuracy:
          row['heldout_accuracy'] = progress.accuracy[progress.rounds][name]
        row[metrics.TIMING]['elapsed'] = progress.seconds
        row[metrics.TIMING]['phases'] = phases
        writer.round(round, name, row)
        live.advance(name, display.note(row))
      if due(config.checkpoint.every):
        with job.watch('checkpoints'):
          progress_lib.save(job, progress, checkpoints)


def play_round(job: job_lib.Job, progress: progress_lib.Progress) -> dict:
  """Plays one round of all policies; returns the metrics of each.

  Policies sample and learn at the same time, each on its own mesh: nothing
  waits for a device until its result is needed.
  """
  began = time.monotonic()
  before = {name: e.ledger.timing() for name, e in job.endpoints.items()}
  round, config = progress.rounds, job.config
  prompts = next(job.batches)
  with job.watch('sampling'):
    sampling = {
      name: worker.start_sampling(
        prompts,
        config.train.samples,
        _key(worker, _SAMPLE, round),
        config.sample.temperature,
      )
      for name, worker in job.workers.items()
    }
  groups, verified = {}, collections.defaultdict(collections.Counter)
  job.judge.since_last()  # An evaluation's answers are not of this round.
  for name, worker in job.workers.items():
    with job.watch('sampling'):
      groups[name] = worker.finish_sampling(
        sampling[name], job.judge, job.run, round
      )
    verified[name].update(job.judge.since_last())
    job.endpoints[name].publish(
      round,
      publish.publish(
        groups[name],
        job.kinds,
        texts=config.see.outcome_texts,
        verifier=config.reward.verifier,
      ),
    )
  sampled, lessons, updates = {}, {}, {}
  for name, worker in job.workers.items():
    key = _key(worker, _REFILL, round)
    with job.watch('sampling'):
      sampled[name] = refill.refill(
        job, worker, prompts, groups[name], round, key
      )
    with job.watch('lessons'):
      lessons[name] = make_lesson(job, progress, name, sampled[name])
    verified[name].update(job.judge.since_last())
    with job.watch('updates'):
      updates[name] = worker.update(sampled[name].prompts, lessons[name])
  with job.watch('updates'):
    updates = jax.device_get(updates)
  progress.rounds += 1
  rows = {}
  for name in job.workers:
    ledger = job.endpoints[name].ledger
    rows[name] = statistics.of_round(
      groups[name],
      lessons[name],
      updates[name],
      rollouts=sampled[name].rollouts,
      exchanged=ledger.since_last(),
      exchange_seconds=ledger.timing() - before[name],
      verified=verified[name],
      seconds=time.monotonic() - began,
    )
  return rows


def make_lesson(
  job: job_lib.Job,
  progress: progress_lib.Progress,
  name: str,
  sampled: refill.Sampled,
) -> lesson_lib.Lesson:
  """What a policy makes of its own samples and of what its peers gave."""
  worker, round = job.workers[name], progress.rounds
  received = job.endpoints[name].collect(round, job.method.kinds)
  accuracies = capability.remember(
    progress.accuracies.get(name, {}),
    (name, sampled.groups[: job.config.train.prompts]),
    received,
    job.config.method.hacpo.window,
  )
  progress.accuracies[name] = accuracies
  learner = worker.learner(
    sampled.prompts,
    job.judge,
    job.limits,
    rng=np.random.default_rng(
      [job.config.seed, round, zlib.crc32(name.encode())]
    ),
    ratios=capability.ratios(accuracies, name),
  )
  lesson = job.method.lesson(sampled.groups, received, learner, sampled.kept)
  tell_of_strangers(name, lesson, round)
  progress.add_residuals(name, lesson.residuals)
  return lesson


def tell_of_strangers(name: str, lesson: lesson_lib.Lesson, round: int) -> None:
  """Warns of peers whose records a policy has no use for at all."""
  if lesson.peer_records_unused and not lesson.peer_records:
    logging.log_first_n(
      logging.WARNING,
      'round %d: %s can use none of the %d records it received, as they are '
      'about other prompts; peers need the same data, seed and train.prompts',
      3,
      round,
      name,
      lesson.peer_records_unused,
    )


def evaluate(
  job: job_lib.Job, rounds: int, writer: metrics.Writer
) -> dict[str, dict[str, float]]:
  """Evaluates every policy; returns their accuracies, by family."""
  keys = {
    name: _key(worker, _EVALUATE, rounds)
    for name, worker in job.workers.items()
  }
  found = evaluation.evaluate(
    job.workers, job.inputs.heldout, job.judge, job.config.eval, keys
  )
  for name, one in found.items():
    writer.evaluation(rounds, name, one._asdict())
  return {name: one.accuracy for name, one in found.items()}


def finish(
  job: job_lib.Job,
  progress: progress_lib.Progress,
  console: console_lib.Console,
) -> dict:
  """Writes `summary.json` and shows what came of the run."""
  before, after = progress.accuracy[0], progress.accuracy[progress.rounds]
  summary = {
    'method': job.config.method.name,
    'seed': job.config.seed,
    'rounds': progress.rounds,
    metrics.TIMING: _timing(job, progress),
    'policies': {
      name: {
        'heldout_accuracy': {
          'before': before[name]['all'],
          'after': after[name]['all'],
        },
        'heldout_accuracy_by_family': {
          'before': before[name],
          'after': after[name],
        },
      }
      for name in job.workers
    },
    **_exchange(job),
    'residuals': progress.to_json()['residuals'],
    'prompts_skipped': job.inputs.skipped,
  }
  path = os.path.join(job.workdir, 'summary.json')
  files.write(path, json.dumps(summary, indent=1))
  for endpoint in job.endpoints.values():
    endpoint.finish()
  display.show_end(console, summary, progress.residuals, job.workdir)
  return summary


def _check_finite(rows, round):
  for name, row in rows.items():
    if not math.isfinite(row['grad_norm']):
      raise FloatingPointError(
        f'round {round}: the gradient of {name} is {row["grad_norm"]}. The '
        'last checkpoint is sound; a lower train.optimizer.learning_rate or '
        'method.prp.max_ratio may help'
      )


def _exchange(job) -> dict:
  """The ledgers of all policies, by pair: {'sender->receiver': ...}."""
  received = {
    f'{sender}->{receiver}': (endpoint.ledger, sender)
    for receiver, endpoint in job.endpoints.items()
    for sender in job.config.policies
  }
  sent = {
    f'{sender}->{receiver}': (ledger, receiver)
    for sender, endpoint in job.endpoints.items()
    for receiver, ledger in endpoint.sent.items()
  }

  def by_pair(ledgers, table):
    found = {
      pair: table(ledger).get(peer, {})
      for pair, (ledger, peer) in ledgers.items()
    }
    return {pair: values for pair, values in found.items() if values}

  return {
    'exchange': by_pair(received, ledger_lib.Ledger.table),
    'sent': by_pair(sent, ledger_lib.Ledger.table),
    'refusals': by_pair({**sent, **received}, ledger_lib.Ledger.refusals),
    'messages_refused': job.node.refused,
  }


def _timing(job, progress) -> dict:
  """Seconds of the run, of its exchange, and of waiting for each peer."""
  ledgers = {name: e.ledger for name, e in job.endpoints.items()}
  return {
    'seconds': progress.seconds,
    'exchange': sum(ledger.seconds for ledger in ledgers.values()),
    'waited': {
      f'{sender}->{receiver}': seconds
      for receiver, ledger in ledgers.items()
      for sender, seconds in ledger.waited.items()
    },
  }


def _key(worker: worker_lib.Worker, stream: int, round: int) -> jax.Array:
  return jax.random.fold_in(jax.random.fold_in(worker.key, stream), round)
