"""The run: rounds of sampling, exchanging and learning."""

import contextlib
import functools
import gc
import math
import time
import zlib

from absl import logging
import jax
import msgspec
import numpy as np
from rich import console as console_lib

from mrl_jax import cluster
from mrl_jax import config as config_lib
from mrl_jax import workdir
from mrl_jax.sharing import context as context_lib
from mrl_jax.sharing import hacpo
from mrl_jax.sharing import publish
from mrl_jax.thl import transfer
from mrl_jax.training import compiling
from mrl_jax.training import display
from mrl_jax.training import dynamic_sampling
from mrl_jax.training import evaluation
from mrl_jax.training import job as job_lib
from mrl_jax.training import metrics
from mrl_jax.training import packing
from mrl_jax.training import parallel
from mrl_jax.training import peers
from mrl_jax.training import planning
from mrl_jax.training import pretrained
from mrl_jax.training import profiling
from mrl_jax.training import programs
from mrl_jax.training import progress as progress_lib
from mrl_jax.training import recorder
from mrl_jax.training import saving
from mrl_jax.training import statistics
from mrl_jax.training import stopping
from mrl_jax.training import summary
from mrl_jax.training import warm_start
from mrl_jax.training import worker as worker_lib
from mrl_jax.update import checkpoint
from mrl_jax.update import update

_SAMPLE, _EVALUATE, _REFILL = range(3)  # Streams of a policy's random key.


def run(
  job: job_lib.Job,
  console: console_lib.Console,
  stop: stopping.Stop | None = None,
) -> workdir.Summary:
  """Trains all policies of a job, unless it is asked to `stop`.

  A job with the same config and work dir resumes from the newest checkpoint,
  and ends as if it had never been stopped.
  """
  plan = job_lib.describe(job)
  cluster.decided(
    'the plan', lambda: workdir.write(job.home.folder, workdir.PLAN, plan)
  )
  display.show_start(console, job.home.given, plan)
  checkpoints = checkpoint.Checkpoints(
    job.home.path(workdir.CHECKPOINTS), job.config.checkpoint.keep
  )
  ahead = {
    name: programs.ahead(worker, job.method, len(job.inputs.heldout))
    for name, worker in job.workers.items()
  }
  with (
    contextlib.closing(checkpoints),
    contextlib.closing(job),
    compiling.ahead(ahead) as compiled,
  ):
    pretrained.freeze(job.workers, job.config, console)
    progress = progress_lib.resume(job, checkpoints)
    done = progress and progress.rounds - bool(progress.unwritten)
    writer = cluster.leader_first('metrics', lambda: _writer(job, done))
    with contextlib.closing(writer):
      if progress is None:
        pretrained.start(job.workers, job.config, console)
        warm_start.run(job.workers, job.config, job.shared, console)
        compiled()
        accuracy = evaluate(job, 0, writer)
        progress = progress_lib.Progress(accuracy={0: accuracy})
        taken = progress_lib.snapshot(job, progress)
        progress_lib.save(job, taken, checkpoints)
      elif progress.rounds:
        console.print(f'Resuming after round {progress.rounds}.')
      compiled()
      job.node.open()
      stop = stop or stopping.Stop()
      train(job, progress, checkpoints, writer, console, stop)
  made = finish(job, progress, console)
  # Peers may keep the leader from closing its part of the exchange.
  cluster.barrier('the end', cluster.PATIENCE_S)
  return made


def _writer(job, done) -> metrics.Writer | metrics.Silent:
  if not cluster.leads():
    return metrics.Silent()
  return metrics.Writer(job.home.folder, done, config_lib.flat(job.config))


