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
  """The architecture that a `config.json` with these fields describes."""
  (folder / 'config.json').write_text(json.dumps({**SIZES, **fields}))
  return families.from_hugging_face(hugging_face.load_config(str(folder)))


def test_the_error_for_an_unknown_family_suggests_the_nearest():
  with pytest.raises(checks.InputError, match="Did you mean 'llama'"):
    families.build('lama')


@pytest.mark.parametrize('family', sorted(families.FAMILIES))
def test_a_family_is_read_as_it_was_written(family, tmp_path):
  model = families.build(family, **examples.SIZES)
  assert examples.SIZES.items() <= vars(model).items()
  values = families.to_hugging_face(family, model)
  (tmp_path / 'config.json').write_text(json.dumps(values))
  again = families.from_hugging_face(hugging_face.load_config(str(tmp_path)))
  for i in range(model.num_layers):
    assert again.layer(i) == model.layer(i)
  fields = {**vars(again), 'layers': None}
  assert fields == {**vars(model), 'layers': None}


def test_configs_of_transformers_4_and_5_are_read_alike(tmp_path):
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


@pytest.mark.parametrize(
  ('fields', 'expected'),
  [
    # 0.1 ln 40 + 1, and with a scale of 0.7 below: / (0.07 ln 40 + 1).
    ({}, {'high': 32.0, 'amplitude': 1.3688879}),
    ({'mscale': 1.0, 'mscale_all_dim': 0.7}, {'amplitude': 1.0879546}),
    ({'attention_factor': 0.9, 'beta_fast': 16.0}, {'high': 16.0}),
    ({'attention_factor': 0.9, 'beta_slow': 2.0}, {'low': 2.0}),
    ({'attention_factor': 0.9}, {'low': 1.0, 'amplitude': 0.9}),
  ],
)
def test_the_ramp_and_the_amplitude_of_yarn_are_read(
  tmp_path, fields, expected
):
  yarn = {'rope_type': 'yarn', 'rope_theta': 1e4, 'factor': 40.0, **fields}
  yarn['original_max_position_embeddings'] = 64
  model = read(tmp_path, model_type='qwen2', rope_parameters=yarn)
  rope = vars(model.layers[0].rope)
  assert {name: rope[name] for name in expected} == pytest.approx(expected)


def test_the_head_size_is_by_default_a_share_of_the_model_size(tmp_path):
  assert read(tmp_path, model_type='qwen3', head_dim=20).head_dim == 20
  assert read(tmp_path, model_type='qwen2').head_dim == 8


def test_layers_of_smollm3_and_gemma3_differ(tmp_path):
  smollm3 = read(tmp_path, model_type='smollm3', no_rope_layer_interval=4)
  assert [bool(layer.rope) for layer in smollm3.layers] == [1, 1, 1, 0]
  gemma3 = read(tmp_path, model_type='gemma3_text', sliding_window=9)
  assert [layer.window for layer in gemma3.layers] == [9] * 4
  assert {layer.rope.base for layer in gemma3.layers} == {1e4}


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'model_type': 'phi3'}, "'phi3' is not supported.*needs a row of "),
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
def test_the_error_names_what_the_decoder_lacks(tmp_path, fields, message):
  with pytest.raises(checks.InputError, match=message):
    read(tmp_path, **fields)


def test_the_error_for_a_missing_config_names_the_folder(tmp_path):
  with pytest.raises(checks.InputError, match=str(tmp_path)):
    hugging_face.load_config(str(tmp_path))
