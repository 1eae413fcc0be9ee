"""Compiles what a policy runs, from shapes alone, and reads what XLA found.

  devices = proof.devices('v5e:2x4')
  for program in proof.programs(training, config, method):
    result = proof.compile_program(program)

No device of the mesh needs to be there, and no weights.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import importlib.util
import math
import os
import re
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import msgspec
import numpy as np
from rich import console as console_lib

from mrl_jax import algorithms
from mrl_jax import checks
from mrl_jax.models import decoder
from mrl_jax.models import sharding
from mrl_jax.mwra import meshes
from mrl_jax.mwra import planner
from mrl_jax.sampling import sampler
from mrl_jax.training import collectives as collectives_lib
from mrl_jax.training import display
from mrl_jax.training import planning
from mrl_jax.update import update

# libtpu looks for its host, and allows one process a host, unless told not to.
_ENVIRONMENT = {
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_ACCELERATOR_TYPE': 'v5litepod-8',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
}
_FLAT = ('2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16')
_SOLID = ('2x2x1', '2x2x2', '2x2x4', '2x4x4', '4x4x4', '4x4x8')
TOPOLOGIES = {
  'v4': _SOLID,
  'v5e': _FLAT,
  'v5p': _SOLID,
  'v6e': _FLAT,
  'tpu7x': _SOLID,
}


def devices(topology: str) -> Sequence[jax.Device]:
  """The devices of a TPU slice that need not be there, such as 'v5e:2x4'.

  Raises InputError if there is no such slice, or libtpu is not installed. This
  process then cannot use a TPU of its own.
  """
  os.environ.update(_ENVIRONMENT)
  jax.config.update('jax_platforms', 'cpu')
  checks.require(
    importlib.util.find_spec('libtpu') is not None,
    "a TPU slice is planned with TPU's compiler: pip install -e '.[tpu]'",
  )
  try:
    return _described(topology)
  except (jax.errors.JaxRuntimeError, ValueError) as error:
    known = '; '.join(f'{k}: {", ".join(n)}' for k, n in TOPOLOGIES.items())
    raise checks.InputError(
      f'no TPU slice {topology!r}; give GENERATION:SHAPE, for example v5e:2x4. '
      f'Known are {known}. {str(error).splitlines()[0]}'
    ) from error


def _described(topology):
  from jax.experimental import topologies

  return topologies.get_topology_desc(
    platform='tpu', topology_name=topology
  ).devices


class Program(NamedTuple):
  """A jitted function, and abstract arguments for it."""

  name: str
  function: jax.stages.Wrapped
  arguments: tuple
  mesh: jax.sharding.Mesh
  rows: int = 0  # Of a micro-batch, over the whole mesh.
  micro_batches: int = 1  # One after another, in one execution.
  # Trees that are in memory while it runs, but are no arguments of it.
  beside: tuple = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
  """What a program needs of each chip, in bytes, by XLA."""

  arguments: int
  outputs: int
  aliased: int  # Of the outputs, what is written in place of arguments.
  temporaries: int
  peak: int  # The most that is in use at once, of all of these.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proof:
  """What came of compiling a program."""

  program: str
  rows: int
  micro_batches: int
  lower_seconds: float
  compile_seconds: float
  beside: int  # Bytes of a chip in use while it runs, but not by it.
  memory: Memory | None = None  # None if XLA refuses the program.
  collectives: Mapping[str, collectives_lib.Total] = dataclasses.field(
    default_factory=dict
  )
  # What XLA says, what it would need of a chip, and what it allows; in bytes.
  # Both are None if its message does not say.
  refusal: str = ''
  needed: float | None = None
  limit: float | None = None
  chips: int = 1
  capacity: float = math.inf  # Bytes of a chip; infinite if not known.
  # Bytes of a chip in use while it runs, as the planner has it, if it does.
  model: float | None = None

  @property
  def fits(self) -> bool:
    """Whether XLA accepts it, and there is room beside all that is resident."""
    return self.memory is not None and not self.lacks

  @property
  def lacks(self) -> float:
    """Bytes by which an accepted program and what is resident exceed a chip."""
    if self.memory is None:
      return 0
    return max(0, self.memory.peak + self.beside - self.capacity)

  @property
  def why(self) -> str:
    """Why it does not fit."""
    return self.refusal or (
      f'XLA accepts it, but with {self.beside / 2**30:.2f} GiB that are in use '
      f'beside it, a chip lacks {self.lacks / 2**30:.2f} GiB'
    )


def programs(
  training: planning.Training,
  config: ml_collections.ConfigDict,
  method: algorithms.Method,
  peer_rows: int,
) -> list[Program]:
  """The programs of a policy's round, with its largest shapes.

  With the rows of a mini-batch, gradients of own and of peers' rows, the
  optimizer's step, and scores; then the sampler. `peer_rows` is the most rows of
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
  resident = (state.opt_state, state.reference)
  found = []
  for part, objective in training.objectives.items():
    rows = packer.abstract(counts[part], packer.lengths[part])
    gradient = update.build_gradient(model, mesh, objective, *settings)
    found.append(
      Program(
        f'{part} gradient',
        gradient,
        (grads, state.params, frozen, rows),
        mesh,
        rows.tokens_BS.shape[1],
        rows.tokens_BS.shape[0],
        (*resident, copied),
      )
    )
  found.append(
    Program(
      'update', update.build_apply(spec), (state, grads), mesh, beside=(copied,)
    )
  )
  scored = {
    'own': training.rescores
    or method.reference
    or config.method.correction.level != 'none',
    'peer': planning.scores_peers(config, method),
  }
  for part in (part for part, is_scored in scored.items() if is_scored):
    rows = packer.abstract(counts[part], packer.lengths[part])
    found.append(
      Program(
        f'{part} scoring',
        update.build_scorer(model, mesh, *settings),
        (state.params, frozen, rows),
        mesh,
        rows.tokens_BS.shape[1],
        rows.tokens_BS.shape[0],
        (*resident, copied),
      )
    )
  return [*found, _sampling(training, config, state, frozen, copied)]