def train(
  job: job_lib.Job,
  progress: progress_lib.Progress,
  checkpoints: checkpoint.Checkpoints,
  writer: metrics.Writer,
  console: console_lib.Console,
  stop: stopping.Stop,
) -> None:
  """Plays the remaining rounds, and writes the metrics of each."""
  config, total = job.config, job.config.train.rounds
  began = job.began - progress.seconds
  saver = saving.Saver(job, progress, checkpoints, writer, stop)
  totals = dict.fromkeys(job.workers, total)
  with (
    display.live(console, 'round', totals, progress.rounds) as advance,
    stop.deferred(),
    _less_garbage(),
  ):
    job.watch.lap()  # The first round does not count what came before it.
    while progress.rounds < total or progress.unwritten:
      if not progress.unwritten:
        with saver.leaving_behind('round'), profiling.of_round(job, progress):
          progress.unwritten = play_round(job, progress)
      if progress.rounds % config.eval.every == 0 or progress.rounds == total:
        saver.before_evaluation()
        with saver.leaving_behind('evaluation'), job.watch('evaluation'):
          accuracy = evaluate(job, progress.rounds, writer)
        progress.accuracy[progress.rounds] = accuracy
      progress.seconds = time.monotonic() - began
      notes = _write(job, progress, writer)
      saver.after_round()
      # After all that a lost terminal could stop.
      for name, note in notes.items():
        advance(name, note)


@contextlib.contextmanager
def _less_garbage():
  """Has the collection of garbage pass over what exists by now, and stays."""
  gc.collect()
  gc.freeze()
  try:
    yield
  finally:
    gc.unfreeze()


def _write(job, progress, writer) -> dict[str, str]:
  """Writes the metrics of the last round; returns a note for each policy."""
  phases, notes = job.watch.lap(), {}
  evaluated = progress.accuracy.get(progress.rounds, {})
  for name, result in progress.unwritten.items():
    timing = msgspec.structs.replace(
      result.timing, elapsed=progress.seconds, phases=phases
    )
    result = msgspec.structs.replace(
      result, timing=timing, heldout_accuracy=evaluated.get(name, {})
    )
    writer.round(result)
    notes[name] = display.note(result)
  progress.unwritten = {}
  return notes


def play_round(
  job: job_lib.Job, progress: progress_lib.Progress
) -> dict[str, workdir.RoundMetrics]:
  """Plays one round of all policies; returns the metrics of each.

  Every policy samples a group for each prompt and publishes what its method
  shares. Then every policy collects what its peers published, builds training
  rows from it and from its own groups, and updates. Policies are at work at the
  same time, each on its own mesh.
  """
  complete, round = recorder.start(job), progress.rounds
  prompts = next(job.batches)
  groups = sample(job, prompts, round)
  learned = dict(
    parallel.each(
      lambda worker: learn(job, progress, worker, prompts, groups[worker.name]),
      job.workers,
    )
  )
  progress.rounds += 1
  results = {}
  for name in job.workers:
    context, result = learned[name]
    if not math.isfinite(result.grad_norm):
      raise FloatingPointError(
        f'round {round}: the gradient of {name} is {result.grad_norm}. The last '
        'checkpoint is sound; a lower train.optimizer.learning_rate or '
        'method.prp.max_ratio may help'
      )
    statistics.warn_of_mismatch(result)
    progress.add_residuals(name, context.log.residuals)
    results[name] = complete(result, groups[name])
  return results


def sample(job: job_lib.Job, prompts, round: int) -> dict:
  """Samples a group for each prompt; each policy publishes when it finishes."""

  def sampled(worker):
    with job.watch('sampling'):
      return worker.sample(
        prompts,
        job.config.train.samples,
        _key(worker, _SAMPLE, round),
        planning.density(job.config.sample),
        job.run,
        round,
      )

  groups = {}
  for name, groups[name] in parallel.each(sampled, job.workers):
    if not cluster.leads():
      continue
    job.endpoints[name].publish(
      round,
      publish.publish(
        groups[name],
        job.kinds,
        texts=job.config.see.outcome_texts,
        verifier=job.config.reward.verifier,
      ),
    )
  return {name: groups[name] for name in job.workers}


