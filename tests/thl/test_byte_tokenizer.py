import os

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers

from mrl_jax import checks
from mrl_jax.thl import byte_tokenizer
from tests import examples

BYTE_LEVEL, SENTENCEPIECE = (
  examples.tokenizer('byte_level'),
  examples.tokenizer('sentencepiece'),
)
BOTH = pytest.mark.parametrize(
  'tokenizer', [BYTE_LEVEL, SENTENCEPIECE], ids=['byte_level', 'sentencepiece']
)


@BOTH
@given(payload=st.one_of(st.binary(), st.text().map(str.encode)))
def test_any_bytes_round_trip(tokenizer, payload):
  if '\u2581'.encode() in payload and tokenizer is SENTENCEPIECE:
    return  # SentencePiece writes a space as this character.
  ids = tokenizer.encode(payload)
  assert tokenizer.decode(ids) == payload
  assert tokenizer.byte_length_V[ids].sum() == len(payload)


@BOTH
def test_what_a_vocabulary_cannot_hold_shows_in_the_round_trip(tokenizer):
  payload = 'a\u2581b'.encode()
  changed = tokenizer.decode(tokenizer.encode(payload)) != payload
  assert changed == (tokenizer is SENTENCEPIECE)


@BOTH
@pytest.mark.parametrize(
  'text',
  ['<eos>', '<pad>', '<<eos>>', 'a<eos><eos>b', '<unk>', '<0x0A>', '<0xAA>'],
)
def test_text_never_becomes_a_control_token(tokenizer, text):
  ids = tokenizer.encode(text.encode())
  assert tokenizer.eos_id not in ids
  assert tokenizer.decode(ids) == text.encode()
  assert tokenizer.eos_id not in tokenizer.encode_prompt(text)


@BOTH
def test_control_tokens_have_no_bytes(tokenizer):
  assert tokenizer.token_bytes[tokenizer.eos_id] == b''
  assert tokenizer.byte_length_V[tokenizer.eos_id] == 0


@BOTH
def test_every_byte_has_a_token(tokenizer):
  assert {bytes([b]) for b in range(256)} <= set(tokenizer.token_bytes)


def llama2_like():
  """BPE with byte fallback that puts a space before all text."""
  bytes_ = {f'<0x{b:02X}>': b + 3 for b in range(256)}
  vocab = {'<unk>': 0, '<s>': 1, '</s>': 2, **bytes_, '\u2581': 259, 'h': 260}
  backend = tokenizers.Tokenizer(
    models.BPE(
      {**vocab, 'i': 261, 'hi': 262, '\u2581hi': 263},
      [('h', 'i'), ('\u2581', 'hi')],
      unk_token='<unk>',
      byte_fallback=True,
      fuse_unk=True,
    )
  )
  backend.normalizer = normalizers.Sequence(
    [normalizers.Prepend('\u2581'), normalizers.Replace(' ', '\u2581')]
  )
  backend.decoder = decoders.Sequence(
    [
      decoders.Replace('\u2581', ' '),
      decoders.ByteFallback(),
      decoders.Fuse(),
      decoders.Strip(' ', 1, 0),
    ]
  )
  backend.add_special_tokens(['<unk>', '<s>', '</s>'])
  return byte_tokenizer.ByteTokenizer(backend, eos_id=2, bos_id=1)


def test_a_response_is_encoded_without_the_space_before_all_text():
  tokenizer = llama2_like()
  np.testing.assert_array_equal(tokenizer.encode(b'hi'), [262])
  np.testing.assert_array_equal(tokenizer.encode(b' hi'), [263])
  np.testing.assert_array_equal(tokenizer.encode_prompt('hi'), [1, 263])
  assert tokenizer.decode(tokenizer.encode(b'  hi\n')) == b'  hi\n'


def test_fingerprints_tell_tokenizers_apart():
  assert BYTE_LEVEL.fingerprint == examples.tokenizer('byte_level').fingerprint
  assert len({BYTE_LEVEL.fingerprint, SENTENCEPIECE.fingerprint}) == 2
  backend = tokenizers.Tokenizer.from_str(BYTE_LEVEL._start.to_str())
  other_end = byte_tokenizer.ByteTokenizer(backend, eos_id=0)
  assert other_end.fingerprint != BYTE_LEVEL.fingerprint


def test_an_unknown_kind_of_tokenizer_is_refused():
  backend = tokenizers.Tokenizer(models.WordLevel({'a': 0}, unk_token='a'))
  backend.pre_tokenizer = pre_tokenizers.Whitespace()
  with pytest.raises(checks.InputError, match='byte-level and SentencePiece'):
    byte_tokenizer.ByteTokenizer(backend, eos_id=0)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
  with pytest.raises(checks.InputError, match='no tokenizer could be loaded'):
    byte_tokenizer.load(os.fspath(tmp_path))
