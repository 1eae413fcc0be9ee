"""Everything a run is made of, built from its config.

What a user may have got wrong is checked first, on the host: config, work dir,
data, tokenizers, prompt lengths, devices. Only then does a device do work.
"""

from collections.abc import Mapping
import dataclasses
import json
import os
import zlib

import grain
import jax
import ml_collections

from mrl_jax import algorithms
from mrl_jax import checks
from mrl_jax import config as config_lib
from mrl_jax import files
from mrl_jax.data import pipeline
from mrl_jax.models import decoder
from mrl_jax.mwra import cost
from mrl_jax.mwra import meshes
from mrl_jax.mwra import planner
from mrl_jax.rewards import functions
from mrl_jax.see import exchange
from mrl_jax.see import node as node_lib
from mrl_jax.thl import transfer
from mrl_jax.training import inputs
from mrl_jax.training import packing as batch
from mrl_jax.training import peers
from mrl_jax.training import pretrained
from mrl_jax.training import stopwatch
from mrl_jax.training import worker as worker_lib
from mrl_jax.update import optimizer

_CONFIG, _CACHE, _JOURNALS = 'config.json', 'cache', 'see'
# Beside the keys of the config, a digest of what was read and, by policy, the
# folders of tokenizers, from the work dir, and fingerprints of weights.
_INPUTS, TOKENIZERS, WEIGHTS = 'inputs', 'tokenizers', 'weights'
NOT_CONFIG = (_INPUTS, TOKENIZERS, WEIGHTS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """A run, ready to start.

  Attributes:
    config: as given.
    workdir: where everything is written.
    cache: the folder of what other runs may use too.
    run: the fingerprint of the config, which names the run in records.
    method: what is shared and what is maximised.
    inputs: prompts, and the policies' tokenizers.
    batches: prompts of every round; its state is the data cursor.
    refills: prompts of each policy's dynamic sampling.
    judge: the verifier and the reward.
    plan: which policy has which devices.
    workers: one for each policy that is trained here.
    node: their part of the exchange.
    kinds: of records that policies make, for peers or the journal.
    limits: what every policy takes of its peers' rollouts.
    watch: tells where the time goes.
  """

  config: ml_collections.ConfigDict
  workdir: str
  cache: str
  run: str
  method: algorithms.Method
  inputs: inputs.Inputs
  batches: grain.DatasetIterator
  refills: Mapping[str, grain.DatasetIterator]
  judge: functions.Judge
  plan: planner.Plan
  workers: Mapping[str, worker_lib.Worker]
  node: node_lib.Node
  kinds: frozenset[str]
  limits: transfer.Limits
  watch: stopwatch.Stopwatch

  @property
  def endpoints(self) -> Mapping[str, exchange.Endpoint]:
    """Each policy's place in the exchange."""
    return self.node.endpoints


def build(config: ml_collections.ConfigDict, workdir: str) -> Job:
  """Checks the config and builds the run.

  Raises:
    InputError: something in the config, the work dir or the data is wrong.
  """
  config_lib.check(config)
  checks.choose(
    config.train.aggregation, batch.AGGREGATIONS, 'train.aggregation'
  )
  for phase in ('warm_start', 'train'):
    optimizer.check(config[phase].optimizer, f'{phase}.optimizer')
  method = algorithms.build(config.method)
  checks.require(
    config.train.samples > 1 or method.kinds,
    'train.samples = 1 gives no advantage: a sample is compared with others of '
    'its prompt, and with this method no peer has any to give',
  )
  judge = functions.build(config.reward)
  check_workdir(workdir, config)
  cache = cache_dir(config, workdir)
  loaded = inputs.load(config, cache)
  batches = pipeline.batches(loaded.train, config.train.prompts, config.seed)
  others = peers.check(config, method.kinds, loaded.tokenizers)
  plan = _plan(config, others.here, loaded, method.reference)
  weights = pretrained.check(
    config.policies, {name: part.model for name, part in plan.items()}
  )
  _claim(workdir, config, loaded, weights)
  run = config_lib.digest(config_lib.of_all_processes(config_lib.flat(config)))
  node = peers.connect(
    config,
    method.kinds,
    loaded.tokenizers,
    others,
    run=run,
    folder=os.path.join(workdir, _JOURNALS),
  )
  return Job(
    config=config,
    workdir=workdir,
    cache=cache,
    run=run,
    method=method,
    inputs=loaded,
    batches=batches,
    refills=_refills(config, others.here, loaded),
    judge=judge,
    plan=plan,
    workers=_workers(config, method, loaded, plan),
    node=node,
    kinds=method.kinds | others.journaled,
    limits=transfer.Limits(**config.thl),
    watch=stopwatch.Stopwatch(
      {
        'verification': lambda: judge.seconds,
        'exchange': lambda: sum(
          endpoint.ledger.seconds for endpoint in node.endpoints.values()
        ),
      }
    ),
  )


def cache_dir(config: ml_collections.ConfigDict, workdir: str) -> str:
  """Where what other runs may use too is kept."""
  return config.cache_dir or os.path.join(workdir, _CACHE)


def check_workdir(workdir: str, config: ml_collections.ConfigDict) -> None:
  """Makes the work dir, unless there is one that is not this config's.

  Raises:
    InputError: it belongs to another config, or is not a work dir at all.
  """
  theirs = claimed(workdir)
  if theirs is not None:
    theirs = config_lib.without_places(theirs)
    mine = config_lib.without_places(config_lib.flat(config))
    differ = [
      f'{key}: {theirs.get(key)!r} there, {mine.get(key)!r} now'
      for key in sorted({*theirs, *mine} - {*NOT_CONFIG})
      if theirs.get(key) != mine.get(key)
    ]
    checks.require(
      not differ,
      f'{workdir} was written by another config; give a fresh --workdir, or '
      'the same flags to resume. They differ in\n  ' + '\n  '.join(differ),
    )
    return
  checks.require(
    not os.path.isfile(workdir), f'--workdir={workdir} is a file, not a folder'
  )
  os.makedirs(workdir, exist_ok=True)
  others = sorted({*os.listdir(workdir)} - {_CACHE, _CONFIG + '.new'})
  checks.require(
    not others,
    f'{workdir} is not a work dir: it has no {_CONFIG}, and holds '
    f'{", ".join(others[:3])}. Give a fresh --workdir',
  )


def claimed(workdir: str) -> dict | None:
  """What a work dir's `config.json` says; None if it has none."""
  path = os.path.join(workdir, _CONFIG)
  if not os.path.exists(path):
    return None
  with open(path, encoding='utf-8') as f:
    try:
      return json.load(f)
    except ValueError as error:
      raise checks.InputError(f'{path} is not JSON: {error}') from error


def _claim(workdir, config, loaded, weights) -> None:
  """Writes down config and inputs, unless they are there and the same."""
  theirs = claimed(workdir)
  if theirs is None:
    values = {
      **config_lib.flat(config),
      _INPUTS: loaded.digest,
      TOKENIZERS: {n: _within(p, workdir) for n, p in loaded.folders.items()},
      WEIGHTS: weights,
    }
    files.write(os.path.join(workdir, _CONFIG), json.dumps(values, indent=1))
    return
  checks.require(
    (theirs.get(_INPUTS), theirs.get(WEIGHTS)) == (loaded.digest, weights),
    f'{workdir} began with other prompts, tokenizers or weights than its config '
    'leads to now; put the files back to resume, or give a fresh --workdir',
  )


def _within(path, workdir) -> str:
  """The path of a folder from a work dir that it is in; otherwise as it is."""
  if not os.path.isdir(path):
    return path  # The hub's name for it.
  path, workdir = os.path.abspath(path), os.path.abspath(workdir)
  inside = os.path.commonpath([path, workdir]) == workdir
  return os.path.relpath(path, workdir) if inside else path


def _refills(config, here, loaded) -> dict[str, grain.DatasetIterator]:
  """Each policy's own order of prompts, where it may sample more of them."""
  return {
    name: pipeline.batches(
      loaded.train,
      config.train.prompts,
      zlib.crc32(f'{config.seed}-{name}'.encode()),
    )
    for name in (here if config.sample.refills else ())
  }


def _plan(config, here, loaded, reference) -> planner.Plan:
  devices = jax.devices()
  models, shapes = {}, {}
  for name in here:
    policy = config.policies[name]
    models[name] = pretrained.architecture(
      policy, loaded.tokenizers[name].vocab_size
    )
    _, params, _ = decoder.abstract(models[name])
    shapes[name] = cost.RoundShape(
      rows=config.train.prompts * config.train.samples,
      samples=max(config.train.samples, config.eval.samples),
      sampled_prompts=config.sample.batch
      or max(config.train.prompts, config.eval.batch),
      prompt_tokens=loaded.context[name],
      response_tokens=config.sample.max_tokens,
      micro_rows=config.train.micro_rows,
      logit_chunk=config.train.logit_chunk,
      moment_bytes=optimizer.moment_bytes(config.train.optimizer, params),
      reference=reference,
    )
  return planner.plan(
    models,
    shapes,
    len(devices),
    divides=config.train.row_multiple,
    tensor=config.mwra.tensor,
    device_bytes=meshes.device_bytes(devices),
    time_share=config.mwra.time_share,
  )


def _workers(config, method, loaded, plan) -> dict[str, worker_lib.Worker]:
  updates = config.train.rounds * config.train.mini_batches
  placed = meshes.build(plan, jax.devices())
  workers = {}
  for name in plan:
    workers[name] = worker_lib.Worker(
      name,
      model=plan[name].model,
      tokenizer=loaded.tokenizers[name],
      template=loaded.templates[name],
      mesh=placed[name],
      optimizer=optimizer.build(config.train.optimizer, updates),
      objectives=method.objectives,
      packer=batch.Packer(
        context=loaded.context[name],
        lengths={
          'own': config.sample.max_tokens,
          'peer': config.thl.max_tokens,
        },
        multiple=config.train.row_multiple,
        micro_rows=config.train.micro_rows,
        mini_batches=config.train.mini_batches,
        aggregation=config.train.aggregation,
        peer_average=method.peer_average,
        keep_all=method.reference or config.method.entropy_weight > 0,
        reference=method.reference,
      ),
      logit_chunk=config.train.logit_chunk,
      mask_truncated=config.train.mask_truncated,
      overlong_tokens=config.reward.overlong_tokens,
      entropy_weight=config.method.entropy_weight,
      reference=method.reference,
      sample_batch=config.sample.batch,
      # By name, so that a policy is the same whoever learns beside it.
      key=jax.random.fold_in(
        jax.random.key(config.seed), zlib.crc32(name.encode())
      ),
    )
  return workers
