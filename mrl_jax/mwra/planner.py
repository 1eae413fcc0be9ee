"""Gives every policy its devices, and chooses how it runs on them."""

from collections.abc import Mapping
import dataclasses

from mrl_jax import checks
from mrl_jax.architecture import AUTO
from mrl_jax.architecture import Lora
from mrl_jax.architecture import ModelConfig
from mrl_jax.architecture import PROJECTIONS
from mrl_jax.mwra import carve
from mrl_jax.mwra import chips
from mrl_jax.mwra import cost as cost_lib
from mrl_jax.mwra import layouts
from mrl_jax.mwra import sizes as sizes_lib
from mrl_jax.mwra import topology as topology_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
  """The devices of one policy, and how it runs on them."""

  devices: tuple[int, ...]  # Indices in the list of all devices, in mesh order.
  box: topology_lib.Box
  layout: sizes_lib.Layout
  model: ModelConfig  # With its `remat`.
  cost: cost_lib.Cost
  load: float  # Estimated time of a round over that of the slowest policy.
  reason: str  # Why it has these devices.


Plan = Mapping[str, Slice]


def plan(
  models: Mapping[str, ModelConfig],
  shapes: Mapping[str, sizes_lib.RoundShape],
  topology: topology_lib.Topology,
  chip: chips.Chip,
  *,
  choices: layouts.Choices = layouts.OPEN,
  time_share: bool = False,
) -> Plan:
  """Plans slices with the least makespan, the time of the slowest policy.

  Each policy has its fastest layout for every number of devices on which it
  fits in memory; `carve` then gives each one a slice.

  Args:
    models: the architecture of every policy.
    shapes: the sizes of a round of every policy.
    topology: all devices.
    chip: one of them.
    choices: what the user has fixed.
    time_share: whether policies take turns on all devices.

  Raises InputError if there is no plan; the message names the policy, what is
  short, and a change with which the policy fits.
  """
  for name, model in models.items():
    _check_tensor(name, model, choices)
  if time_share:
    return _shared(models, shapes, topology, chip, choices)
  found = {
    name: {
      n: layouts.best(model, shapes[name], chip, n, choices)
      for n in topology.sizes()
    }
    for name, model in models.items()
  }
  fits = {
    name: {n: fit for n, fit in each.items() if isinstance(fit, layouts.Fit)}
    for name, each in found.items()
  }
  for name, each in fits.items():
    if not each:
      raise checks.InputError(
        _no_fit(name, models[name], shapes[name], topology, chip, choices)
      )
  boxes = carve.carve(
    topology,
    {
      name: {n: fit.cost.seconds for n, fit in each.items()}
      for name, each in fits.items()
    },
  )
  return _slices(
    topology,
    boxes,
    {name: fits[name][box.size] for name, box in boxes.items()},
    {name: _reason(found[name], box.size, chip) for name, box in boxes.items()},
  )


def _shared(models, shapes, topology, chip, choices):
  """All states stay resident; one policy at a time samples or updates."""
  sizes, reserved, fits = topology.sizes(), dict.fromkeys(models, 0.0), {}
  for _ in range(2):  # The second time, with room for the others' states.
    for name, model in models.items():
      each = (
        layouts.best(model, shapes[name], chip, n, choices, reserved[name])
        for n in reversed(sizes)
      )
      fit = next((f for f in each if isinstance(f, layouts.Fit)), None)
      if fit is None and name not in fits:
        raise checks.InputError(
          _no_fit(name, model, shapes[name], topology, chip, choices)
        )
      fits[name] = fit or fits[name]
    states = {name: fit.cost.resident_bytes for name, fit in fits.items()}
    reserved = {name: sum(states.values()) - states[name] for name in models}
  work = max(fit.cost.work_bytes for fit in fits.values())
  room = layouts.SHARE * chip.hbm_bytes
  checks.require(
    sum(states.values()) + work <= room,
    f'{len(fits)} policies that take turns need '
    f'{_gib(sum(states.values()))} of every device for their states and '
    f'{_gib(work)} to work; plans use {_gib(room)}',
  )
  boxes = {
    name: topology.boxes(fit.layout.devices)[0] for name, fit in fits.items()
  }
  reasons = dict.fromkeys(fits, 'policies take turns')
  return _slices(topology, boxes, fits, reasons)


def _slices(topology, boxes, fits, reasons):
  slowest = max(fit.cost.seconds for fit in fits.values())
  return {
    name: Slice(
      devices=topology.devices(boxes[name]),
      box=boxes[name],
      layout=fit.layout,
      model=fit.model,
      cost=fit.cost,
      load=fit.cost.seconds / slowest,
      reason=reasons[name],
    )
    for name, fit in fits.items()
  }


def _reason(found, devices, chip):
  """Why a policy has so many devices, and not fewer."""
  smaller = max((n for n in found if n < devices and found[n]), default=None)
  if smaller is None:
    return 'no smaller slice is possible'
  other = found[smaller]
  if isinstance(other, layouts.Fit):
    times = f'{_seconds(other)} s, not {_seconds(found[devices])}'
    return f'on {smaller} a round takes {times}'
  short = other.bytes - layouts.SHARE * chip.hbm_bytes
  return f'on {smaller} {other.program} lacks {_gib(short)} a device'