def _sampling(training, config, state, frozen, copied) -> Program:
  """The sampler, beside the state; it may sample with the training weights."""
  model, mesh = training.spec.model, training.decode_mesh
  # Of training and evaluation, what samples more rows at a time.
  prompts, samples, greedy = max(
    (
      (config.sample.batch or prompts, samples, temperature == 0)
      for prompts, samples, temperature in (
        (config.train.prompts, config.train.samples, config.sample.temperature),
        (config.eval.batch, config.eval.samples, config.eval.temperature),
      )
    ),
    key=lambda drawn: drawn[0] * drawn[1],
  )
  prompts = math.ceil(prompts / mesh.shape['data']) * mesh.shape['data']

  def prompt(dtype):
    return jax.ShapeDtypeStruct((prompts, training.packer.context), dtype)

  sample = sampler.build(
    model,
    mesh,
    samples=samples,
    length=training.packer.lengths['own'],
    stop_ids=(0,),
    greedy=greedy,
  )
  arguments = (
    _moved(state.params, training),
    copied or _moved(frozen, training),
    prompt(jnp.int32),
    prompt(bool),
    jax.eval_shape(lambda: jax.random.key(0)),
    jax.ShapeDtypeStruct((), jnp.float32),
    jax.ShapeDtypeStruct((), jnp.int32),
  )
  same = model.dtype == model.param_dtype
  same &= training.spec.mesh.shape == training.decode_mesh.shape
  beside = (state.opt_state, state.reference) if same else (state,)
  return Program(
    'sampling',
    sample,
    arguments,
    mesh,
    prompts * samples,
    beside=(*beside, frozen),
  )


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


def compile_program(program: Program) -> Proof:
  """Compiles a program and reads what XLA says of it.

  That a program does not fit its chip is a result, not an error.
  """
  began = time.monotonic()
  with jax.set_mesh(program.mesh):
    lowered = program.function.lower(*program.arguments)
  lowered_at = time.monotonic()
  try:
    compiled, error = lowered.compile(), None
  except jax.errors.JaxRuntimeError as raised:
    if 'RESOURCE_EXHAUSTED' not in str(raised):
      raise
    compiled, error = None, raised
  proof = Proof(
    program=program.name,
    rows=program.rows,
    micro_batches=program.micro_batches,
    lower_seconds=lowered_at - began,
    compile_seconds=time.monotonic() - lowered_at,
    beside=chip_bytes(program.beside),
  )
  if error is not None:
    return dataclasses.replace(proof, **_refusal(str(error)))
  on_tpu = program.mesh.devices.flat[0].platform == 'tpu'
  return dataclasses.replace(
    proof,
    memory=_memory(compiled.memory_analysis(), on_tpu),
    collectives=collectives_lib.count(compiled.as_text()),
  )


def _memory(stats, on_tpu) -> Memory:
  """Only TPU's compiler reports a peak that has the temporaries."""
  whole = (
    stats.argument_size_in_bytes
    + stats.output_size_in_bytes
    - stats.alias_size_in_bytes
    + stats.temp_size_in_bytes
  )
  return Memory(
    arguments=stats.argument_size_in_bytes,
    outputs=stats.output_size_in_bytes,
    aliased=stats.alias_size_in_bytes,
    temporaries=stats.temp_size_in_bytes,
    peak=stats.peak_memory_in_bytes if on_tpu else whole,
  )


def _refusal(message: str) -> dict:
  """The fields of a `Proof` from XLA's message."""
  needed = re.search(r'(?:Used |temporaries \()([\d.]+)([KMGT])', message)
  limit = re.search(r'(?:of |available HBM \()([\d.]+)([KMGT])', message)
  return {
    'refusal': message.splitlines()[0],
    'needed': _amount(needed),
    'limit': _amount(limit),
  }


