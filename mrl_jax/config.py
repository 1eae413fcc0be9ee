"""Typed configuration that both halves of the system read."""

import dataclasses
import hashlib
import json

import ml_collections

from mrl_jax import checks

MESH_AXES = ('data', 'fsdp', 'tensor')  # Of every policy's slice.

_DTYPE_BYTES = {'float32': 4, 'bfloat16': 2}
PLACES = ('cache_dir',)  # Keys that say where things are, not what is done.


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

  @property
  def dtype_bytes(self) -> int:
    return _DTYPE_BYTES[self.dtype]

  @property
  def num_params(self) -> int:
    attention = self.d_model * self.head_dim
    attention *= 2 * (self.num_heads + self.num_kv_heads)
    norms = 2 * self.d_model + 2 * self.head_dim * self.qk_norm
    layer = attention + 3 * self.d_model * self.d_ff + norms
    embeddings = self.vocab_size * self.d_model * (2 - self.tie_embeddings)
    return self.num_layers * layer + embeddings + self.d_model


def flat(config: ml_collections.ConfigDict, prefix: str = '') -> dict:
  """{'train.rounds': 150, ...}."""
  items = {}
  for name, value in config.items():
    if isinstance(value, ml_collections.ConfigDict):
      items |= flat(value, f'{prefix}{name}.')
    else:
      items[prefix + name] = list(value) if isinstance(value, tuple) else value
  return items


def what(config: ml_collections.ConfigDict) -> dict:
  """The part of `flat` that decides what a run does."""
  return {k: v for k, v in flat(config).items() if k not in PLACES}


def digest(values) -> str:
  """Sixteen characters that are equal for equal JSON values."""
  text = json.dumps(values, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def check(config: ml_collections.ConfigDict) -> None:
  """Refuses values that cannot be, before anything is built of them.

  Raises:
    InputError: names the key, its value and what it may be.
  """
  values = flat(config)
  for name, value in values.items():
    least = _LEAST.get(name)
    if least is not None and value < least:
      raise checks.InputError(f'{name} = {value}; it must be at least {least}')
  require = checks.require
  require(bool(config.policies), 'policies is empty; a run needs at least one')
  require(
    config.train.prompts % config.train.mini_batches == 0,
    f'train.mini_batches = {config.train.mini_batches} does not divide '
    f'train.prompts = {config.train.prompts}',
  )
  require(
    config.train.micro_rows % config.train.row_multiple == 0,
    f'train.row_multiple = {config.train.row_multiple} does not divide '
    f'train.micro_rows = {config.train.micro_rows}',
  )
  for name in ('sample.temperature', 'method.max_ratio', 'train.micro_rows'):
    require(values[name] > 0, f'{name} = {values[name]}; it must be above 0')
  checks.choose(
    config.sample.long_prompts,
    dict.fromkeys(('skip', 'error')),
    'sample.long_prompts',
  )
  round_records = (
    (len(config.policies) - 1)
    * config.train.prompts
    * (config.train.samples + 1)
  )
  require(
    config.see.capacity_records >= round_records,
    f'see.capacity_records = {config.see.capacity_records}; a round of the '
    f'peers may have {round_records} records, and publishers would wait',
  )
  for name, policy in config.policies.items():
    require(
      '{prompt}' in policy.template,
      f'policies.{name}.template = {policy.template!r} lacks "{{prompt}}"',
    )


_LEAST = {
  'train.rounds': 1,
  'train.prompts': 1,
  'train.samples': 1,
  'train.mini_batches': 1,
  'train.row_multiple': 1,
  'train.logit_chunk': 1,
  'sample.max_tokens': 1,
  'sample.max_prompt_tokens': 1,
  'thl.max_tokens': 1,
  'eval.every': 1,
  'eval.prompts': 1,
  'eval.samples': 1,
  'eval.batch': 1,
  'checkpoint.every': 1,
  'checkpoint.keep': 1,
  'warm_start.steps': 0,
  'warm_start.batch': 1,
  'mwra.emulated_devices': 1,
  'mwra.tensor': 1,
  'see.max_staleness': 0,
  'see.capacity_mib': 1,
  'eval.temperature': 0,
  'method.clip_low': 0,
  'method.clip_high': 0,
  'method.dual_clip': 0,
}
