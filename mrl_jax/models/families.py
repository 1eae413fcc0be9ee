"""Model families, as data for the one decoder."""

import functools

from mrl_jax import checks
from mrl_jax.config import ModelConfig

llama = functools.partial(ModelConfig, norm_eps=1e-5, tie_embeddings=False)

qwen = functools.partial(ModelConfig, qk_norm=True, rope_base=1e6)

gemma = functools.partial(
  ModelConfig,
  activation='gelu',
  norm_offset=True,
  scale_embeddings=True,
)

FAMILIES = {'llama': llama, 'qwen': qwen, 'gemma': gemma}


def build(family: str, **sizes) -> ModelConfig:
  """The config of a `family`, with `sizes` as fields of `ModelConfig`."""
  return checks.choose(family, FAMILIES, 'model family')(**sizes)
