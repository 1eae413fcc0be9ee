"""The architecture of a decoder: sizes, features, dtypes and adapters."""

from collections.abc import Sequence
import dataclasses

from mrl_jax import checks

DTYPE_BYTES = {'float32': 4, 'bfloat16': 2}
REMAT = ('none', 'dots', 'block')
AUTO = 'auto'  # `remat` of a model whose plan chooses it.
ATTENTION = ('auto', 'plain', 'splash', 'cudnn', 'blocks')
# The axes of the norms of queries and of keys.
QK_NORMS = {'none': (), 'head': ('E', 'E'), 'heads': ('HE', 'KE')}
# Hugging Face's names of the matrices that an adapter may change.
_ATTENTION = ('q_proj', 'k_proj', 'v_proj', 'o_proj')
PROJECTIONS = (*_ATTENTION, 'gate_proj', 'up_proj', 'down_proj')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
  """Rotary positions (2104.09864), and the scaling of their frequencies.

  `scaling` is 'linear' (2306.15595), 'llama3' (2407.21783), 'yarn' (2309.00071)
  or 'none'. A frequency is kept if it makes more than `high` turns over the
  original context, and divided by `factor` if it makes fewer than `low`.
  """

  base: float = 10_000.0  # Pair i has the frequency base ** (-2 i / E).
  scaling: str = 'none'
  factor: float = 1.0  # Length of the extended over the original context.
  original_length: int = 0  # The original context, in tokens.
  low: float = 1.0
  high: float = 4.0
  amplitude: float = 1.0  # Of sine and cosine.
  truncate: bool = True  # 'yarn': whether its ramp ends at whole pairs.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
  """The attention of one layer."""

  # Number of positions that a token attends to, itself included; 0 is all
  # positions up to its own.
  window: int = 0
  rope: Rope | None = Rope()  # None for a layer without positions.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
  """Low-rank adapters (2106.09685): W + alpha / rank A B, with W frozen."""

  rank: int  # R, columns of A and rows of B.
  alpha: float
  target_modules: tuple[str, ...]  # Names in `PROJECTIONS`.

  def __post_init__(self):
    checks.require(
      self.alpha > 0, f'lora.alpha = {self.alpha}; it must be above 0'
    )
    checks.require(bool(self.target_modules), 'lora.target_modules is empty')
    for name in self.target_modules:
      checks.choose(name, dict.fromkeys(PROJECTIONS), 'lora.target_modules')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """A decoder: its sizes, and the features of its family."""

  vocab_size: int
  num_layers: int
  d_model: int
  d_ff: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  activation: str = 'silu'
  layers: Sequence[Layer] = (Layer(),)  # Repeated for all `num_layers`.
  # Whether attention and feed-forward have a norm 'before', 'after' (OLMo 2) or
  # 'both' (Gemma 2 and 3).
  norms: str = 'before'
  norm_eps: float = 1e-6
  norm_offset: bool = False  # Whether norms scale by 1 + w (Gemma).
  # Norm of queries and keys: 'none', over each 'head' (Qwen3, Gemma 3), or over
  # all 'heads' together (OLMo 2).
  qk_norm: str = 'none'
  qkv_bias: bool = False
  out_bias: bool = False
  query_size: float = 0  # Scores are divided by its root; 0: by `head_dim`'s.
  # c of the soft cap c tanh(x / c) of attention scores and of logits (Gemma 2);
  # 0 is none.
  score_cap: float = 0
  logit_cap: float = 0
  scale_embeddings: bool = False  # By the root of `d_model` (Gemma).
  tie_embeddings: bool = True
  dtype: str = 'float32'  # Of activations.
  param_dtype: str = 'float32'  # Of parameters; adapters are float32.
  # What the backward pass recomputes: nothing ('none'), all but the products
  # with weights ('dots'), or whole layers ('block'); 'auto' until it is planned.
  remat: str = 'none'
  attention: str = 'auto'  # How rows are computed; see `models/attention.py`.
  lora: Lora | None = None  # Adapters; with them, only they are trained.

  def __post_init__(self):
    checks.require(
      self.num_heads % self.num_kv_heads == 0,
      f'num_kv_heads = {self.num_kv_heads} does not divide num_heads = '
      f'{self.num_heads}',
    )
    checks.require(
      self.head_dim % 2 == 0,
      f'head_dim = {self.head_dim} must be even: rotary embeddings turn pairs',
    )
    checks.choose(self.dtype, DTYPE_BYTES, 'dtype')
    checks.choose(self.param_dtype, DTYPE_BYTES, 'param_dtype')
    checks.choose(self.remat, dict.fromkeys((*REMAT, AUTO)), 'remat')
    checks.choose(self.attention, dict.fromkeys(ATTENTION), 'attention')

  def layer(self, i: int) -> Layer:
    return self.layers[i % len(self.layers)]

  @property
  def pattern(self) -> tuple[Layer, ...]:
    """The shortest sequence of layers whose repetition is all layers."""
    every = [self.layer(i) for i in range(self.num_layers)]
    size = next(n for n in range(1, len(every) + 1) if every[n:] == every[:-n])
    return tuple(every[:size])

  @property
  def score_scale(self) -> float:
    """What attention scores are multiplied by."""
    return (self.query_size or self.head_dim) ** -0.5

  @property
  def axis_sizes(self) -> dict[str, int]:
    """The sizes of the axes of parameters, by their letters."""
    return {
      'D': self.d_model,
      'V': self.vocab_size,
      'H': self.num_heads,
      'K': self.num_kv_heads,
      'E': self.head_dim,
      'F': self.d_ff,
      'R': self.lora.rank if self.lora else 0,
    }
