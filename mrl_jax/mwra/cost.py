"""What a round costs a policy, in bytes and operations."""

import dataclasses

from mrl_jax.architecture import ModelConfig

_FLOAT = 4  # Bytes of a parameter, a gradient or a moment.


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundShape:
  """The sizes of a round.

  Attributes:
    rows: completions of a round, P * G.
    samples: of a prompt, G.
    sampled_prompts: how many are sampled at a time.
    prompt_tokens, response_tokens: C and T, padding included.
    micro_rows: rows of one forward and backward pass.
    logit_chunk: tokens whose logits are in memory at once.
    moment_bytes: of the optimizer's state, a parameter that is trained.
    reference: whether the policy as it began is kept, for a KL penalty.
  """

  rows: int
  samples: int
  sampled_prompts: int
  prompt_tokens: int
  response_tokens: int
  micro_rows: int
  logit_chunk: int
  moment_bytes: float = 2 * _FLOAT
  reference: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
  """Of one policy, over all its devices together.

  Attributes:
    state_bytes: parameters, the optimizer's state, and the reference; of all
      but the parameters only adapters' where there are adapters.
    weight_bytes: one copy of the parameters, to sample from.
    kept: whether that copy stays, as adapters are all that changes of it.
    shared: whether it is the copy that is trained, where there is one only.
    cache_bytes: keys and values while sampling, and a layer's attention to
      the prompts.
    update_bytes: gradients of own and of peer rows, activations of a
      micro-batch and a chunk of logits.
    flops: of sampling and updating on all rows of a round.
  """

  state_bytes: int
  weight_bytes: int
  kept: bool
  shared: bool
  cache_bytes: int
  update_bytes: int
  flops: float

  def resident_bytes(self, copies: int) -> int:
    """What stays; every part of the fsdp axis has a copy to sample from."""
    return self.state_bytes + self.kept * self._copies(copies)

  def work_bytes(self, copies: int) -> int:
    """The most at a time beside what stays."""
    moved = 0 if self.kept else self._copies(copies)
    return max(moved + self.cache_bytes, self.update_bytes)

  def peak_bytes(self, copies: int) -> int:
    return self.resident_bytes(copies) + self.work_bytes(copies)

  def _copies(self, copies):
    return 0 if self.shared and copies == 1 else copies * self.weight_bytes


def estimate(model: ModelConfig, shape: RoundShape) -> Cost:
  """A first-order estimate: 2 operations a parameter and token forward, 6 with
  the backward pass, and attention over half the slots.
  """
  weights = model.num_params * model.param_bytes
  trained, trained_bytes = model.num_params, weights
  if model.lora is not None:
    trained = model.num_adapter_params
    trained_bytes = trained * _FLOAT
    weights += trained_bytes
  slots = shape.prompt_tokens + shape.response_tokens
  tokens = shape.rows * slots
  activations = shape.micro_rows * slots * _activations(model, slots)
  logits = min(shape.logit_chunk, shape.micro_rows * shape.response_tokens)
  attention = (
    4 * model.num_layers * model.num_heads * model.head_dim * slots / 2
  )
  return Cost(
    state_bytes=weights
    + shape.reference * trained_bytes
    + round(shape.moment_bytes * trained),
    weight_bytes=(model.num_params + model.num_adapter_params)
    * model.dtype_bytes,
    kept=model.lora is not None,
    shared=model.dtype == model.param_dtype,
    cache_bytes=_sampling(model, shape),
    update_bytes=2 * trained * _FLOAT
    + _FLOAT * (activations + 2 * logits * model.vocab_size),
    flops=(2 + 6) * tokens * (model.num_params + attention / 2),
  )


def _activations(model, slots) -> int:
  """Values a token that wait for the backward pass, of all layers."""
  products = sum(outputs for _, outputs in model.projections.values())
  layer = 8 * model.d_model + 3 * model.d_ff
  layer += model.num_heads * slots  # Attention weights of a token.
  waiting = {
    'none': layer,
    'dots': model.d_model + products,
    'block': model.d_model,
  }[model.remat]
  # What is computed again is there for one layer at a time.
  return model.num_layers * waiting + (layer if waiting < layer else 0)


def _sampling(model, shape) -> int:
  """Bytes of the keys and values of samples and, before, of their prompts."""
  slots = shape.prompt_tokens + shape.response_tokens
  token = 2 * model.num_kv_heads * model.head_dim * model.dtype_bytes
  cache = shape.sampled_prompts * slots * model.num_layers * token
  scores = shape.sampled_prompts * model.num_heads * shape.prompt_tokens * slots
  return cache * shape.samples + max(cache, _FLOAT * scores)
