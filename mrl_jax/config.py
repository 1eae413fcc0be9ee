"""Typed configuration that both halves of the system read."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """A decoder: its sizes, and what sets its family apart."""

  vocab_size: int
  num_layers: int
  d_model: int
  d_ff: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  activation: str = 'silu'
  rope_base: float = 10_000.0
  norm_eps: float = 1e-6
  norm_offset: bool = False  # Gemma: the norm scales by 1 + w.
  scale_embeddings: bool = False  # Gemma: embeddings times sqrt(d_model).
  qk_norm: bool = False  # Qwen3: RMS norm of queries and keys.
  tie_embeddings: bool = True
  dtype: str = 'float32'  # Of activations; parameters are float32.

  @property
  def num_params(self) -> int:
    attention = self.d_model * self.head_dim
    attention *= 2 * (self.num_heads + self.num_kv_heads)
    norms = 2 * self.d_model + 2 * self.head_dim * self.qk_norm
    layer = attention + 3 * self.d_model * self.d_ff + norms
    embeddings = self.vocab_size * self.d_model * (2 - self.tie_embeddings)
    return self.num_layers * layer + embeddings + self.d_model
