"""What a policy runs in a round, as jitted functions with abstract arguments."""

import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_collections

from mrl_jax import algorithms
from mrl_jax.models import decoder
from mrl_jax.models import sharding
from mrl_jax.sampling import drawing
from mrl_jax.sampling import move
from mrl_jax.sampling import sampler as sampler_lib
from mrl_jax.sampling import slots as slots_lib
from mrl_jax.training import planning
from mrl_jax.training import worker as worker_lib
from mrl_jax.update import update


class Program(NamedTuple):
  """A jitted function, and abstract arguments for it."""

  name: str
  function: jax.stages.Wrapped
  arguments: tuple
  mesh: jax.sharding.Mesh
  rows: int = 0  # Of a micro-batch, over the whole mesh.
  micro_batches: int = 1  # Of an update, at most: one an execution.
  # Trees that are in memory while it runs, but are no arguments of it.
  beside: tuple = ()


def build(
  training: planning.Training,
  config: ml_collections.ConfigDict,
  method: algorithms.Method,
  peer_rows: int,
) -> list[Program]:
  """The programs of a policy's round, with its largest shapes.

  With a micro-batch, gradients of own and of peers' rows, the optimizer's step,
  and scores; then the sampler. `peer_rows` is the most rows of
  peers in a round.
  """
  spec, packer, train = training.spec, training.packer, config.train
  model, mesh, state = spec.model, spec.mesh, spec.abstract()
  frozen, copied = _frozen(spec), _copied(training)
  settings = (train.logit_chunk, config.sample.temperature)
  grads = _grads(state)
  counts = {
    'own': train.prompts // train.mini_batches * train.samples,
    'peer': peer_rows // train.mini_batches,
  }
  beside = (state.opt_state, state.reference, copied)

  def over_rows(name, part, function, *arguments):
    sizes = packer.most(counts[part], part)
    return Program(
      f'{part} {name}',
      function,
      (*arguments, state.params, frozen, packer.abstract(sizes[0], part)),
      mesh,
      sizes[0],
      len(sizes),
      beside,
    )

  gradients = [
    over_rows(
      'gradient',
      part,
      update.build_gradient(model, mesh, objective, *settings),
      grads,
    )
    for part, objective in training.objectives.items()
  ]
  apply = Program(
    'update', update.build_apply(spec), (state, grads), mesh, beside=(copied,)
  )
  scoring = [
    over_rows('scoring', part, update.build_scorer(model, mesh, *settings))
    for part in _scored(config, method, training.rescores)
  ]
  sampling = _largest_sampling(training, config, state, frozen)
  return [*gradients, apply, *scoring, *sampling]


def ahead(
  worker: worker_lib.Worker, method: algorithms.Method, heldout: int
) -> list[Program]:
  """What a policy runs in most rounds, in this order, of every usual shape.

  Functions and arguments are as the worker calls them: a program that is compiled
  is not compiled again. `heldout` is the number of prompts of an evaluation.
  """
  spec, packer, config = worker.spec, worker.packer, worker.config
  state, frozen = spec.abstract(), _frozen(spec)
  place = sharding.rows(spec.mesh)
  grads, train, evaluation = _grads(state), config.train, config.eval
  weights = _moved(worker)
  density = drawing.Density(temperature=evaluation.temperature)
  most = {}  # Prompts, by sampler: evaluation and training may share one.
  for prompts, *how in (
    (heldout, evaluation.samples, density, evaluation.batch),
    (train.prompts, train.samples, planning.density(config.sample), 0),
  ):
    sampler = worker.sampler_for(prompts, *how)
    most[sampler] = max(prompts, most.get(sampler, 0))
  sampling = [
    _usual_sampling(s, prompts, weights) for s, prompts in most.items()
  ]

  def over_rows(name, part, function, *arguments):
    return [
      Program(
        f'{part} {name}',
        function,
        (*arguments, state.params, frozen, packer.abstract(size, part, place)),
        spec.mesh,
        size,
      )
      for size in packer.sizes
    ]

  rescores = worker.rescores and train.mini_batches > 1
  # One part for each length of packed rows: the scorer is the same for all parts.
  scored = {packer.slots(p): p for p in _scored(config, method, rescores)}
  scoring = [
    over_rows('scoring', part, worker.scorer) for part in scored.values()
  ]
  gradients = [
    over_rows('gradient', part, function, grads)
    for part, function in worker.updater.gradients.items()
  ]
  return [
    *itertools.chain(*sampling, *scoring, *gradients),
    Program('gradient of zero', worker.updater.zeros, (), spec.mesh),
    Program('update', worker.updater.apply, (state, grads), spec.mesh),
  ]


def _grads(state):
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding),
    state.params,
  )