def _amount(match) -> float | None:
  if match is None:
    return None
  return float(match[1]) * 2 ** (10 * (' KMGT'.index(match[2])))


def prove(
  config: ml_collections.ConfigDict,
  method: algorithms.Method,
  sizes: Mapping[str, planning.Sizes],
  plan: planner.Plan,
  devices: Sequence[jax.Device],
  progress: Callable[[str], None] = lambda stage: None,
  topology: str | None = None,
) -> dict[str, list[Proof]]:
  """Compiles every program of every policy of a plan.

  Args:
    config: the config of the run.
    method: its method.
    sizes: of each policy, as the plan was made with.
    plan: the devices of every policy.
    devices: the devices of the plan.
    progress: is told which program is compiled next.
    topology: the name of the TPU slice, if the devices need not be there.
  """
  configs = {
    name: planning.settled(config, part) for name, part in plan.items()
  }
  trainings = {}
  for name, part in plan.items():
    own = _alone(topology, part, devices) if topology else devices
    trainings[name] = planning.training(
      configs[name],
      method,
      part.model,
      meshes.build({name: part}, own)[name],
      sizes[name].context,
    )
  proofs = {name: [] for name in plan}
  for name, part in plan.items():
    others = sum(
      chip_bytes(_resident(trainings[other]))
      for other in plan
      if other != name and {*plan[other].devices} & {*part.devices}
    )
    peer_rows = planning.peer_rows(config, name)
    for program in programs(trainings[name], configs[name], method, peer_rows):
      progress(f'{name}: {program.name}')
      proof = compile_program(program)
      proofs[name].append(
        dataclasses.replace(
          proof,
          beside=proof.beside + others,
          chips=len(part.devices),
          capacity=meshes.device_bytes(devices),
          model=_estimate(program.name, part),
        )
      )
  return proofs


def _alone(topology, part, devices):
  """The devices of a policy, by index, as a TPU slice of their own.

  Ahead of time, XLA compiles for all hosts of a slice, or within one.
  """
  places = {
    i: np.array((*devices[i].coords, devices[i].core_on_chip))
    for i in part.devices
  }
  first = np.min([*places.values()], 0)
  shape = np.max([*places.values()], 0) - first + 1
  generation, _, whole = topology.partition(':')
  sizes = shape[: whole.count('x') + 1]
  try:
    own = _described(f'{generation}:{"x".join(map(str, sizes))}')
  except (jax.errors.JaxRuntimeError, ValueError):  # A part of a host.
    return devices
  found = {(*device.coords, device.core_on_chip): device for device in own}
  return {i: found[tuple(place - first)] for i, place in places.items()}


def _resident(training):
  """What a policy keeps in memory while another one takes its turn."""
  spec = training.spec
  return spec.abstract(), _frozen(spec), _copied(training)


def _estimate(program, part) -> float | None:
  """Bytes of a chip in use while a program runs, by the planner's model."""
  phases = part.cost.phases
  return phases[program].bytes if program in phases else None


def figures(proofs: Mapping[str, Sequence[Proof]]) -> dict:
  """What XLA found, as JSON has it."""
  return {
    name: [
      {
        **msgspec.to_builtins(proof),
        'memory': proof.memory and dataclasses.asdict(proof.memory),
        'collectives': {
          kind: total._asdict() for kind, total in proof.collectives.items()
        },
        'fits': proof.fits,
      }
      for proof in each
    ]
    for name, each in proofs.items()
  }


def show(
  console: console_lib.Console, proofs: Mapping[str, Sequence[Proof]]
) -> None:
  """Shows what XLA found of every program, and why some do not fit.

  Memory is what the program needs by XLA, what is in use beside it, and both
  together as planned. A chip receives so much by collectives in one execution, of
  all micro-batches; `figures` has it by kind. Seconds are of compiling.
  """
  columns = ('program', 'rows', 'XLA', 'beside', 'plan', 'fits', 'received',
             'seconds')  # fmt: skip
  for policy, results in proofs.items():
    rows = []
    for result in results:
      received = sum(total.bytes for total in result.collectives.values())
      rows.append(
        (
          result.program,
          f'{result.micro_batches} x {result.rows}' if result.rows else '',
          _gib(result.memory.peak if result.memory else result.needed),
          _gib(result.beside),
          _gib(result.model),
          'yes' if result.fits else 'no',
          f'{received / 2**30:,.1f}',
          f'{result.compile_seconds:.0f}',
        )
      )
    title = f'{policy}, GiB of each of {results[0].chips} chips'
    console.print(display.table(title, columns, rows, columns[:1]))
  for policy, results in proofs.items():
    for result in results:
      if not result.fits:
        console.print(
          f'{policy}: {result.program}: {result.why}',
          markup=False,
          highlight=False,
        )


def _gib(size: float | None) -> str:
  return '' if size is None else f'{size / 2**30:.2f}'
