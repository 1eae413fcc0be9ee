"""Everything a run is made of, built from its config.

What a user may have got wrong is checked first, on the host: config, work dir,
data, tokenizers, prompt lengths, devices. Only then does a device do work.
"""

from collections.abc import Mapping
import dataclasses
import os
import time
import zlib

import grain
import jax
import ml_collections
import msgspec

from mrl_jax import algorithms
from mrl_jax import bucket
from mrl_jax import checks
from mrl_jax import cluster
from mrl_jax import config as config_lib
from mrl_jax import files
from mrl_jax import workdir as workdir_lib
from mrl_jax.data import pipeline
from mrl_jax.mwra import meshes
from mrl_jax.mwra import planner
from mrl_jax.rewards import judge
from mrl_jax.see import exchange
from mrl_jax.training import compiling
from mrl_jax.training import inputs
from mrl_jax.training import peers
from mrl_jax.training import planning
from mrl_jax.training import pretrained
from mrl_jax.training import stopwatch
from mrl_jax.training import worker as worker_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """A run, ready to start."""

  config: ml_collections.ConfigDict
  home: bucket.WorkDir
  shared: str  # The folder of parameters that several runs may use.
  run: str  # The fingerprint of the config, which names the run in records.
  began: float  # When it was built, by `time.monotonic`.
  method: algorithms.Method
  inputs: inputs.Inputs
  batches: grain.DatasetIterator  # Prompts of every round: the data cursor.
  # Prompts of each policy's dynamic sampling.
  refills: Mapping[str, grain.DatasetIterator]
  verifier: judge.Verifier
  plan: planner.Plan
  workers: Mapping[str, worker_lib.Worker]  # Policies that train here.
  node: exchange.Node  # Their part of the exchange.
  kinds: frozenset[str]  # Of the records that policies make.
  watch: stopwatch.Stopwatch

  @property
  def endpoints(self) -> Mapping[str, exchange.Endpoint]:
    """Each policy's place in the exchange."""
    return self.node.endpoints

  def close(self) -> None:
    """Ends the exchange, and the processes of the verifier."""
    self.node.close()
    self.verifier.close()


def build(config: ml_collections.ConfigDict, home: bucket.WorkDir) -> Job:
  """Checks the config and builds the run.

  Raises InputError if something in config, work dir or data is wrong.
  """
  began = time.monotonic()
  config_lib.check(config)
  method = algorithms.build(config.method)
  checks.require(
    config.train.samples > 1 or method.kinds,
    'train.samples = 1 gives no advantage: a sample is compared with others of '
    'its prompt, and with this method no peer has any to give',
  )
  verifier = judge.VERIFIERS[config.reward.verifier](config.reward)
  _open(home, config)
  loaded = _load(home, config, verifier)
  batches = pipeline.batches(loaded.train, config.train.prompts, config.seed)
  tokenizers = {name: p.tokenizer for name, p in loaded.policies.items()}
  places = peers.Peers(config, method.kinds, tokenizers)
  sizes = {
    name: planning.Sizes(policy.context, policy.tokenizer.vocab_size)
    for name in places.here
    for policy in [loaded.policies[name]]
  }
  plan = planning.plan(config, method, sizes, jax.devices())
  weights = pretrained.check(
    config.policies, {name: part.model for name, part in plan.items()}
  )
  digest = loaded.digest
  cluster.agree('the inputs', {'data': digest, 'weights': weights})
  cluster.decided(
    'the work dir',
    lambda: workdir_lib.claim(
      home.folder,
      config,
      inputs=digest,
      tokenizers={name: p.folder for name, p in loaded.policies.items()},
      weights=weights,
    ),
  )
  run = config_lib.digest(config_lib.of_all_processes(config_lib.flat(config)))
  node = cluster.leader_first(
    'the exchange',
    lambda: places.connect(
      run,
      os.path.join(home.folder, workdir_lib.JOURNALS),
      home.path(workdir_lib.RECEIVED),
    ),
  )
  workers = _workers(config, method, loaded.policies, plan, verifier)
  compiling.keep_if_sound([worker.spec.mesh for worker in workers.values()])
  return Job(
    config=config,
    home=home,
    shared=workdir_lib.cache_dir(config, home.given),
    run=run,
    began=began,
    method=method,
    inputs=loaded,
    batches=batches,
    refills={
      name: pipeline.batches(
        loaded.train,
        config.train.prompts,
        zlib.crc32(f'{config.seed}-{name}'.encode()),
      )
      for name in (workers if config.sample.refills else ())
    },
    verifier=verifier,
    plan=plan,
    workers=workers,
    node=node,
    kinds=method.kinds | places.journaled,
    watch=_watch(workers, node),
  )


