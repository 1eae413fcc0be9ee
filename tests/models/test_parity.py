"""Every family against `transformers`: files it wrote, and live with torch."""

import functools
import os

from flax import nnx
import jax
from jax.sharding import Mesh
import numpy as np
import optax
import pytest
from safetensors import numpy as safetensors_numpy

from mrl_jax import config as config_lib
from mrl_jax import hugging_face
from mrl_jax.models import decoder as decoder_lib
from mrl_jax.models import families
from mrl_jax.models import hf_weights
from mrl_jax.models import logps
from mrl_jax.models import sharding
from mrl_jax.sampling import sampler
from tests import decoders
from tests import parity

STORED = pytest.mark.parametrize('name', parity.STORED)
MODELS = pytest.mark.parametrize('name', parity.MODELS)


def mesh(*shape):
  devices = np.array(jax.devices()[: int(np.prod(shape))])
  return Mesh(devices.reshape(shape), config_lib.MESH_AXES)


def read(folder, place=None, **changes):
  """The model's config and its parameters."""
  model = families.from_hugging_face(
    hugging_face.load_config(folder), **changes
  )
  _, params, _ = decoder_lib.abstract(model)
  places = sharding.params(params, place or mesh(1, 1, 1), sharding.TRAIN)
  return model, hf_weights.read(folder, model, params, places)


def merge(model, params):
  graphdef, *_ = decoder_lib.abstract(model)
  return nnx.merge(graphdef, params, decoder_lib.NO_PARAMS)


def assert_logits(decoder, expected):
  valid_BT = expected['valid_BT']
  found = decoders.logits(decoder, expected['tokens_BT'], valid_BT)
  np.testing.assert_allclose(
    found[valid_BT], expected['logits_BTV'][valid_BT], atol=1e-4
  )


def greedy(model, params, expected):
  sample = sampler.build(
    model,
    mesh(1, 1, 1),
    samples=1,
    length=parity.NEW,
    stop_ids=(-1,),
    greedy=True,
  )
  samples = sample(
    params,
    decoder_lib.NO_PARAMS,
    expected['tokens_BT'],
    expected['valid_BT'],
    jax.random.key(0),
    np.float32(1.0),
    np.int32(0),
  )
  return samples.tokens_BT


@functools.cache
def golden(name):
  folder = os.fspath(parity.GOLDEN / name)
  return read(folder), safetensors_numpy.load_file(
    os.path.join(folder, parity.EXPECTED)
  )


@STORED
def test_logits_and_greedy_tokens_are_those_of_transformers(name):
  (model, params), expected = golden(name)
  assert_logits(merge(model, params), expected)
  np.testing.assert_array_equal(
    greedy(model, params, expected), expected['greedy_BN']
  )


@STORED
def test_what_was_read_is_written_bit_for_bit(name, tmp_path):
  (model, params), _ = golden(name)
  hf_weights.write(tmp_path, model, params, 'float32', 2000)
  written = {}
  for path in tmp_path.glob('*.safetensors'):
    written |= safetensors_numpy.load_file(path)
  source = parity.GOLDEN / name / hf_weights.WEIGHTS
  for tensor, x in safetensors_numpy.load_file(source).items():
    np.testing.assert_array_equal(written.pop(tensor), x)
  assert not written


@pytest.mark.slow
@MODELS
def test_a_model_made_now_agrees_before_and_after_an_update(name, tmp_path):
  pytest.importorskip('torch', reason="pip install -e '.[parity]'")
  import transformers

  source, trained = os.fspath(tmp_path / 'source'), tmp_path / 'trained'
  expected = parity.expected(parity.write(name, source, seed=1), seed=1)
  model, params = read(source)
  assert_logits(merge(model, params), expected)

  params = updated(model, params, expected)
  trained.mkdir()
  hf_weights.write(trained, model, params, 'float32', 2000)
  hugging_face.copy_config(source, source, os.fspath(trained), 'float32')
  theirs = transformers.AutoModelForCausalLM.from_pretrained(trained).eval()
  after = parity.expected(theirs, seed=1)
  assert np.abs(after['logits_BTV'] - expected['logits_BTV']).max() > 1e-2
  assert_logits(merge(model, params), after)


def updated(model, params, batch):
  """The parameters after a step towards likelier last tokens."""
  graphdef, *_ = decoder_lib.abstract(model)

  def loss(params):
    network = nnx.merge(graphdef, params, decoder_lib.NO_PARAMS)
    logp_BT = logps.response_logps(
      network, batch['tokens_BT'], batch['valid_BT'], 4, 1000
    )
    return -logp_BT.mean()

  optimizer = optax.adamw(1e-2)
  grads = jax.jit(jax.grad(loss))(params)
  updates, _ = optimizer.update(grads, optimizer.init(params), params)
  return optax.apply_updates(params, updates)
