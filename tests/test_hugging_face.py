import json
import os

import pytest

from mrl_jax import checks
from mrl_jax import hugging_face
from mrl_jax.data import vocabulary
from tests import examples
from tests import vocabularies


def test_a_tokenizer_without_end_of_sequence_is_an_error(tmp_path):
  folder = os.fspath(tmp_path / 'endless')
  backend = vocabulary.byte_level_bpe(examples.TEXTS, 300)
  hugging_face.save_tokenizer(backend, folder, pad_token='<pad>')
  with pytest.raises(checks.InputError, match='end-of-sequence'):
    hugging_face.load_tokenizer(folder)


def test_a_tokenizer_is_saved_completely_or_not_at_all(tmp_path, monkeypatch):
  folder = os.fspath(tmp_path / 'whole')
  backend = vocabulary.byte_level_bpe(examples.TEXTS, 300)

  def killed(*_):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(os, 'rename', killed)
    with pytest.raises(KeyboardInterrupt):
      hugging_face.save_tokenizer(backend, folder, eos_token='<eos>')
  assert not os.path.exists(folder)
  hugging_face.save_tokenizer(backend, folder, eos_token='<eos>')
  with open(os.path.join(folder, 'tokenizer_config.json')) as f:
    assert json.load(f)['eos_token'] == '<eos>'


FOREVER = (  # 10^15 steps.
  '{% for i in range(99999) %}{% for j in range(99999) %}'
  '{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}'
)


def chat(folder, template):
  vocabularies.chat_folder('byte_level', os.fspath(folder), template)
  return hugging_face.load_tokenizer(os.fspath(folder))


def test_a_chat_template_is_the_text_before_and_after_a_prompt(tmp_path):
  chatml = chat(tmp_path / 'chatml', vocabularies.CHATML)
  user = '<|start|>user\n', '<|end|>\n<|start|>assistant\n'
  assert hugging_face.chat_template(chatml) == user
  assert hugging_face.chat_template(chatml, thinking=True) == user
  before, after = hugging_face.chat_template(chatml, 'Be {brief}.', False)
  assert before == '<|start|>system\nBe {brief}.<|end|>\n' + user[0]
  assert after == user[1] + '<think>\n\n</think>\n\n'
  trimming = chat(tmp_path / 'trimming', vocabularies.TRIMMING)
  before, _ = hugging_face.chat_template(trimming)
  assert before == '<|begin|><|start|>user<|over|>\n\n'


@pytest.mark.parametrize(
  ('template', 'system', 'message'),
  [
    (None, '', r"the tokenizer at '.*folder' has no chat template; give a "),
    (vocabularies.SYSTEMLESS, 'Hi', 'prompt with a system prompt: System role'),
    ('{{ messages', '', "folder' cannot write a prompt: "),
    ('{{ 1 / 0 }}', '', "folder' cannot write a prompt: division by zero"),
    ('<|start|>', '', 'stands for the prompt, 0 times in '),
    (FOREVER, '', 'ended in a timeout; it may take'),
    ("{{ 'x' * 10 ** 10 }}", '', 'cannot write a prompt: MemoryError'),
    ("{{ 'x' * 10 ** 7 }}", '', 'it wrote 10,000,000 characters'),
    (vocabularies.CHATML, 'As in {prompt}', 'for the prompt, 2 times in '),
  ],
)
def test_the_error_of_a_chat_template_says_what_it_cannot_write(
  tmp_path, monkeypatch, template, system, message
):
  tokenizer = chat(tmp_path / 'folder', template)
  monkeypatch.setattr(hugging_face._renderer, '_timeout_s', 1.0)
  with pytest.raises(checks.InputError, match=message):
    hugging_face.chat_template(tokenizer, system)


