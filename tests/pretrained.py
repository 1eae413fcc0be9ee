"""Small Hugging Face folders with weights, config and tokenizer."""

import os

from flax import nnx

from mrl_jax import hugging_face
from mrl_jax.architecture import ModelConfig
from mrl_jax.data import vocabulary
from mrl_jax.models import families
from mrl_jax.models import hf_weights
from tests import decoders
from tests import examples


def write(folder, family: str = 'llama') -> tuple[ModelConfig, nnx.State]:
  """Writes a random model of one layer; returns its config and parameters."""
  tokenizer = os.fspath(folder) + '-tokenizer'
  kind = 'sentencepiece' if family == 'gemma' else 'byte_level'
  vocabulary.train(kind, examples.TEXTS * 20, 340, tokenizer)
  rows = len(hugging_face.load_tokenizer(tokenizer))
  # Pretrained models have a few more rows than tokens.
  network = decoders.decoder(family, vocab_size=rows + 4, num_layers=1)
  model, params = network.config, nnx.state(network)
  os.makedirs(folder)
  about = families.to_hugging_face(family, model)
  hugging_face.save_config(about, tokenizer, folder, 'float32')
  hf_weights.write(folder, model, params, 'float32', 10**9)
  return model, params
