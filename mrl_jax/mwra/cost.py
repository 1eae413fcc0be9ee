"""The cost of a policy's round: bytes and seconds of the programs it compiles.

Memory is what XLA reports as `peak_memory_in_bytes` for a chip, arguments
included. Terms are the shapes of arrays in `models/`, `update/` and `sampling/`;
the constants below say how many of them are in memory at once. They were fitted
to XLA's figures (jax 0.10.2, libtpu 0.0.42) for programs of models of .5B to 8B
parameters in bfloat16, with rows of 1,024 to 8,192 tokens, compiled ahead of time
for v5e, v5p and v6e. Most are from refusals: with the compiler option
`xla_tpu_max_hbm_size_mib` below its need, XLA says in seconds what a program
needs. For 30 programs that were compiled at full depth (`tests/mwra/test_xla.py`)
the model is between 5% below XLA and 20% above, for all but two at most 15%.
GPUs and CPUs use the same constants, unmeasured.

Seconds are a roofline, and so lower bounds: the largest of the times for
operations, for bytes of memory and for bytes over links, by the figures of
`chips`. Every prompt and response counts with all its positions, as if none were
shorter: packed rows are as many as they can be.
"""

import dataclasses
import math
from typing import NamedTuple

from mrl_jax.architecture import DTYPE_BYTES
from mrl_jax.architecture import ModelConfig
from mrl_jax.mwra import chips
from mrl_jax.mwra import sizes as sizes_lib

# Arrays of one layer that are in memory at once, as values a token: those of size
# D, F, H E and K E in the backward pass, and the share of them in others.
_LAYER = {'D': 5.5, 'F': 3.9, 'H': 2.2, 'K': 0.5}
_SCORING, _PREFILL = 0.1, 0.45
# The same in copies: of a layer's gathered weights in the backward pass and in
# scoring, of a chip's part of the embeddings, and of its part of the head while
# sampling.
_GATHERED, _GATHERED_SCORING = 2.4, 2.0
_EMBEDDINGS, _HEAD = 2.2, 0.5
# The share of all layers that Muon has gathered at a time.
_WHOLE = 0.8
# Logits of a chunk, in float32, in the backward pass and in scoring.
_LOGITS, _LOGITS_SCORING = 0.7, 0.3
# Head and layers are at work one after the other; the allocator fits the
# smaller's arrays only partly into the room of the larger's.
_OVERLAP, _OVERLAP_SCORING = 0.6, 0.0


class Phase(NamedTuple):
  """A program of a round. Bytes are of each device; seconds are of the round."""

  program: float  # Bytes of its arguments, results and temporaries.
  beside: float  # Bytes of what else is in memory while it runs.
  compute: float = 0.0  # Seconds that its operations take at least.
  memory: float = 0.0  # Seconds to move its bytes of memory.
  links: float = 0.0  # Seconds to move its bytes between devices.

  @property
  def bytes(self) -> float:
    return self.program + self.beside

  @property
  def seconds(self) -> float:
    return max(self.compute, self.memory, self.links)

  @property
  def bound(self) -> str:
    """What takes the most time: 'compute', 'memory' or 'links'."""
    return max(('compute', 'memory', 'links'), key=lambda x: getattr(self, x))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
  """The cost of a policy's round on one of its devices."""

  params: int  # Number of parameters, without adapters.
  adapters: int  # Number of parameters of adapters.
  # Bytes in memory throughout a round: parameters, optimizer state, reference
  # and, with LoRA, the base in the layout of sampling too.
  resident_bytes: float
  phases: dict[str, Phase]

  @property
  def peak_bytes(self) -> float:
    return max(phase.bytes for phase in self.phases.values())

  @property
  def work_bytes(self) -> float:
    """What the largest program needs beside the resident bytes."""
    return self.peak_bytes - self.resident_bytes

  @property
  def seconds(self) -> float:
    return sum(phase.seconds for phase in self.phases.values())


def estimate(
  model: ModelConfig,
  shape: sizes_lib.RoundShape,
  layout: sizes_lib.Layout,
  chip: chips.Chip,
) -> Cost:
  """Bytes and seconds of a round of a policy in a given layout."""
  sizes, state = sizes_lib.numbers(model), sizes_lib.state(model, shape, layout)
  phases = train_phases(model, shape, layout, chip)
  phases |= sample_phases(model, shape, layout, chip)
  return Cost(
    params=sizes.params,
    adapters=sizes.adapters,
    resident_bytes=state.resident,
    phases=phases,
  )


