import os

import numpy as np
import pytest

from mrl_jax import checks
from mrl_jax.data import vocabulary
from mrl_jax.thl import byte_tokenizer
from tests import examples


@pytest.mark.parametrize('kind', vocabulary.KINDS)
def test_a_trained_tokenizer_is_a_hugging_face_folder(kind, tmp_path):
  folder = os.fspath(tmp_path / kind)
  vocabulary.train(kind, examples.TEXTS * 20, 340, folder)
  loaded = byte_tokenizer.load(folder)
  fresh = examples.tokenizer(kind)
  assert loaded.fingerprint == fresh.fingerprint
  assert loaded.eos_id == 1
  for text in (*examples.TEXTS, 'é <eos>'):
    np.testing.assert_array_equal(
      loaded.encode(text.encode()), fresh.encode(text.encode())
    )


def test_an_existing_tokenizer_is_not_trained_again(tmp_path):
  folder = os.fspath(tmp_path / 'byte_level')
  vocabulary.train('byte_level', examples.TEXTS, 340, folder)
  before = os.stat(os.path.join(folder, 'tokenizer.json')).st_mtime_ns
  vocabulary.train('byte_level', [], 340, folder)
  after = os.stat(os.path.join(folder, 'tokenizer.json')).st_mtime_ns
  assert before == after


def test_the_two_kinds_split_digits_differently():
  byte_level = examples.tokenizer('byte_level')
  sentencepiece = examples.tokenizer('sentencepiece')
  assert sentencepiece.encode(b' 13').shape == (3,)  # Single digits.
  assert byte_level.encode(b' 13').shape == (1,)


def test_the_error_for_an_unknown_kind_suggests_the_nearest():
  with pytest.raises(checks.InputError, match="Did you mean 'sentencepiece'"):
    vocabulary.train('sentencepieces', [], 340, '/nowhere')


@pytest.mark.parametrize('kind', vocabulary.KINDS)
def test_training_is_deterministic(kind):
  trained = {
    vocabulary.KINDS[kind](examples.TEXTS * 20, 340).to_str() for _ in range(4)
  }
  assert len(trained) == 1
