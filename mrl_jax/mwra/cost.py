"""The cost of a policy's round, in bytes and floating-point operations."""

import dataclasses

from mrl_jax import parameters
from mrl_jax.architecture import DTYPE_BYTES
from mrl_jax.architecture import ModelConfig

_FLOAT = 4  # Bytes of a float32 gradient, moment or adapter.


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundShape:
  """The sizes of a round."""

  rows: int  # Completions of a round, P * G.
  samples: int  # G, completions of a prompt.
  sampled_prompts: int  # Prompts sampled at a time.
  prompt_tokens: int  # C, padding included.
  response_tokens: int  # T, padding included.
  micro_rows: int  # Rows of one forward and backward pass.
  logit_chunk: int  # Tokens whose logits are in memory at once.
  moment_bytes: float = 2 * _FLOAT  # Optimizer state per trained parameter.
  reference: bool = False  # Whether a KL penalty keeps the initial policy.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
  """The cost of one policy, summed over all its devices."""

  params: int  # Number of parameters, without adapters.
  adapters: int  # Number of parameters of adapters.
  # Parameters, optimizer state and reference; with LoRA, the last two are those
  # of the adapters.
  state_bytes: int
  weight_bytes: int  # One sampling copy of the parameters.
  # Whether the sampling copy stays resident, because under LoRA the base never
  # changes.
  kept: bool
  # Whether sampling can use the training weights, which have the same dtype,
  # instead of a copy.
  shared: bool
  # Keys and values of all samples, and the larger of a second cache or one
  # layer's attention scores while prompts are read.
  cache_bytes: int
  # Gradients of own and of peer rows, activations of a micro-batch, and logits
  # of a chunk.
  update_bytes: int
  flops: float  # Of sampling and updating on all rows of a round.

  def resident_bytes(self, copies: int) -> int:
    """Memory in use throughout a round, for `copies` parts of the fsdp axis.

    Every part has its own sampling copy.
    """
    return self.state_bytes + self.kept * self._copies(copies)

  def work_bytes(self, copies: int) -> int:
    """Peak memory of sampling or of the update, beside the resident bytes."""
    moved = 0 if self.kept else self._copies(copies)
    return max(moved + self.cache_bytes, self.update_bytes)

  def peak_bytes(self, copies: int) -> int:
    return self.resident_bytes(copies) + self.work_bytes(copies)

  def _copies(self, copies):
    return 0 if self.shared and copies == 1 else copies * self.weight_bytes


def estimate(model: ModelConfig, shape: RoundShape) -> Cost:
  """A first-order estimate of the cost of a round.

  The forward pass takes 2 operations per parameter and token, forward and
  backward together 6; a token attends to half of the slots on average.
  """
  params = parameters.num_params(parameters.tensors(model))
  adapters = parameters.num_params(parameters.adapters(model))
  param_bytes = params * DTYPE_BYTES[model.param_dtype]
  trained = adapters if model.lora else params
  trained_bytes = adapters * _FLOAT if model.lora else param_bytes
  slots = shape.prompt_tokens + shape.response_tokens
  activations = shape.micro_rows * slots * _activations(model, slots)
  logits = min(shape.logit_chunk, shape.micro_rows * shape.response_tokens)
  attention = (
    4 * model.num_layers * model.num_heads * model.head_dim * slots / 2
  )
  return Cost(
    params=params,
    adapters=adapters,
    state_bytes=param_bytes
    + adapters * _FLOAT
    + shape.reference * trained_bytes
    + round(shape.moment_bytes * trained),
    weight_bytes=(params + adapters) * DTYPE_BYTES[model.dtype],
    kept=model.lora is not None,
    shared=model.dtype == model.param_dtype,
    cache_bytes=_sampling(model, shape),
    update_bytes=2 * trained * _FLOAT
    + _FLOAT * (activations + 2 * logits * model.vocab_size),
    flops=(2 + 6) * shape.rows * slots * (params + attention / 2),
  )


def _activations(model, slots) -> int:
  """Values per token that all layers save for the backward pass."""
  d, f = model.d_model, model.d_ff
  layer = 8 * d + 3 * f
  layer += model.num_heads * slots  # Attention weights of a token.
  qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
  products = qkv + d + 2 * f + d  # With the weights: qkv, o, gate and up, down.
  saved = {'none': layer, 'dots': d + products, 'block': d}[model.remat]
  # Recomputed values exist for one layer at a time.
  return model.num_layers * saved + (layer if saved < layer else 0)


def _sampling(model, shape) -> int:
  """Bytes of the caches of samples and, before them, of their prompts."""
  slots = shape.prompt_tokens + shape.response_tokens
  token = 2 * model.num_kv_heads * model.head_dim * DTYPE_BYTES[model.dtype]
  cache = shape.sampled_prompts * slots * model.num_layers * token
  scores = shape.sampled_prompts * model.num_heads * shape.prompt_tokens * slots
  return cache * shape.samples + max(cache, _FLOAT * scores)