@pytest.mark.parametrize(
  ('text', 'ids'),
  [
    (None, ()),
    ('{}', ()),
    ('{"eos_token_id": 3}', (3,)),
    ('{"eos_token_id": [4, 3]}', (4, 3)),
  ],
)
def test_stop_ids_are_those_of_the_generation_config(tmp_path, text, ids):
  if text is not None:
    (tmp_path / 'generation_config.json').write_text(text)
  assert hugging_face.stop_ids(os.fspath(tmp_path)) == ids


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('{', 'is malformed'),
    ('[]', 'is malformed'),
    ('{"eos_token_id": "<eos>"}', r"must be an id or .*, not \['<eos>'\]"),
    ('{"eos_token_id": [true]}', r'must be an id or .*, not \[True\]'),
  ],
)
def test_a_malformed_generation_config_is_an_error(tmp_path, text, message):
  (tmp_path / 'generation_config.json').write_text(text)
  with pytest.raises(checks.InputError, match=f'config.json.* {message}'):
    hugging_face.stop_ids(os.fspath(tmp_path))


def test_a_config_is_copied_with_the_tokenizer_of_the_run(tmp_path):
  for name, texts in (('model', ['max 4 9 3']), ('other', ['min 4 9 3'])):
    vocabulary.train('byte_level', texts, 300, str(tmp_path / name))
  (tmp_path / 'model' / 'config.json').write_text(
    '{"model_type": "llama", "torch_dtype": "float16"}'
  )
  assert hugging_face.source_dtype(str(tmp_path / 'model')) == 'float16'
  for tokenizer in ('model', 'other'):
    out = tmp_path / f'out-{tokenizer}'
    out.mkdir()
    hugging_face.copy_config(
      *(str(tmp_path / name) for name in ('model', tokenizer)),
      str(out),
      'bfloat16',
    )
    assert json.loads((out / 'config.json').read_text()) == {
      'model_type': 'llama',
      'dtype': 'bfloat16',
    }
    vocabularies_of = [
      hugging_face.load_tokenizer(str(at)).get_vocab()
      for at in (out, tmp_path / tokenizer)
    ]
    assert vocabularies_of[0] == vocabularies_of[1]


def test_stop_ids_are_by_default_those_of_the_model_config(tmp_path):
  (tmp_path / 'config.json').write_text('{"eos_token_id": [7, 8]}')
  assert hugging_face.stop_ids(os.fspath(tmp_path)) == (7, 8)
  (tmp_path / 'generation_config.json').write_text('{"eos_token_id": 9}')
  assert hugging_face.stop_ids(os.fspath(tmp_path)) == (9,)


def test_an_unknown_name_of_the_hub_is_an_error():
  for read in (hugging_face.stop_ids, hugging_face.weights_folder):
    with pytest.raises(checks.InputError, match='is not a folder, and cannot'):
      read('no such/name at/all')


def test_a_template_sees_the_same_date_every_day(tmp_path):
  template = "{{ strftime_now('%d %b %Y') }}{{ messages[0]['content'] }}"
  tokenizer = chat(tmp_path / 'folder', template)
  assert hugging_face.chat_template(tokenizer) == ('26 Jul 2024', '')


def test_thinking_is_an_error_for_a_template_without_a_switch(tmp_path):
  template = "{{ messages[0]['content'] }}"
  tokenizer = chat(tmp_path / 'folder', template)
  assert hugging_face.chat_template(tokenizer) == ('', '')
  with pytest.raises(checks.InputError, match='with and without thinking'):
    hugging_face.chat_template(tokenizer, thinking=False)


@pytest.mark.parametrize('load', ['load_tokenizer', 'load_config'])
def test_no_code_of_a_folder_runs(tmp_path, load):
  code = 'import pathlib\npathlib.Path(__file__ + ".ran").touch()\n'
  (tmp_path / 'own.py').write_text(code)
  autos = {'AutoConfig': 'own.Config', 'AutoTokenizer': [None, 'own.Tokenizer']}
  about = {'model_type': 'own', 'auto_map': autos}
  for name in ('config.json', 'tokenizer_config.json'):
    (tmp_path / name).write_text(json.dumps(about))
  with pytest.raises(checks.InputError, match='trust_remote_code'):
    getattr(hugging_face, load)(os.fspath(tmp_path))
  assert {p.name for p in tmp_path.iterdir()} == {
    *('own.py', 'config.json', 'tokenizer_config.json')
  }