def train_phases(
  model: ModelConfig,
  shape: sizes_lib.RoundShape,
  layout: sizes_lib.Layout,
  chip: chips.Chip,
) -> dict[str, Phase]:
  """The programs of an update; `decode` matters under LoRA alone."""
  sizes, state = sizes_lib.numbers(model), sizes_lib.state(model, shape, layout)
  own, peers = shape.prompts * shape.samples, shape.peer_rows
  phases = {
    name: _pass(model, shape, layout, chip, rows, length, name)
    for name, rows, length in (
      ('own gradient', own, shape.response_tokens),
      ('peer gradient', peers, shape.peer_tokens),
      ('own scoring', shape.scored_rows, shape.response_tokens),
      ('peer scoring', shape.scored_peer_rows, shape.peer_tokens),
    )
    if rows
  }
  # The update of the largest tensor, in float32.
  number = 0 if model.lora else sizes.embeddings / sizes.tables
  work = sizes_lib.FLOAT * number / state.parts
  if shape.whole_matrices:
    work += _WHOLE * sizes_lib.FLOAT * (sizes.adapters or sizes.layers)
  phases['update'] = Phase(
    program=state.trained + state.grads + state.optimizer + work,
    beside=state.resident - state.trained - state.optimizer,
    memory=shape.mini_batches
    * (2 * state.trained + 2 * state.optimizer + state.grads)
    / chip.hbm_bandwidth,
  )
  return phases


