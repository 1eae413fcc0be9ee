"""Carves the devices into one slice for each policy."""

from collections.abc import Mapping
import dataclasses
import math

from mrl_jax import checks
from mrl_jax.architecture import ModelConfig
from mrl_jax.mwra import cost as cost_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
  """The devices of one policy."""

  devices: tuple[int, ...]  # Contiguous indices in the list of all devices.
  shape: tuple[int, int, int]  # Sizes of the mesh axes (data, fsdp, tensor).
  decode_shape: tuple[int, int, int]  # The same while sampling.
  model: ModelConfig
  cost: cost_lib.Cost
  load: float  # Operations per device, relative to those of the slowest policy.


Plan = Mapping[str, Slice]


def plan(
  models: Mapping[str, ModelConfig],
  shapes: Mapping[str, cost_lib.RoundShape],
  devices: int,
  *,
  divides: int,
  tensor: int = 1,
  device_bytes: float = math.inf,
  time_share: bool = False,
) -> Plan:
  """Plans slices with the least makespan, the time of the slowest policy.

  Makespans are tried in increasing order; each gives every policy the fewest
  devices that meet it. The first assignment that fits has the least makespan
  and, for it, the fewest devices, under the cost model.

  Args:
    models: the architecture of every policy.
    shapes: the sizes of a round of every policy.
    devices: the number of devices.
    divides: the number of rows of a batch, or another count that the fsdp axis
      of every slice must divide.
    tensor: size of the tensor axis of every slice.
    device_bytes: memory of one device; infinite if it is not known.
    time_share: whether policies take turns on all devices.

  Raises InputError if there is no plan; the message names the policy, what is
  short, and what would help.
  """
  costs = {
    name: cost_lib.estimate(m, shapes[name]) for name, m in models.items()
  }
  sizes = {
    name: _sizes(
      name, model, costs[name], devices, divides, tensor, device_bytes
    )
    for name, model in models.items()
  }
  if time_share:
    chosen = {name: max(fits) for name, fits in sizes.items()}
    _check_shared(costs, chosen, tensor, device_bytes)
  else:
    chosen = _fastest(costs, sizes, devices)
  slowest = max(costs[name].flops / n for name, n in chosen.items())
  slices, start = {}, 0
  # The largest slice first, so that slices of powers of two are aligned.
  for name in sorted(chosen, key=lambda name: -chosen[name]):
    n = chosen[name]
    slices[name] = Slice(
      devices=tuple(range(start, start + n)),
      shape=(1, n // tensor, tensor),
      decode_shape=(n // tensor, 1, tensor),
      model=models[name],
      cost=costs[name],
      load=costs[name].flops / n / slowest,
    )
    start += 0 if time_share else n
  return {name: slices[name] for name in models}


def _sizes(name, model, cost, devices, divides, tensor, device_bytes):
  """The numbers of devices that a policy can run on."""
  split = ('num_heads', 'num_kv_heads', 'd_ff', 'vocab_size')
  sizes = {field: getattr(model, field) for field in split}
  wrong = [f'{field} = {n}' for field, n in sizes.items() if n % tensor]
  checks.require(
    not wrong,
    f'policy {name}: mwra.tensor = {tensor} does not divide {", ".join(wrong)}',
  )
  shapes = [
    fsdp * tensor
    for fsdp in range(1, devices // tensor + 1)
    if model.d_model % fsdp == divides % fsdp == 0
  ]
  checks.require(
    bool(shapes),
    f'policy {name} needs at least mwra.tensor = {tensor} devices; '
    f'there are {devices}',
  )
  fits = [n for n in shapes if cost.peak_bytes(n // tensor) <= n * device_bytes]
  if not fits:
    n = max(shapes)
    needs = cost.peak_bytes(n // tensor)
    short = needs / n - device_bytes
    raise checks.InputError(
      f'policy {name} needs {_gib(needs)} and fits on no slice of '
      f'{devices} devices of {_gib(device_bytes)}: each lacks {_gib(short)}. A '
      f'smaller sample.batch reduces its {_gib(cost.cache_bytes)} of caches, a '
      'smaller train.micro_rows or train.logit_chunk its '
      f'{_gib(cost.update_bytes)} of activations'
    )
  return fits


def _check_shared(costs, chosen, tensor, device_bytes):
  """All states stay resident; one policy at a time samples or updates."""
  copies = {name: n // tensor for name, n in chosen.items()}
  states = sum(costs[name].resident_bytes(n) for name, n in copies.items())
  work = max(costs[name].work_bytes(n) for name, n in copies.items())
  devices = min(chosen.values())
  checks.require(
    states + work <= devices * device_bytes,
    f'{len(costs)} policies that take turns need {_gib(states)} for their '
    f'states and {_gib(work)} to work; {devices} devices have '
    f'{_gib(devices * device_bytes)}',
  )


def _fastest(costs, sizes, devices):
  times = sorted(
    {costs[name].flops / n for name, fits in sizes.items() for n in fits}
  )
  for makespan in times:
    chosen = {
      name: min(
        (n for n in fits if costs[name].flops / n <= makespan), default=None
      )
      for name, fits in sizes.items()
    }
    if None not in chosen.values() and sum(chosen.values()) <= devices:
      return chosen
  least = {name: min(fits) for name, fits in sizes.items()}
  needs = ', '.join(f'{name} at least {n}' for name, n in least.items())
  raise checks.InputError(
    f'{len(costs)} policies do not fit on {devices} devices: {needs}. Use '
    f'{sum(least.values())} devices, or let policies take turns on them with '
    '--config.mwra.time_share=True'
  )


def _gib(size: float) -> str:
  return f'{size / 2**30:.2f} GiB'
