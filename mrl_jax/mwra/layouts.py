"""Chooses how a policy runs on a number of devices: the fastest way that fits."""

import dataclasses
import math
from typing import NamedTuple

from mrl_jax.architecture import AUTO
from mrl_jax.architecture import ModelConfig
from mrl_jax.architecture import REMAT
from mrl_jax.mwra import chips
from mrl_jax.mwra import cost as cost_lib
from mrl_jax.mwra import sizes as sizes_lib

# The share of a device's memory that a plan uses: `cost` may be 5% too low.
SHARE = 0.94
# Weights are replicated over a data axis, and sampling gets a larger tensor axis,
# if that saves more than this share of the time.
_WORTH = 0.02
_PARTS = 4  # The smallest micro-batch is this part of the largest.
# Dimensions of a model that are sharded over the tensor axis.
SPLIT = ('num_heads', 'num_kv_heads', 'd_ff', 'vocab_size')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices:
  """What the user has fixed; 0 leaves the choice open."""

  data: int = 0  # Size of the data axis in training.
  tensor: int = 0  # Size of the tensor axis in training.
  decode_tensor: int = 0  # Size of the tensor axis while sampling.
  micro_rows: int = 0
  sample_batch: int = 0


OPEN = Choices()


class Fit(NamedTuple):
  """A layout that fits in memory."""

  model: ModelConfig  # With its `remat`.
  layout: sizes_lib.Layout
  cost: cost_lib.Cost


class Misfit(NamedTuple):
  """Why no layout fits; of all layouts, the one that needs the least memory."""

  bytes: float  # What a program of it needs of a device.
  program: str
  layout: sizes_lib.Layout


def best(
  model: ModelConfig,
  shape: sizes_lib.RoundShape,
  chip: chips.Chip,
  devices: int,
  choices: Choices = OPEN,
  reserved: float = 0.0,
) -> Fit | Misfit | None:
  """The layout with the least time of a round among those that fit in memory.

  Training has the smallest tensor axis that fits. Micro-batches and the batches
  that are sampled are the largest that fit, as larger ones are never slower by
  the cost model.

  Args:
    model: the policy; a `remat` of 'auto' is open.
    shape: the sizes of its round.
    chip: one of the devices.
    devices: the number of devices.
    choices: what is not open.
    reserved: bytes of a device that are not free.

  Returns None if no layout has so many devices, whatever the memory.
  """
  room = SHARE * chip.hbm_bytes - reserved
  fit, misfit = None, None
  for train in _train_meshes(model, shape, chip, devices, choices):
    if fit and train[2] > fit.layout.train[2]:
      break
    update = None
    for split in _divisors(model, devices, choices.decode_tensor):
      decode = devices // split, 1, split
      # Adapters keep their base where it samples while they are updated.
      if update is None or model.lora:
        update = _update(model, shape, chip, train, decode, choices, room)
      found = update
      if isinstance(update, sizes_lib.Layout):
        layout = update._replace(decode=decode)
        found = _sampling(model, shape, chip, layout, choices, room)
      if isinstance(found, Misfit):
        misfit = min(misfit or found, found)
      elif fit is None or (
        found.cost.seconds < (1 - _WORTH) * fit.cost.seconds
      ):
        fit = found
  return fit or misfit


def _update(model, shape, chip, train, decode, choices, room):
  """The fastest layout whose updates fit with the given meshes, or a misfit."""
  fastest, misfits = (), []
  for remat in REMAT if model.remat == AUTO else (model.remat,):
    for rows in _micro_rows(shape, train, chip, choices.micro_rows):
      layout = sizes_lib.Layout(train, decode, rows, decode[0], remat)
      phases = cost_lib.train_phases(model, shape, layout, chip)
      program = max(phases, key=lambda name: phases[name].bytes)
      if phases[program].bytes <= room:
        seconds = sum(phase.seconds for phase in phases.values())
        if not fastest or seconds < fastest[0]:
          fastest = seconds, layout
        break
      misfits.append(Misfit(phases[program].bytes, program, layout))
  return fastest[1] if fastest else min(misfits)


def _sampling(model, shape, chip, layout, choices, room):
  """The layout with the largest batches of prompts that fit, or a misfit."""
  misfits = []
  for batch in _batches(shape, choices.sample_batch):
    layout = layout._replace(sample_batch=batch)
    cost = cost_lib.estimate(model, shape, layout, chip)
    if cost.peak_bytes <= room:
      return Fit(dataclasses.replace(model, remat=layout.remat), layout, cost)
    phases = cost.phases
    largest = max(('prefill', 'decoding'), key=lambda n: phases[n].bytes)
    misfits.append(Misfit(cost.peak_bytes, largest, layout))
  return min(misfits)


def _train_meshes(model, shape, chip, devices, choices):
  """Sizes of (data, fsdp, tensor), by increasing tensor and data axes."""
  for tensor in _divisors(model, devices, choices.tensor):
    rows = devices // tensor
    sizes = [choices.data] if choices.data else range(1, rows + 1)
    for data in sizes:
      if (
        rows % data == 0
        and model.d_model % (rows // data) == 0
        and shape.prompts * shape.samples % rows == 0
        and _micro_rows(shape, (data, rows // data), chip, choices.micro_rows)
      ):
        yield data, rows // data, tensor


def _divisors(model, devices, fixed):
  """Sizes of a tensor axis; all sharded dimensions are divisible by them."""
  sizes = [fixed] if fixed else range(1, min(devices, model.num_kv_heads) + 1)
  whole = math.gcd(devices, *(getattr(model, field) for field in SPLIT))
  return [size for size in sizes if whole % size == 0]


def _micro_rows(shape, train, chip, fixed):
  """Sizes of micro-batches that fill the mesh, the largest first."""
  ways = train[0] * train[1]
  if fixed:
    return [fixed] if fixed % ways == 0 else []
  if chip.rows:
    return [chip.rows * ways, ways]
  # A mini-batch is cut into these and quarters of them (`training/packing.py`).
  # Responses are shorter than they can be: of much larger micro-batches, much
  # would be padding.
  most = shape.packed_rows(shape.prompts * shape.samples, shape.response_tokens)
  sizes = [ways]
  while 2 * sizes[0] <= max(_PARTS * ways, most // _PARTS):
    sizes.insert(0, 2 * sizes[0])
  return sizes


def _batches(shape, fixed):
  """Numbers of prompts that are sampled together, the largest first."""
  if fixed:
    return [fixed]
  batches = [shape.most_prompts]
  while batches[-1] > 1:
    batches.append(math.ceil(batches[-1] / 2))
  return batches
