"""The sizes that a cost depends on: of a round, of a layout, and of a model."""

import collections
import dataclasses
import functools
import math
from typing import NamedTuple

from mrl_jax import parameters
from mrl_jax.architecture import DTYPE_BYTES
from mrl_jax.architecture import ModelConfig

FLOAT = 4  # Bytes of a float32 gradient, moment or adapter.
LEAST_PACKED = 128  # Slots of a packed row, unless the config asks for others.

# As in the modules of the device half, which cannot be imported here.
SCANNED = 8  # Layers from which on they are scanned over: models/decoder.py.
LONG = 512  # Tokens from which on attention holds no scores: attention.py.
STAGED = 1024  # Tokens from which on rings grow in stages: sampler.py.


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundShape:
  """The sizes of a policy's round."""

  prompts: int  # P.
  samples: int  # G, completions of a prompt.
  mini_batches: int = 1  # Updates of a round.
  peer_rows: int = 0  # Rows of peers to train on, at most.
  scored_rows: int = 0  # Own rows that the trainer scores.
  scored_peer_rows: int = 0
  # Prompts and samples a prompt of an evaluation's batch.
  evaluated: tuple[int, int] = (0, 0)
  prompt_tokens: int  # C, padding included.
  response_tokens: int  # T, padding included.
  peer_tokens: int = 0  # T of peers' rows.
  logit_chunk: int  # Tokens whose logits are in memory at once.
  packed_tokens: int = 0  # As `train.packed_tokens` of the config.
  moment_bytes: float = 2 * FLOAT  # Optimizer state per trained parameter.
  # Whether the optimizer gathers the matrices of layers, as Muon does.
  whole_matrices: bool = False
  reference: bool = False  # Whether a KL penalty keeps the initial policy.

  @property
  def most_prompts(self) -> int:
    """The most prompts that are sampled together."""
    return max(self.prompts, self.evaluated[0])

  def slots(self, length: int) -> int:
    """S, the tokens of a packed row of rows with `length` response tokens."""
    return packed_slots(self.prompt_tokens + length, self.packed_tokens)

  def packed_rows(self, rows: int, length: int) -> int:
    """Packed rows of a mini-batch, at most, of so many rows of a round."""
    each = self.slots(length) // (self.prompt_tokens + length)
    return math.ceil(math.ceil(rows / self.mini_batches) / each)


class Layout(NamedTuple):
  """How a policy runs on its devices."""

  train: tuple[int, int, int]  # Sizes of the mesh axes (data, fsdp, tensor).
  decode: tuple[int, int, int]  # Of the same devices while sampling; fsdp is 1.
  # Packed rows of one forward and backward pass, on all devices.
  micro_rows: int
  sample_batch: int  # Prompts sampled at a time.
  remat: str  # What the backward pass recomputes, see `ModelConfig.remat`.

  @property
  def devices(self) -> int:
    return math.prod(self.train)


class Numbers(NamedTuple):
  """Numbers of parameters."""

  params: int  # Without adapters.
  adapters: int
  layers: int  # Of matrices of layers.
  embeddings: int  # Of embeddings and head.
  tables: int  # Number of such matrices.
  vocabulary: int
  scanned: bool  # Whether layers are scanned over.
  windows: tuple[tuple[int, int], ...]  # Of layers, and how many have each.


class State(NamedTuple):
  """Bytes of a device."""

  trained: float  # Trained parameters.
  grads: float
  optimizer: float
  base: float  # Frozen parameters under adapters.
  resident: float  # All of those but gradients, and more; see `cost.Cost`.
  weights: float  # Parameters as sampling has them.
  copy: float  # What of those is there only while sampling.
  parts: int  # Devices that share a copy of the parameters in training.


@functools.cache
def numbers(model: ModelConfig) -> Numbers:
  """Counts the parameters of a model by what they are for."""
  params = parameters.num_params(parameters.tensors(model))
  tables = 1 if model.tie_embeddings else 2
  layers = map(model.layer, range(model.num_layers))
  windows = collections.Counter(layer.window for layer in layers)
  embeddings = tables * model.vocab_size * model.d_model
  return Numbers(
    params=params,
    adapters=parameters.num_params(parameters.adapters(model)),
    layers=params - embeddings,
    embeddings=embeddings,
    tables=tables,
    vocabulary=model.vocab_size,
    scanned=model.num_layers >= SCANNED,
    windows=tuple(windows.items()),
  )


def state(model: ModelConfig, shape: RoundShape, layout: Layout) -> State:
  """What a device keeps of a policy, in bytes."""
  sizes = numbers(model)
  _, fsdp, tensor = layout.train
  parts, split = fsdp * tensor, layout.decode[2]
  stored, used = DTYPE_BYTES[model.param_dtype], DTYPE_BYTES[model.dtype]
  base = sizes.params * stored / parts
  # Sampling uses the training weights if neither dtype nor place differ.
  same = stored == used and layout.train == layout.decode
  decoded = sizes.params * used / split
  if model.lora:
    number = sizes.adapters
    trained = number * FLOAT / parts
    adapters = number * used / split
    frozen = base + (0 if same else decoded)
    weights, copy = decoded + adapters, adapters
  else:
    number, trained, frozen = sizes.params, base, 0
    weights, copy = decoded, 0 if same else decoded
  optimizer = shape.moment_bytes * number / parts
  return State(
    trained=trained,
    grads=number * FLOAT / parts,
    optimizer=optimizer,
    base=base if model.lora else 0,
    resident=trained * (1 + shape.reference) + optimizer + frozen,
    weights=weights,
    copy=copy,
    parts=parts,
  )


def heads(model: ModelConfig) -> tuple[int, int]:
  """Sizes of the queries, and of the keys, of a token."""
  return (
    model.num_heads * model.head_dim,
    model.num_kv_heads * model.head_dim,
  )


def attended(model: ModelConfig, length: int, half: bool = True) -> float:
  """Products a token of scores, and of results, of all layers: H E S / 2.

  Or H E S, if a token attends to `length` others rather than half of them.
  """
  whole = length / (1 + half)
  slots = sum(
    count * min(window or whole, whole)
    for window, count in numbers(model).windows
  )
  return model.num_heads * model.head_dim * slots


def cached(model: ModelConfig, slots: int) -> int:
  """Bytes of the keys and values of a row with so many slots."""
  entries = sum(
    count * min(window or slots, slots)
    for window, count in numbers(model).windows
  )
  token = 2 * model.num_kv_heads * model.head_dim * DTYPE_BYTES[model.dtype]
  return entries * token


def rings(length: int) -> list[int]:
  """As `sampler.rings`, the numbers of tokens that caches have room for."""
  staged = length >= STAGED
  return [length // 4, length // 2, length] if staged else [length]


def packed_slots(longest: int, asked: int) -> int:
  """The slots of a packed row; `asked` is `train.packed_tokens` of the config."""
  return multiple(max(longest, asked or LEAST_PACKED), 8)


def multiple(n: int, of: int) -> int:
  """The smallest multiple of `of` that is not below `n`."""
  return math.ceil(n / of) * of