def learn(
  job: job_lib.Job,
  progress: progress_lib.Progress,
  worker: worker_lib.Worker,
  prompts,
  groups: dynamic_sampling.Groups,
) -> tuple[context_lib.Context, workdir.RoundMetrics]:
  """Updates a policy; returns its context and the metrics of the round."""
  round, watch = progress.rounds, job.watch
  with watch('sampling'):
    key = _key(worker, _REFILL, round)
    sampled = dynamic_sampling.refill(job, worker, prompts, groups, round, key)
  context = collect(job, progress, worker, sampled)
  with watch('batches'):
    batch = job.method.batch(context)
    mini_batches = worker.pack(sampled.prompts, batch)
    real_slots = packing.real_slots(mini_batches)
  with watch('scoring'):
    scored = worker.rescore(mini_batches)
  with watch('updates'):
    updates = worker.update(mini_batches)
  with watch('scoring'):
    jax.block_until_ready(scored)
  with watch('updates'):
    updates = [*map(update.joined, jax.device_get(updates))]
  result = statistics.round_metrics(
    worker.name, round, groups, context, batch, updates
  )
  slots = {'sampling': worker.sampled_slots, **real_slots}
  return context, msgspec.structs.replace(result, slots=slots)


def collect(
  job: job_lib.Job,
  progress: progress_lib.Progress,
  worker: worker_lib.Worker,
  sampled: dynamic_sampling.Sampled,
) -> context_lib.Context:
  """Collects what peers published; returns the policy's context of the round."""
  name, round = worker.name, progress.rounds
  received = peers.collect(job.endpoints[name], round, job.method.kinds)
  context = context_lib.Context(
    groups=sampled.groups,
    received=received,
    settings=job.config.method,
    tokenizer=worker.policy.tokenizer,
    limits=transfer.Limits(**job.config.thl),
    judge=functools.partial(worker.judge_responses, sampled.prompts),
    choose=job.method.choose,
    score=functools.partial(worker.score, sampled.prompts),
    rng=np.random.default_rng(
      [job.config.seed, round, zlib.crc32(name.encode())]
    ),
    kept=sampled.kept,
  )
  progress.accuracies[name] = hacpo.remember_accuracies(
    progress.accuracies.get(name, {}),
    name,
    sampled.groups[: job.config.train.prompts],
    [*context.peer_records, *context.late_records],
    job.config.method.hacpo.window,
  )
  context.capability_ratio.update(
    hacpo.capability_ratios(progress.accuracies[name], name)
  )
  if received and not context.peer_records:
    logging.log_first_n(
      logging.WARNING,
      'round %d: %s can use none of the %d records it received, as they are '
      'about other prompts; peers need the same data, seed and train.prompts',
      3,
      round,
      name,
      len(received),
    )
  return context


def evaluate(
  job: job_lib.Job, rounds: int, writer: metrics.Writer
) -> dict[str, dict[str, float]]:
  """Evaluates every policy; returns their accuracies, by family."""
  keys = {n: _key(w, _EVALUATE, rounds) for n, w in job.workers.items()}
  evaluations = evaluation.evaluate(
    job.workers, job.inputs.heldout, job.config.eval, keys, rounds
  )
  for result in evaluations.values():
    writer.evaluation(result)
  return {name: result.accuracy for name, result in evaluations.items()}


def finish(
  job: job_lib.Job,
  progress: progress_lib.Progress,
  console: console_lib.Console,
) -> workdir.Summary:
  """Writes `summary.json` and shows the results."""
  made = summary.build(job, progress)
  if cluster.leads():
    workdir.write(job.home.folder, workdir.SUMMARY, made)
    for endpoint in job.endpoints.values():
      endpoint.finish()
    job.home.push(wait=True)
    display.show_end(console, made, job.home.given)
  return made


def _key(worker: worker_lib.Worker, stream: int, round: int) -> jax.Array:
  return jax.random.fold_in(jax.random.fold_in(worker.key, stream), round)
