"""What a policy runs in a round, as jitted functions with abstract arguments."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_collections

from mrl_jax import algorithms
from mrl_jax.models import decoder
from mrl_jax.models import sharding
from mrl_jax.sampling import drawing
from mrl_jax.sampling import sampler
from mrl_jax.sampling import slots as slots_lib
from mrl_jax.training import planning
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
  grads = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding),
    state.params,
  )
  counts = {
    'own': train.prompts // train.mini_batches * train.samples,
    'peer': peer_rows // train.mini_batches,
  }
  beside = (state.opt_state, state.reference, copied)

  def over_rows(name, part, function, *arguments):
    rows, micro_batches = packer.abstract(counts[part], part)
    return Program(
      f'{part} {name}',
      function,
      (*arguments, state.params, frozen, rows),
      mesh,
      len(rows.tokens_BS),
      micro_batches,
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
    for part, is_scored in {
      'own': training.rescores
      or method.reference
      or config.method.correction.level != 'none',
      'peer': planning.scores_peers(config, method),
    }.items()
    if is_scored
  ]
  sampling = _sampling(training, config, state, frozen, copied)
  return [*gradients, apply, *scoring, *sampling]


def _sampling(training, config, state, frozen, copied) -> list[Program]:
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
  prompts = math.ceil(prompts / mesh.shape['data']) * mesh.shape['data']
  length, context = training.packer.lengths['own'], training.packer.context
  settings = slots_lib.Settings(
    samples=samples, length=length, stop_ids=(0,), density=density
  )
  rows, width = prompts * samples, min(sampler.WIDTH, length)
  shape, key = jax.ShapeDtypeStruct, jax.eval_shape(lambda: jax.random.key(0))
  slots = _placed(
    jax.eval_shape(
      functools.partial(slots_lib.empty, model, rows, context, length), key
    ),
    slots_lib.shardings(model, mesh),
  )
  weights = _moved(state.params, training), copied or _moved(frozen, training)
  same = model.dtype == model.param_dtype
  same &= training.spec.mesh.shape == training.decode_mesh.shape
  beside = (state.opt_state, state.reference) if same else (state,)
  return [
    Program(name, function, arguments, mesh, rows, beside=(*beside, frozen))
    for name, function, arguments in (
      (
        'prefill',
        slots_lib.build_admit(model, mesh, settings),
        (
          *weights,
          slots,
          shape((prompts, context), jnp.int32),
          shape((prompts, context), bool),
          shape((prompts,), jnp.int32),
          shape((rows,), jnp.int32),
          key,
        ),
      ),
      (
        'decoding',
        slots_lib.build_decode(model, mesh, settings, width),
        (
          *weights,
          slots,
          shape((), jnp.int32),
          shape((), jnp.int32),
        ),
      ),
    )
  ]


def resident(training: planning.Training) -> tuple:
  """What a policy keeps in memory while another one takes its turn."""
  spec = training.spec
  return spec.abstract(), _frozen(spec), _copied(training)


def _frozen(spec):
  """The parameters under adapters, as they are placed in training."""
  _, _, frozen = decoder.abstract(spec.model)
  return _placed(frozen, sharding.params(frozen, spec.mesh))


def _moved(params, training):
  """Trained or frozen parameters as sampling has them."""
  cast = jax.eval_shape(
    functools.partial(decoder.cast, dtype=training.spec.model.dtype), params
  )
  return _placed(cast, sharding.params(cast, training.decode_mesh))


def _copied(training):
  """The base under adapters, of which sampling has a copy all the time."""
  is_copied = training.spec.model.lora is not None
  return _moved(_frozen(training.spec), training) if is_copied else ()


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
