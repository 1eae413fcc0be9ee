"""Exported folders, as the libraries of Hugging Face load them."""

import dataclasses
import os

from flax import nnx
import jax
import numpy as np
import pytest

from mrl_jax.architecture import Lora
from mrl_jax.models import decoder
from mrl_jax.models import hf_weights
from mrl_jax.models import sharding
from tests import decoders
from tests import pretrained

TARGETS = ('q_proj', 'o_proj', 'gate_proj', 'down_proj')


@pytest.fixture(scope='module')
def adapted(tmp_path_factory):
  """A folder with a model, its config with LoRA, random adapters, and both."""
  folder = tmp_path_factory.mktemp('adapted')
  model, base = pretrained.write(folder / 'base')
  lora = Lora(rank=3, alpha=5.0, target_modules=TARGETS)
  model = dataclasses.replace(model, lora=lora)
  graphdef, adapters, _ = decoder.abstract(model)
  rng = np.random.default_rng(0)
  adapters = jax.tree.map(
    lambda x: rng.normal(size=x.shape, scale=0.2).astype(np.float32), adapters
  )
  return folder, model, adapters, nnx.merge(graphdef, adapters, base)


def tokens(model):
  return np.random.default_rng(1).integers(2, model.vocab_size - 4, (2, 9))


def test_merged_adapters_give_the_logits_of_adapters_beside_the_weights(
  adapted,
):
  folder, model, _, network = adapted
  merged = folder / 'merged'
  merged.mkdir()
  hf_weights.write(merged, model, nnx.state(network), 'float32', 10**9)
  plain = dataclasses.replace(model, lora=None)
  graphdef, like, _ = decoder.abstract(plain)
  places = sharding.params(like, decoders.mesh(1, 1, 1))
  found, base = (
    decoders.logits(
      nnx.merge(graphdef, hf_weights.read(path, plain, like, places)),
      tokens(model),
    )
    for path in (merged, folder / 'base')
  )
  expected = decoders.logits(network, tokens(model))
  np.testing.assert_allclose(found, expected, atol=1e-4)
  assert np.abs(found - base).max() > 0.1


@pytest.mark.slow
def test_peft_loads_adapters_and_computes_the_same(adapted):
  torch = pytest.importorskip('torch', reason="pip install -e '.[parity]'")
  peft = pytest.importorskip('peft', reason="pip install -e '.[parity]'")
  from safetensors import numpy as safetensors_numpy
  import transformers

  folder, model, adapters, network = adapted
  alone, again = folder / 'peft', folder / 'peft-again'
  alone.mkdir()
  hf_weights.write_adapters(alone, model, adapters, os.fspath(folder / 'base'))
  base = transformers.AutoModelForCausalLM.from_pretrained(folder / 'base')
  theirs = peft.PeftModel.from_pretrained(base, alone).eval()
  ids = tokens(model)
  with torch.no_grad():
    logits = theirs(torch.tensor(ids)).logits.numpy()
  np.testing.assert_allclose(logits, decoders.logits(network, ids), atol=1e-4)
  theirs.save_pretrained(again)
  ours, theirs = (
    safetensors_numpy.load_file(path / 'adapter_model.safetensors')
    for path in (alone, again)
  )
  assert ours.keys() == theirs.keys()
  for name, x in ours.items():
    np.testing.assert_array_equal(x, theirs[name])
