"""What sets decoders apart: sizes, families' traits, dtypes and adapters."""

from collections.abc import Sequence
import dataclasses

from mrl_jax import checks

_DTYPE_BYTES = {'float32': 4, 'bfloat16': 2}


REMAT = ('none', 'dots', 'block')
# Names of matrices, as Hugging Face has them, that an adapter may change.
PROJECTIONS = (
  *('q_proj', 'k_proj', 'v_proj', 'o_proj'),
  *('gate_proj', 'up_proj', 'down_proj'),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
  """Rotary positions (2104.09864), and how their frequencies are scaled.

  Attributes:
    base: of the geometric sequence of wavelengths.
    scaling: 'linear' (2306.15595), 'llama3' (2407.21783), 'yarn' (2309.00071)
      or 'none'.
    factor: how many times longer than before the context has become.
    original_length: that context before, in tokens.
    low: 'llama3': turns over it below which a frequency is divided by
      `factor`; 'yarn': turns below which it is.
    high: turns over it above which a frequency stays as it is.
    amplitude: of sine and cosine.
    truncate: 'yarn': whether the ends of its ramp are whole dimensions.
  """

  base: float = 10_000.0
  scaling: str = 'none'
  factor: float = 1.0
  original_length: int = 0
  low: float = 1.0
  high: float = 4.0
  amplitude: float = 1.0
  truncate: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
  """What one layer sees.

  Attributes:
    window: how many positions, its own included; 0 is all before it.
    rope: None gives it no positions at all.
  """

  window: int = 0
  rope: Rope | None = Rope()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
  """Low-rank adapters (2106.09685): W + alpha / rank A B, where W stays.

  Attributes:
    rank: R, columns of A and rows of B.
    alpha: their scale, times the rank.
    target_modules: names in `PROJECTIONS`.
  """

  rank: int
  alpha: float
  target_modules: tuple[str, ...]

  def __post_init__(self):
    checks.require(
      self.alpha > 0, f'lora.alpha = {self.alpha}; it must be above 0'
    )
    checks.require(bool(self.target_modules), 'lora.target_modules is empty')
    for name in self.target_modules:
      checks.choose(name, dict.fromkeys(PROJECTIONS), 'lora.target_modules')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """A decoder: its sizes, and what sets its family apart.

  Attributes:
    layers: what the layers see, in turn.
    norms: whether attention and feed-forward have a norm 'before', 'after'
      (OLMo 2) or 'both' (Gemma 2 and 3).
    norm_offset: the norm scales by 1 + w (Gemma).
    qk_norm: of the queries and keys of each 'head' (Qwen3, Gemma 3), of all
      'heads' together (OLMo 2), or 'none'.
    qkv_bias, out_bias: of the projections into and out of attention.
    query_size: scores are divided by its root; 0 is `head_dim`.
    score_cap, logit_cap: c of c tanh(x / c), of attention's scores and of the
      logits (Gemma 2); 0 is none.
    scale_embeddings: times the root of `d_model` (Gemma).
    dtype: of activations.
    param_dtype: of parameters; adapters are float32.
    remat: what the backward pass computes again: 'none', all but the products
      with weights ('dots'), or the whole 'block'.
    lora: adapters, which are then all that is trained.
  """

  vocab_size: int
  num_layers: int
  d_model: int
  d_ff: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  activation: str = 'silu'
  layers: Sequence[Layer] = (Layer(),)
  norms: str = 'before'
  norm_eps: float = 1e-6
  norm_offset: bool = False
  qk_norm: str = 'none'
  qkv_bias: bool = False
  out_bias: bool = False
  query_size: float = 0
  score_cap: float = 0
  logit_cap: float = 0
  scale_embeddings: bool = False
  tie_embeddings: bool = True
  dtype: str = 'float32'
  param_dtype: str = 'float32'
  remat: str = 'none'
  lora: Lora | None = None

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
    checks.choose(self.dtype, _DTYPE_BYTES, 'dtype')
    checks.choose(self.param_dtype, _DTYPE_BYTES, 'param_dtype')
    checks.choose(self.remat, dict.fromkeys(REMAT), 'remat')

  def layer(self, i: int) -> Layer:
    return self.layers[i % len(self.layers)]

  @property
  def dtype_bytes(self) -> int:
    return _DTYPE_BYTES[self.dtype]

  @property
  def param_bytes(self) -> int:
    """Of one parameter."""
    return _DTYPE_BYTES[self.param_dtype]

  @property
  def num_params(self) -> int:
    """Without adapters."""
    q, kv = (n * self.head_dim for n in (self.num_heads, self.num_kv_heads))
    norms = (2 + 2 * (self.norms == 'both')) * self.d_model
    norms += {'none': 0, 'head': 2 * self.head_dim, 'heads': q + kv}[
      self.qk_norm
    ]
    biases = (q + 2 * kv) * self.qkv_bias + self.d_model * self.out_bias
    matrices = sum(n * m for n, m in self.projections.values())
    embeddings = self.vocab_size * self.d_model * (2 - self.tie_embeddings)
    layers = self.num_layers * (matrices + norms + biases)
    return layers + embeddings + self.d_model

  @property
  def num_adapter_params(self) -> int:
    if self.lora is None:
      return 0
    sizes = [sum(self.projections[n]) for n in self.lora.target_modules]
    return self.num_layers * self.lora.rank * sum(sizes)

  @property
  def projections(self) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the matrices of a layer."""
    d, f = self.d_model, self.d_ff
    q, kv = (n * self.head_dim for n in (self.num_heads, self.num_kv_heads))
    outer = ((d, q), (d, kv), (d, kv), (q, d), (d, f), (d, f), (f, d))
    return dict(zip(PROJECTIONS, outer, strict=True))
