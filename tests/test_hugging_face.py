import json
import os

import pytest

from mrl_jax import checks
from mrl_jax import hugging_face
from mrl_jax.data import vocabulary
from tests import examples


def test_a_tokenizer_without_an_end_is_refused(tmp_path):
  folder = os.fspath(tmp_path / 'endless')
  backend = vocabulary.byte_level_bpe(examples.TEXTS, 300)
  hugging_face.save_tokenizer(backend, folder, pad_token='<pad>')
  with pytest.raises(checks.InputError, match='end-of-sequence'):
    hugging_face.load_tokenizer(folder)


def test_a_folder_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
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