def _scored(config, method, rescores) -> list[str]:
  """The kinds of rows that are scored apart from their gradient."""
  is_scored = {
    'own': rescores
    or method.reference
    or config.method.correction.level != 'none',
    'peer': planning.scores_peers(config, method),
  }
  return [part for part, scored in is_scored.items() if scored]


def _largest_sampling(training, config, state, frozen) -> list[Program]:
  """Reading all prompts of a batch, and decoding with the longest ring."""
  model, mesh = training.spec.model, training.decode_mesh
  train, evaluation = config.train, config.eval
  # Of training and evaluation, what samples more rows at a time.
  prompts, samples, density = max(
    (train.prompts, train.samples, planning.density(config.sample)),
    (
      evaluation.batch,
      evaluation.samples,
      drawing.Density(temperature=evaluation.temperature),
    ),
    key=lambda drawn: min(config.sample.batch or drawn[0], drawn[0]) * drawn[1],
  )
  prompts = min(config.sample.batch or prompts, prompts)
  sampler = sampler_lib.Sampler(
    model,
    mesh,
    slots_lib.Settings(
      samples=samples,
      length=training.packer.lengths['own'],
      stop_ids=(0,),
      density=density,
    ),
    prompts=prompts,
    context=training.packer.context,
  )
  shape, ring = sampler.shape(prompts), sampler.rings[-1]
  weights = _moved(training)
  same = model.dtype == model.param_dtype
  same &= training.spec.mesh.shape == mesh.shape
  beside = (state.opt_state, state.reference) if same else (state,)
  return [
    program._replace(beside=(*beside, frozen))
    for program in (
      _prefill(sampler, weights, shape.many, sampler.context, shape.rows, ring),
      _decoding(sampler, weights, shape.rows, ring),
    )
  ]


def _usual_sampling(sampler, prompts, weights) -> list[Program]:
  """What samples so many prompts: one program for each of few shapes."""
  shape, rings = sampler.shape(prompts), sampler.rings
  contexts = sampler_lib.contexts(sampler.context)
  empty = sampler.empty(rows=shape.rows, ring=rings[0])
  found = [
    Program('empty slots', empty, (_random_key(),), sampler.mesh),
    *(
      _prefill(sampler, weights, shape.many, context, shape.rows, rings[0])
      for context in contexts
    ),
    *(_decoding(sampler, weights, shape.rows, ring) for ring in rings),
  ]
  if prompts > shape.many:
    found += [
      _prefill(sampler, weights, shape.few, context, shape.rows, ring)
      for context, ring in itertools.product(contexts, rings)
    ]
  if shape.tail < shape.rows:
    found.append(_decoding(sampler, weights, shape.tail, rings[-1]))
  return found


def _prefill(sampler, weights, prompts, context, rows, ring) -> Program:
  shape = jax.ShapeDtypeStruct
  arguments = (
    *weights,
    _slots(sampler, rows, ring),
    shape((prompts, context), jnp.int32),
    shape((prompts, context), bool),
    shape((prompts,), jnp.int32),
    shape((rows,), jnp.int32),
    _random_key(),
  )
  return Program('prefill', sampler.admit, arguments, sampler.mesh, rows)


def _decoding(sampler, weights, rows, ring) -> Program:
  count = jax.ShapeDtypeStruct((), jnp.int32)
  arguments = (*weights, _slots(sampler, rows, ring), count, count)
  return Program('decoding', sampler.decode, arguments, sampler.mesh, rows)


def _slots(sampler, rows, ring):
  empty = functools.partial(
    slots_lib.empty, sampler.model, rows, sampler.context, ring
  )
  return _placed(
    jax.eval_shape(empty, _random_key()),
    slots_lib.shardings(sampler.model, sampler.mesh),
  )


def _random_key():
  return jax.eval_shape(lambda: jax.random.key(0))


def resident(training: planning.Training) -> tuple:
  """What a policy keeps in memory while another one takes its turn."""
  spec = training.spec
  return spec.abstract(), _frozen(spec), _copied(training)


def _frozen(spec):
  """The parameters under adapters, as they are placed in training."""
  _, _, frozen = decoder.abstract(spec.model)
  return _placed(frozen, sharding.params(frozen, spec.mesh))


def _moved(training):
  """Trained and frozen parameters as sampling has them."""
  spec = training.spec
  return tuple(
    move.abstract(spec.model, spec.mesh, training.decode_mesh, part)
    for part in (0, 1)
  )


def _copied(training):
  """The base under adapters, of which sampling has a copy all the time."""
  is_copied = training.spec.model.lora is not None
  return _moved(training)[1] if is_copied else ()


def _placed(tree, places):
  return jax.tree.map(
    lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
    tree,
    places,
  )


def chip_bytes(tree) -> int:
  """Bytes of a tree of placed arrays on one of their chips."""
  return sum(
    x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))
    for x in jax.tree.leaves(tree)
  )