def sample_phases(
  model: ModelConfig,
  shape: sizes_lib.RoundShape,
  layout: sizes_lib.Layout,
  chip: chips.Chip,
) -> dict[str, Phase]:
  """The move of the weights to the mesh for sampling, prefill and decoding."""
  sizes, state = sizes_lib.numbers(model), sizes_lib.state(model, shape, layout)
  size = DTYPE_BYTES[model.dtype]
  data, _, tensor = layout.decode
  # What a device receives. Nothing is moved or copied if nothing changes.
  moved = (1 - 1 / state.parts) * state.copy
  batches = math.ceil(shape.prompts / layout.sample_batch)
  together = _together(layout, shape.prompts)
  prompts = sizes_lib.multiple(together, data) // data
  rows = prompts * shape.samples
  # Of training and evaluation, what is larger.
  read, most = (
    max(values)
    for values in zip(
      *(
        (local, local * g)
        for p, g in ((shape.prompts, shape.samples), shape.evaluated)
        for local in [sizes_lib.multiple(_together(layout, p), data) // data]
      ),
      strict=True,
    )
  )
  # Of prompts, all tokens together; then a token of every row at a time.
  reads = batches * prompts * shape.prompt_tokens
  reading = sizes.layers + 2 * sizes_lib.attended(model, shape.prompt_tokens)
  per_token = sizes.layers + sizes.vocabulary * model.d_model
  compute = memory = start = 0
  for end in sizes_lib.rings(shape.response_tokens):
    slots, count = shape.prompt_tokens + end, batches * (end - start)
    compute += (
      2
      * count
      * rows
      * (per_token + 2 * sizes_lib.attended(model, slots, half=False))
    )
    memory += count * (
      state.weights + rows * sizes_lib.cached(model, slots) / tensor
    )
    start = end

  def links(passes, tokens):
    """Seconds of the sums over the tensor axis, two a layer."""
    sums, hops = 2 * model.num_layers, 2 * (tensor - 1)
    values = tokens * size * model.d_model * hops / tensor
    return sums * (values / chip.link_bandwidth + passes * hops * chip.hop)

  steps = batches * shape.response_tokens
  filled = (
    state.weights
    + most * sizes_lib.cached(model, shape.prompt_tokens) / tensor
    + most * sizes_lib.cached(model, shape.response_tokens) / tensor
    + _HEAD * size * model.vocab_size * model.d_model / tensor
  )
  beside = state.resident - (state.weights - state.copy)
  per_device = tensor * chip.flops
  return {
    'move': Phase(
      program=state.trained + state.copy,
      beside=state.resident - state.trained,
      links=moved / chip.link_bandwidth,
    ),
    'prefill': Phase(
      program=filled
      + _PREFILL * _layer_bytes(model, read, shape.prompt_tokens, tensor),
      beside=beside,
      compute=2 * reads * reading / per_device,
      memory=batches * state.weights / chip.hbm_bandwidth,
      links=links(batches, reads),
    ),
    'decoding': Phase(
      program=filled,
      beside=beside,
      compute=compute / per_device,
      memory=memory / chip.hbm_bandwidth,
      links=links(steps, steps * rows),
    ),
  }


def _together(layout, prompts):
  """How many of so many prompts are sampled at a time."""
  return min(prompts, layout.sample_batch)


def _pass(model, shape, layout, chip, rows, length, name):
  """Passes over rows of a round whose responses have `length` tokens."""
  sizes, state = sizes_lib.numbers(model), sizes_lib.state(model, shape, layout)
  data, fsdp, tensor = layout.train
  backward = name.endswith('gradient')
  packed = sizes_lib.multiple(shape.packed_rows(rows, length), data * fsdp)
  micro = min(packed, layout.micro_rows)
  local = max(1, micro // (data * fsdp))
  micros = math.ceil(packed / micro) * shape.mini_batches
  slots = shape.slots(length)
  tokens = local * slots  # Of a micro-batch.
  size = DTYPE_BYTES[model.dtype]
  layers, head = sizes.layers * size, model.d_model * model.vocab_size
  trains = backward * (not model.lora)  # Whether matrices have gradients.

  # Bytes of memory.
  arguments = state.trained + state.base + backward * state.grads
  stacked = sizes.scanned * layers / state.parts
  gathered = layers / model.num_layers / tensor
  longest = math.ceil(slots / tensor)
  positions = min(max(1, shape.logit_chunk // micro), longest)
  logits = sizes_lib.FLOAT * positions * local * model.vocab_size
  at_head = head * size * (1 + _EMBEDDINGS / state.parts)
  at_layer = _layer_bytes(model, local, slots, tensor)
  if backward:
    saved = tokens * _saved(model, layout)
    at_layer += _GATHERED * gathered + trains * stacked
    # Gradients of the head are summed in float32, if they are of several chunks.
    summed = sizes_lib.FLOAT if positions < longest else size
    at_head += _LOGITS * logits + trains * head * summed
  else:
    saved = 0
    at_layer = _SCORING * at_layer + _GATHERED_SCORING * gathered
    at_head += _LOGITS_SCORING * logits
  overlap = _OVERLAP if trains else _OVERLAP_SCORING
  program = (
    arguments
    + stacked
    + saved
    + max(at_layer, at_head)
    + overlap * min(at_layer, at_head)
  )

  # Work of a micro-batch; a forward pass of layers or head is one unit of it.
  # Of attention, 'dots' computes the forward pass again too.
  passes = 1 + backward * (1 + (layout.remat == 'block')) + trains
  attentions = 1 + backward * (2 + (layout.remat != 'none'))
  products = tokens * passes * sizes.layers
  # A token attends to its own row, not to all of the packed row.
  whole = shape.prompt_tokens + length
  products += tokens * attentions * 2 * sizes_lib.attended(model, whole)
  products += tokens * (1 + 2 * backward + trains) * head
  # Weights are gathered for every pass over them but a recomputed one, and
  # gradients are scattered. Copies of weights sum their gradients.
  gathers, split = 1 + backward, fsdp * tensor
  links = (1 - 1 / fsdp) * (gathers + trains) * layers / tensor
  links += (1 - 1 / split) * (1 + trains) * head * size
  links += 2 * (1 - 1 / data) * trains * sizes.params * size / split
  # After attention and after the feed-forward, results are summed.
  summed = 2 * passes * model.num_layers * tokens * model.d_model * size
  links += 2 * (1 - 1 / tensor) * summed
  moved = 2 * (gathers + trains) * layers / tensor
  moved += 2 * backward * state.grads
  return Phase(
    program=program,
    beside=state.resident - state.trained - state.base,
    # Smaller micro-batches have the rest.
    compute=shape.mini_batches
    * (packed / micro)
    * (2 * products / tensor / chip.flops),
    memory=micros * moved / chip.hbm_bandwidth,
    links=micros * links / chip.link_bandwidth,
  )


def _layer_bytes(model, rows, length, tensor):
  """Bytes of the arrays of one layer in its backward pass."""
  size, (heads, kv_heads) = DTYPE_BYTES[model.dtype], sizes_lib.heads(model)
  values = (
    _LAYER['D'] * model.d_model
    + (_LAYER['F'] * model.d_ff + _LAYER['H'] * heads + _LAYER['K'] * kv_heads)
    / tensor
  )
  holds_scores = model.attention == 'plain' or (
    model.attention == 'auto' and length < sizes_lib.LONG
  )
  scores = (
    holds_scores * model.num_heads * length * (sizes_lib.FLOAT + size) / tensor
  )
  return rows * length * (values * size + scores)


def _saved(model, layout):
  """Bytes that all layers save for the backward pass, a token."""
  tensor, (heads, kv_heads) = layout.train[2], sizes_lib.heads(model)
  d, f = model.d_model, model.d_ff
  values = {
    'block': d,
    'dots': 2 * d + heads + 2 * kv_heads + 2 * f,
    'none': 10 * d + 6 * (heads + kv_heads + f),  # Many of them in float32.
  }[layout.remat]
  return model.num_layers * values * DTYPE_BYTES[model.dtype] / tensor
