import json

import pytest

from mrl_jax import checks
from mrl_jax import hugging_face
from mrl_jax.architecture import Layer
from mrl_jax.architecture import Rope
from mrl_jax.models import families
from tests import examples

SIZES = {
  'vocab_size': 48,
  'num_hidden_layers': 4,
  'hidden_size': 32,
  'intermediate_size': 64,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
}


def read(folder, **fields):
  """The config of a model by the text of its `config.json`."""
  (folder / 'config.json').write_text(json.dumps({**SIZES, **fields}))
  return families.from_hugging_face(hugging_face.load_config(str(folder)))


def test_an_unknown_family_is_told():
  with pytest.raises(checks.InputError, match="Did you mean 'llama'"):
    families.build('lama')


@pytest.mark.parametrize('family', sorted(families.FAMILIES))
def test_sizes_are_the_users(family):
  config = families.build(family, **examples.SIZES)
  for name, size in examples.SIZES.items():
    assert getattr(config, name) == size


@pytest.mark.parametrize('family', sorted(families.FAMILIES))
def test_what_is_written_is_read_again(family, tmp_path):
  model = families.build(family, **examples.SIZES)
  values = families.to_hugging_face(family, model)
  (tmp_path / 'config.json').write_text(json.dumps(values))
  again = families.from_hugging_face(hugging_face.load_config(str(tmp_path)))
  for i in range(model.num_layers):
    assert again.layer(i) == model.layer(i)
  fields = {**vars(again), 'layers': None}
  assert fields == {**vars(model), 'layers': None}


def test_configs_of_transformers_4_and_5_are_the_same(tmp_path):
  rope = {
    'factor': 8.0,
    'low_freq_factor': 1.0,
    'high_freq_factor': 4.0,
    'original_max_position_embeddings': 8192,
    'rope_type': 'llama3',
  }
  old = read(tmp_path, model_type='llama', rope_theta=5e5, rope_scaling=rope)
  new = read(
    tmp_path, model_type='llama', rope_parameters={**rope, 'rope_theta': 5e5}
  )
  assert old == new
  assert old.layers == (
    Layer(
      rope=Rope(
        base=5e5,
        scaling='llama3',
        factor=8.0,
        original_length=8192,
        low=1.0,
        high=4.0,
      )
    ),
  )


def test_a_head_may_be_wider_than_its_share(tmp_path):
  assert read(tmp_path, model_type='qwen3', head_dim=20).head_dim == 20
  assert read(tmp_path, model_type='qwen2').head_dim == 8


def test_layers_of_smollm3_and_gemma3(tmp_path):
  smollm3 = read(tmp_path, model_type='smollm3', no_rope_layer_interval=4)
  assert [bool(layer.rope) for layer in smollm3.layers] == [1, 1, 1, 0]
  gemma3 = read(tmp_path, model_type='gemma3_text', sliding_window=9)
  assert [layer.window for layer in gemma3.layers] == [9] * 4
  assert {layer.rope.base for layer in gemma3.layers} == {1e4}


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'model_type': 'phi3'}, "'phi3' is not supported.*needs a function in"),
    ({'model_type': 'gemma3'}, "'gemma3' is not supported.*gemma3_text"),
    ({'model_type': 'mamba7'}, 'model type `mamba7`'),
    ({'model_type': 'llama', 'hidden_size': 'x'}, 'expected int, got str'),
    ({'model_type': 'llama', 'mlp_bias': True}, 'mlp_bias is not supported'),
    ({'model_type': 'llama', 'hidden_act': 'relu'}, "activation 'relu'"),
    (
      {
        'model_type': 'qwen2',
        'rope_parameters': {'rope_type': 'dynamic', 'rope_theta': 1e4,
                            'factor': 2.0},
      },
      "unknown rope_type 'dynamic'",
    ),
  ],
)  # fmt: skip
def test_what_the_decoder_does_not_compute_is_named(tmp_path, fields, message):
  with pytest.raises(checks.InputError, match=message):
    read(tmp_path, **fields)


def test_no_config_is_told_with_its_folder(tmp_path):
  with pytest.raises(checks.InputError, match=str(tmp_path)):
    hugging_face.load_config(str(tmp_path))
