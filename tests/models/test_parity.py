"""Parity with `transformers`: with stored files, and live if torch is there."""

import functools
import os

from flax import nnx
import jax
import numpy as np
import optax
import pytest
from safetensors import numpy as safetensors_numpy

from mrl_jax import hugging_face
from mrl_jax.models import decoder as decoder_lib
from mrl_jax.models import families
from mrl_jax.models import hf_weights
from mrl_jax.models import logps
from mrl_jax.models import sharding
from mrl_jax.sampling import drawing
from mrl_jax.sampling import sampler
from mrl_jax.sampling import slots
from tests import decoders
from tests import parity

STORED = pytest.mark.parametrize('name', parity.STORED)
MODELS = pytest.mark.parametrize('name', parity.MODELS)


def read(folder, **changes):
  """The config and the parameters of the model in `folder`."""
  model = families.from_hugging_face(
    hugging_face.load_config(folder), **changes
  )
  _, params, _ = decoder_lib.abstract(model)
  places = sharding.params(params, decoders.mesh(1, 1, 1))
  return model, hf_weights.read(folder, model, params, places)


def merge(model, params):
  graphdef, *_ = decoder_lib.abstract(model)
  return nnx.merge(graphdef, params, decoder_lib.NO_PARAMS)


def assert_logits(found_BTV, expected):
  """The logits at the tokens of the prompts are those of `transformers`."""
  valid_BT = expected['valid_BT']
  np.testing.assert_allclose(
    found_BTV[:, : valid_BT.shape[1]][valid_BT],
    expected['logits_BTV'][valid_BT],
    atol=1e-4,
  )


@functools.cache
def golden(name):
  """A stored model, and what `transformers` computed with it."""
  folder = os.fspath(parity.GOLDEN / name)
  return read(folder), safetensors_numpy.load_file(
    os.path.join(folder, parity.EXPECTED)
  )


@STORED
def test_logits_and_most_likely_tokens_are_those_of_transformers(name):
  (model, params), expected = golden(name)
  prompt_BT, completion_BN = expected['tokens_BT'], expected['greedy_BN']
  logits_BSV = decoders.logits(
    merge(model, params),
    np.concatenate([prompt_BT, completion_BN], 1),
    np.pad(expected['valid_BT'], ((0, 0), (0, parity.NEW)), mode='edge'),
  )
  assert_logits(logits_BSV, expected)
  np.testing.assert_array_equal(
    logits_BSV[:, parity.LENGTH - 1 : -1].argmax(-1), completion_BN
  )


def test_the_sampler_completes_as_transformers_does():
  # Gemma 2 has windows, shorter than the prompts, in every second layer.
  (model, params), expected = golden('gemma2')
  prompts = [
    tokens_T[valid_T]
    for tokens_T, valid_T in zip(
      expected['tokens_BT'], expected['valid_BT'].astype(bool), strict=True
    )
  ]
  sample = sampler.Sampler(
    model,
    decoders.mesh(1, 1, 1),
    slots.Settings(
      samples=1,
      length=parity.NEW,
      stop_ids=(-1,),
      density=drawing.Density(temperature=0.0),
    ),
    prompts=2,  # Others take the slots of those that have ended.
    context=parity.LENGTH,
  )
  completions = sample(
    params, decoder_lib.NO_PARAMS, prompts, jax.random.key(0)
  )
  found = {c.prompt: c.ids for each in completions for c in each}
  for prompt, greedy_N in enumerate(expected['greedy_BN']):
    np.testing.assert_array_equal(found[prompt], greedy_N)


@STORED
def test_weights_are_written_as_they_were_read(name, tmp_path):
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
def test_a_new_model_agrees_with_torch_before_and_after_an_update(
  name, tmp_path
):
  pytest.importorskip('torch', reason="pip install -e '.[parity]'")
  import transformers

  source, trained = os.fspath(tmp_path / 'source'), tmp_path / 'trained'
  before = parity.expected(parity.write(name, source, seed=1), seed=1)
  model, params = read(source)
  assert_logits(logits(model, params, before), before)

  params = updated(model, params, before)
  trained.mkdir()
  hf_weights.write(trained, model, params, 'float32', 2000)
  hugging_face.copy_config(source, source, os.fspath(trained), 'float32')
  theirs = transformers.AutoModelForCausalLM.from_pretrained(trained).eval()
  after = parity.expected(theirs, seed=1)
  assert np.abs(after['logits_BTV'] - before['logits_BTV']).max() > 1e-2
  assert_logits(logits(model, params, before), after)


def logits(model, params, prompts):
  return decoders.logits(
    merge(model, params), prompts['tokens_BT'], prompts['valid_BT']
  )


def updated(model, params, batch):
  """The parameters after a step that makes the last tokens more likely."""
  graphdef, *_ = decoder_lib.abstract(model)

  @jax.jit
  @jax.grad
  def gradients(params, tokens_BT, valid_BT):
    network = nnx.merge(graphdef, params, decoder_lib.NO_PARAMS)
    scores = logps.response_scores(network, tokens_BT, valid_BT, 1000)
    return -scores.logp_BS[:, -4:].mean()

  optimizer = optax.adamw(1e-2)
  updates, _ = optimizer.update(
    gradients(params, batch['tokens_BT'], batch['valid_BT']),
    optimizer.init(params),
    params,
  )
  return optax.apply_updates(params, updates)
