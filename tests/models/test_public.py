"""The public sizes of models, against their published parameter counts."""

import importlib

import pytest

from mrl_jax import hugging_face
from mrl_jax import parameters
from mrl_jax.models import families
from mrl_jax.models import public
from tests import test_pairs

COUNTS = {
  'Qwen/Qwen2.5-0.5B': 494_032_768,
  'Qwen/Qwen2.5-1.5B': 1_543_714_304,
  'Qwen/Qwen2.5-Math-1.5B': 1_543_714_304,
  'Qwen/Qwen3-0.6B': 596_049_920,
  'Qwen/Qwen3-1.7B': 1_720_574_976,
  'Qwen/Qwen3-4B': 4_022_468_096,
  'Qwen/Qwen3-8B': 8_190_735_360,
  'meta-llama/Llama-3.2-1B': 1_235_814_400,
  'meta-llama/Llama-3.2-3B': 3_212_749_824,
  'meta-llama/Llama-3.1-8B': 8_030_261_248,
  'HuggingFaceTB/SmolLM3-3B': 3_075_098_624,
  'OctoThinker/OctoThinker-3B-Hybrid-Base': 3_212_749_824,
}


def model(path):
  values = hugging_face.with_defaults(public.CONFIGS[path])
  return families.from_hugging_face(values)


@pytest.mark.parametrize('path', COUNTS)
def test_models_have_the_published_number_of_parameters(path):
  tensors = parameters.tensors(model(path))
  assert parameters.num_params(tensors) == COUNTS[path]


def test_models_of_a_size_share_it_with_the_published_one():
  for path in public.CONFIGS:
    base = min((p for p in COUNTS if path.startswith(p)), key=len)
    assert model(path).axis_sizes == model(base).axis_sizes, path


def test_smollm3_has_no_positions_in_every_fourth_layer():
  ropes = [
    bool(layer.rope) for layer in model('HuggingFaceTB/SmolLM3-3B').layers
  ]
  assert ropes == 9 * [True, True, True, False]


@pytest.mark.parametrize(('name', 'pair'), test_pairs.PAIRS)
def test_the_models_of_every_pair_are_known(name, pair):
  config = importlib.import_module(f'configs.pairs.{name}').get_config(*pair)
  assert {policy.path for policy in config.policies.values()} <= {
    *public.CONFIGS
  }
