"""Small decoders, and one full forward pass to compare with."""

import functools

from flax import nnx
import jax
import numpy as np

from mrl_jax.models import decoder as decoder_lib
from mrl_jax.models import families
from mrl_jax.models import logps
from tests import examples


@functools.cache
def decoder(family: str = 'llama') -> decoder_lib.Decoder:
  """A decoder with random parameters; not to be changed."""
  build = functools.partial(
    decoder_lib.Decoder, families.build(family, **examples.SIZES)
  )
  graphdef = nnx.graphdef(nnx.eval_shape(lambda: build(nnx.Rngs(0))))
  params = jax.jit(lambda key: nnx.state(build(nnx.Rngs(key))))
  return nnx.merge(graphdef, params(jax.random.key(0)))


def logits(decoder, tokens_BS, valid_BS=None) -> np.ndarray:
  """Of the next token at every position, by one full forward pass."""
  if valid_BS is None:
    valid_BS = np.ones(tokens_BS.shape, bool)
  graphdef, params = nnx.split(decoder)
  return _logits(graphdef, params, tokens_BS, valid_BS)


@functools.partial(jax.jit, static_argnums=0)
def _logits(graphdef, params, tokens_BS, valid_BS):
  decoder = nnx.merge(graphdef, params)
  positions_BS, mask_BSS = logps.prompt_layout(valid_BS)
  hidden_BSD, _ = decoder(tokens_BS, positions_BS, mask_BSS)
  return decoder.logits(hidden_BSD)