def _seconds(fit):
  seconds = fit.cost.seconds
  return f'{seconds:,.0f}' if seconds >= 100 else f'{seconds:.2g}'


def _check_tensor(name, model, choices):
  for key in ('tensor', 'decode_tensor'):
    size = getattr(choices, key)
    wrong = [
      f'{field} = {getattr(model, field)}'
      for field in layouts.SPLIT
      if size and getattr(model, field) % size
    ]
    checks.require(
      not wrong,
      f'policy {name}: mwra.{key} = {size} does not divide {", ".join(wrong)}',
    )


def _no_fit(name, model, shape, topology, chip, choices):
  """The error for a policy that fits on no slice: with what it would."""
  found = [
    (n, layouts.best(model, shape, chip, n, choices)) for n in topology.sizes()
  ]
  misfits = [(n, misfit) for n, misfit in found if misfit]
  if not misfits:
    sizes = ', '.join(map(str, topology.sizes()))
    return (
      f'policy {name} has no layout on {sizes} devices. Sizes of the data and '
      'fsdp axes together must divide train.prompts x train.samples = '
      f'{shape.prompts * shape.samples}, and train.micro_rows = '
      f'{choices.micro_rows} unless it is 0; that of the fsdp axis '
      f'd_model = {model.d_model}, and of the tensor axis '
      + ', '.join(
        f'{field} = {getattr(model, field)}' for field in layouts.SPLIT
      )
    )
  n, misfit = misfits[-1]  # On the most devices.
  room = layouts.SHARE * chip.hbm_bytes
  change = _change(name, model, shape, topology, chip, choices)
  return (
    f'policy {name} does not fit: on {n} devices {misfit.program} needs '
    f'{_gib(misfit.bytes)} of each, {_gib(misfit.bytes - room)} more than plans use of '
    f'{_gib(chip.hbm_bytes)}. {change}'
  )


def _change(name, model, shape, topology, chip, choices):
  """Says with which change the policy fits: the first of some that are tried."""
  fixed = [key for key, size in dataclasses.asdict(choices).items() if size]
  auto, free = dataclasses.replace(model, remat=AUTO), layouts.OPEN
  tries = [
    (model, shape, dataclasses.replace(choices, **{key: 0})) for key in fixed
  ]
  tries += [(auto, shape, choices), (auto, shape, free)]
  chunk = shape.logit_chunk // 2
  while chunk >= _LEAST_CHUNK:
    smaller = dataclasses.replace(shape, logit_chunk=chunk)
    tries += [(model, smaller, choices), (auto, smaller, free)]
    chunk //= 2
  here, most = topology.sizes(), topology.size
  more = [most * 2**k for k in range(1, 7)]
  same = [(model, shape, choices), (auto, shape, free)]
  ways = [(here, tries), *(([n], same) for n in more)]
  if not model.lora:
    lora = Lora(rank=16, alpha=32, target_modules=PROJECTIONS[:4])
    ways.append((here, [(dataclasses.replace(auto, lora=lora), shape, free)]))
  for sizes, each in ways:
    for other, changed, open_ in each:
      for n in sizes:
        fit = layouts.best(other, changed, chip, n, open_)
        if isinstance(fit, layouts.Fit):
          flags = _flags(name, model, shape, choices, fit, changed)
          where = f' on {n} devices' if n > most else ''
          return f'It fits{where}' + ' with ' * bool(flags) + ' '.join(flags)
  return 'No change of layout, batches or adapters was found with which it fits'


_LEAST_CHUNK = 256  # Tokens.


def _flags(name, model, shape, choices, fit, changed):
  """The flags that differ between what was asked for and what fits."""
  layout = fit.layout
  chosen = {
    'mwra.data': (choices.data, layout.train[0]),
    'mwra.tensor': (choices.tensor, layout.train[2]),
    'mwra.decode_tensor': (choices.decode_tensor, layout.decode[2]),
    'train.micro_rows': (choices.micro_rows, layout.micro_rows),
    'sample.batch': (choices.sample_batch, layout.sample_batch),
    'train.logit_chunk': (shape.logit_chunk, changed.logit_chunk),
    f'policies.{name}.model.remat': (
      model.remat if model.remat != AUTO else '',
      fit.model.remat,
    ),
  }
  flags = [
    f'--config.{key}={value}'
    for key, (asked, value) in chosen.items()
    if asked and asked != value
  ]
  if fit.model.lora != model.lora:
    flags.append(f'--config.policies.{name}.lora.rank={fit.model.lora.rank}')
  return flags


def explain(plan: Plan, topology: topology_lib.Topology) -> dict[str, str]:
  """What bounds each policy's round and memory, and why its devices."""
  reasons = {}
  for name, part in plan.items():
    phases = part.cost.phases
    slowest = max(phases, key=lambda phase: phases[phase].seconds)
    largest = max(phases, key=lambda phase: phases[phase].bytes)
    share = phases[slowest].seconds / part.cost.seconds
    reasons[name] = (
      f'{topology.describe(part.box)}; {part.reason}. {slowest} is {share:.0%} of '
      f'a round, bounded by {phases[slowest].bound}; {largest} needs the most '
      'memory'
    )
  return reasons


def _gib(size: float) -> str:
  return f'{size / 2**30:.2f} GiB'
