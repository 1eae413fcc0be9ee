"""Compiles what a policy runs, from shapes alone, and reads what XLA found.

  devices = proof.devices('v5e:2x4')
  for policy, result in proof.prove(config, method, sizes, plan, devices):
    print(policy, result.program, result.fits)

No device needs to be there, and no weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import importlib.util
import math
import os
import re
import time

import jax
import ml_collections
import msgspec
import numpy as np
from rich import console as console_lib

from mrl_jax import algorithms
from mrl_jax import checks
from mrl_jax.mwra import chips
from mrl_jax.mwra import meshes
from mrl_jax.mwra import planner
from mrl_jax.training import collectives as collectives_lib
from mrl_jax.training import display
from mrl_jax.training import planning
from mrl_jax.training import programs

# libtpu looks for its host, and allows one process a host, unless told not to.
_ENVIRONMENT = {
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_ACCELERATOR_TYPE': 'v5litepod-8',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
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
    known = '; '.join(f'{k}: {", ".join(n)}' for k, n in chips.SLICES.items())
    raise checks.InputError(
      f'no TPU slice {topology!r}; give GENERATION:SHAPE, for example v5e:2x4. '
      f'Known are {known}. {str(error).splitlines()[0]}'
    ) from error


def _described(topology):
  from jax.experimental import topologies

  return topologies.get_topology_desc(
    platform='tpu', topology_name=topology
  ).devices


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


def alone(
  config: ml_collections.ConfigDict, policy: str, topology: str
) -> planner.Slice:
  """Plans one policy on a whole TPU slice, while others train its peers.

  Raises InputError, which names the policy and the slice, if it does not fit or
  would leave a host without work.
  """
  config = config.copy_and_resolve_references()
  for name, peer in config.policies.items():
    peer.address = '' if name == policy else 'elsewhere:1'
  found, method = devices(topology), algorithms.build(config.method)
  sizes = planning.without_data(config)
  try:
    plan = planning.plan(config, method, sizes, found, planning.load_config)
  except checks.InputError as error:
    raise checks.InputError(f'{policy} on {topology}: {error}') from error
  used = {found[i].process_index for i in plan[policy].devices}
  idle = {device.process_index for device in found} - used
  checks.require(
    not idle,
    f'{policy} on {topology}: it would train on {len(plan[policy].devices)} of '
    f'{len(found)} chips, and leave hosts idle; give it a smaller slice',
  )
  return plan[policy]


def compile_program(program: programs.Program) -> Proof:
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
    beside=programs.chip_bytes(program.beside),
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
) -> Iterator[tuple[str, Proof]]:
  """Compiles the programs of all policies of a plan, one after another.

  Yields the name of a policy, and what came of compiling one of its programs.

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
  for name, part in plan.items():
    others = sum(
      programs.chip_bytes(programs.resident(trainings[other]))
      for other in plan
      if other != name and {*plan[other].devices} & {*part.devices}
    )
    peer_rows = planning.peer_rows(config, name)
    for program in programs.build(
      trainings[name], configs[name], method, peer_rows
    ):
      progress(f'{name}: {program.name}')
      proof = compile_program(program)
      yield (
        name,
        dataclasses.replace(
          proof,
          beside=proof.beside + others,
          chips=len(part.devices),
          capacity=meshes.device_bytes(devices),
          model=_estimate(program.name, part),
        ),
      )


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


def line(policy: str, proof: Proof) -> str:
  """What came of one program, for a reader who waits for the others."""
  if proof.memory is None:
    return f'{policy}: {proof.program}: refused by XLA'
  used = (proof.memory.peak + proof.beside) / 2**30
  planned = '' if proof.model is None else f', planned {_gib(proof.model)}'
  return (
    f'{policy}: {proof.program}: {used:.2f} GiB{planned}; compiled in '
    f'{proof.compile_seconds:.0f} s'
  )


def show(
  console: console_lib.Console, proofs: Mapping[str, Sequence[Proof]]
) -> None:
  """Shows what XLA found of every program, and why some do not fit.

  Memory is what the program needs by XLA, what is in use beside it, and both
  together as planned. A chip receives so much by collectives in one execution, of
  one micro-batch; `figures` has it by kind. Seconds are of compiling.
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
