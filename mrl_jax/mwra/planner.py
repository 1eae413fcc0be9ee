"""Carves the devices into one slice for each policy."""

from collections.abc import Mapping
import dataclasses

from mrl_jax import checks
from mrl_jax.architecture import ModelConfig
from mrl_jax.mwra import cost as cost_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
  """One policy's devices: `devices` in order, as a mesh of `shape`.

  Attributes:
    devices: places in the list of all devices, contiguous.
    shape: sizes of the axes (data, fsdp, tensor).
    model: of the policy.
    cost: of its round.
    load: its operations a device, relative to the slowest policy's.
  """

  devices: tuple[int, ...]
  shape: tuple[int, int, int]
  model: ModelConfig
  cost: cost_lib.Cost
  load: float


Plan = Mapping[str, Slice]


def plan(
  models: Mapping[str, ModelConfig],
  shapes: Mapping[str, cost_lib.RoundShape],
  devices: int,
  *,
  divides: int,
  tensor: int = 1,
  device_bytes: int | None = None,
  time_share: bool = False,
) -> Plan:
  """The slices for which the slowest policy is done soonest.

  Tries makespans in increasing order, gives every policy the fewest devices
  that meet each, and returns the first that fits: the least makespan, and for
  it the fewest devices, under the cost model.

  Args:
    models: of every policy.
    shapes: of every policy's round.
    devices: how many there are.
    divides: a count that slices must divide, such as the rows of a batch.
    tensor: the size of every slice's tensor axis.
    device_bytes: memory of one device; None where it is not known.
    time_share: give all devices to every policy, which then take turns.

  Raises:
    InputError: no plan; names the policy, what is short, and what would help.
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
  # The largest first, so that slices of powers of two are aligned.
  for name in sorted(chosen, key=lambda name: -chosen[name]):
    n = chosen[name]
    slices[name] = Slice(
      devices=tuple(range(start, start + n)),
      shape=(1, n // tensor, tensor),
      model=models[name],
      cost=costs[name],
      load=costs[name].flops / n / slowest,
    )
    start += 0 if time_share else n
  return {name: slices[name] for name in models}


def _sizes(name, model, cost, devices, divides, tensor, device_bytes):
  """The numbers of devices that `name` can run on."""
  by_tensor = {
    'num_heads': model.num_heads,
    'num_kv_heads': model.num_kv_heads,
    'd_ff': model.d_ff,
    'vocab_size': model.vocab_size,
  }
  wrong = [f'{k} = {v}' for k, v in by_tensor.items() if v % tensor]
  checks.require(
    not wrong,
    f'policy {name}: mwra.tensor = {tensor} does not divide {", ".join(wrong)}',
  )
  shapes = [
    n
    for n in range(tensor, devices + 1, tensor)
    if model.d_model % (n // tensor) == 0 and divides % (n // tensor) == 0
  ]
  checks.require(
    bool(shapes),
    f'policy {name} needs at least mwra.tensor = {tensor} devices; '
    f'there are {devices}',
  )
  fits = [
    n
    for n in shapes
    if device_bytes is None or cost.peak_bytes(n // tensor) <= n * device_bytes
  ]
  if not fits:
    n = max(shapes)
    needs = cost.peak_bytes(n // tensor)
    short = needs / n - device_bytes
    raise checks.InputError(
      f'policy {name} needs {_gib(needs)} and fits on no slice of '
      f'{devices} devices of {_gib(device_bytes)}: {_gib(short)} a device are '
      f'missing. A smaller sample.batch lowers its {_gib(cost.cache_bytes)} to '
      'sample with, fewer train.micro_rows or a smaller train.logit_chunk '
      f'its {_gib(cost.update_bytes)} of activations'
    )
  return fits


def _check_shared(costs, chosen, tensor, device_bytes):
  """All states stay on the devices; one policy at a time needs the rest."""
  copies = {name: n // tensor for name, n in chosen.items()}
  states = sum(costs[name].resident_bytes(n) for name, n in copies.items())
  work = max(costs[name].work_bytes(n) for name, n in copies.items())
  devices = min(chosen.values())
  checks.require(
    device_bytes is None or states + work <= devices * device_bytes,
    f'{len(costs)} policies that take turns need {_gib(states)} for their '
    f'states and {_gib(work)} to work; {devices} devices have '
    f'{_gib(devices * (device_bytes or 0))}',
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
