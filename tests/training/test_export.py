"""What is exported, as the libraries of Hugging Face load it."""

import os

from flax import nnx
import jax
import numpy as np
import pytest

from mrl_jax.architecture import Lora
from mrl_jax.models import decoder
from mrl_jax.models import hf_weights
from tests import decoders
from tests import pretrained

TARGETS = ('q_proj', 'o_proj', 'gate_proj', 'down_proj')


@pytest.fixture(scope='module')
def adapted(tmp_path_factory):
  """The folder of a model, and it with adapters that change something."""
  folder = tmp_path_factory.mktemp('adapted')
  model, base = pretrained.write(folder / 'base')
  lora = Lora(rank=3, alpha=5.0, target_modules=TARGETS)
  model = type(model)(**{**vars(model), 'lora': lora})
  graphdef, adapters, _ = decoder.abstract(model)
  rng = np.random.default_rng(0)
  adapters = jax.tree.map(
    lambda x: rng.normal(size=x.shape, scale=0.2).astype(np.float32), adapters
  )
  return folder, model, adapters, nnx.merge(graphdef, adapters, base)


def tokens(model):
  return np.random.default_rng(1).integers(2, model.vocab_size - 4, (2, 9))


def test_merged_and_unmerged_adapters_give_the_same_logits(adapted):
  folder, model, _, network = adapted
  merged = folder / 'merged'
  merged.mkdir(exist_ok=True)
  hf_weights.write(merged, model, nnx.state(network), 'float32', 10**9)
  plain = type(model)(**{**vars(model), 'lora': None})
  graphdef, like, _ = decoder.abstract(plain)
  place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  places = nnx.map_state(lambda path, x: x.replace(place), like)
  params = hf_weights.read(merged, plain, like, places)
  found = decoders.logits(nnx.merge(graphdef, params), tokens(model))
  base = decoders.logits(
    nnx.merge(graphdef, hf_weights.read(folder / 'base', plain, like, places)),
    tokens(model),
  )
  np.testing.assert_allclose(
    found, decoders.logits(network, tokens(model)), atol=1e-4
  )
  assert np.abs(found - base).max() > 0.1


@pytest.mark.slow
def test_peft_loads_adapters_and_computes_the_same(adapted):
  torch = pytest.importorskip('torch', reason="pip install -e '.[parity]'")
  peft = pytest.importorskip('peft', reason="pip install -e '.[parity]'")
  import transformers

  folder, model, adapters, network = adapted
  alone = folder / 'peft'
  alone.mkdir(exist_ok=True)
  hf_weights.write_adapters(alone, model, adapters, os.fspath(folder / 'base'))
  base = transformers.AutoModelForCausalLM.from_pretrained(folder / 'base')
  theirs = peft.PeftModel.from_pretrained(base, alone).eval()
  ids = tokens(model)
  with torch.no_grad():
    logits = theirs(torch.tensor(ids)).logits.numpy()
  np.testing.assert_allclose(logits, decoders.logits(network, ids), atol=1e-4)
  again = folder / 'peft-again'
  theirs.save_pretrained(again)
  assert_same_tensors(alone, again)


def assert_same_tensors(one, other):
  from safetensors import numpy as safetensors_numpy

  one, other = (
    safetensors_numpy.load_file(folder / 'adapter_model.safetensors')
    for folder in (one, other)
  )
  assert one.keys() == other.keys()
  for name, x in one.items():
    np.testing.assert_array_equal(x, other[name])