def _open(home, config):
  """Takes the work dir; all hosts of a cluster must mean the same run by it."""
  cluster.agree(
    'the start',
    {
      'jax': jax.__version__,
      'work dir': files.absolute(home.given),
      'policies that are trained here': config_lib.trained_here(config),
      **config_lib.without_places(config_lib.flat(config)),
    },
  )

  def prepare():
    workdir_lib.prepare(home.folder, config)
    home.own()

  cluster.decided('the work dir', prepare)
  if not files.in_bucket(home.given):
    _check_shared(home.folder)


def _load(home, config, verifier) -> inputs.Inputs:
  """Data and tokenizers, which are made on disk in any case."""
  cache = workdir_lib.cache_dir(config, home.given)
  if files.in_bucket(cache):
    cache = os.path.join(home.folder, workdir_lib.CACHE)
  loaded = cluster.leader_first('data', lambda: inputs.load(config, cache))
  faulty = cluster.decided(
    'answers',
    lambda: (
      inputs.check_answers(loaded, verifier, config.data.max_faulty).faulty
    ),
  )
  return dataclasses.replace(loaded, faulty=faulty)


def _watch(workers, node) -> stopwatch.Stopwatch:
  return stopwatch.Stopwatch(
    {
      'verification': lambda: sum(w.judge.seconds for w in workers.values()),
      'exchange': lambda: sum(
        endpoint.ledger.seconds for endpoint in node.endpoints.values()
      ),
    }
  )


def _check_shared(folder):
  """Requires that all hosts of a cluster see the work dir of its leader."""
  try:
    with open(os.path.join(folder, workdir_lib.LOCK), encoding='utf-8') as f:
      found = f.read()
  except OSError:
    found = ''
  leaders, *others = cluster.gather('the work dir', found)
  alone = [i for i, theirs in enumerate(others, 1) if theirs != leaders]
  checks.require(
    not alone,
    f'host {alone} of the cluster has another {folder} than host 0: give all of '
    'them one shared folder, or gs://BUCKET/FOLDER',
  )


def describe(job: Job) -> workdir_lib.Plan:
  """The plan of a run, for `plan.json` and the terminal."""
  return msgspec.structs.replace(
    planning.describe(job.config, job.plan, jax.devices()),
    prompts_skipped=job.inputs.skipped,
    answers_faulty=job.inputs.faulty,
  )


def _workers(
  config, method, policies, plan, verifier
) -> dict[str, worker_lib.Worker]:
  workers, placed = {}, meshes.build(plan, jax.devices())
  for name, (mesh, _) in placed.items():
    missing = {d.process_index for d in jax.devices()} - {
      d.process_index for d in mesh.devices.flat
    }
    checks.require(
      not missing,
      f'{name} would have no device of host {min(missing, default=0)}: a '
      'cluster trains one policy, and its peers have clusters of their own '
      '(policies.NAME.address), or all policies in turn (mwra.time_share)',
    )
  for name, part in plan.items():
    chosen = planning.settled(config, part)
    training = planning.training(
      chosen, method, part.model, placed[name], policies[name].context
    )
    workers[name] = worker_lib.Worker(
      name=name,
      policy=policies[name],
      judge=judge.build(config, verifier),
      spec=training.spec,
      decode_mesh=training.decode_mesh,
      objectives=training.objectives,
      rescores=training.rescores,
      packer=training.packer,
      # By name, so that a policy is the same whoever its peers are.
      key=jax.random.fold_in(
        jax.random.key(config.seed), zlib.crc32(name.encode())
      ),
      config=chosen,
    )
  return workers
