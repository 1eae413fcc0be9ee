import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from mrl_jax import checks
from mrl_jax.analysis import alignment as sides
from mrl_jax.thl import transfer
from tests import examples

BYTE_LEVEL, SENTENCEPIECE = (
  examples.tokenizer('byte_level'),
  examples.tokenizer('sentencepiece'),
)
LIMITS = transfer.Limits(max_tokens=1000)
TEXT = b'sort 7 0 2\n= 0 2 7'


def test_both_sides_write_the_same_bytes():
  rollout = examples.rollout(TEXT, encoder=BYTE_LEVEL)
  sent, carried = sides.sides(rollout, SENTENCEPIECE, LIMITS)
  for one, ids, encoder in (
    (sent, rollout.ids, BYTE_LEVEL),
    (carried, SENTENCEPIECE.encode(TEXT), SENTENCEPIECE),
  ):
    pieces = [encoder.token_bytes[i].decode() for i in ids]
    shown = [p.replace(' ', '␣').replace('\n', '\\n') for p in pieces if p]
    assert one.tokens == [*shown, '∎']
    assert one.lengths.tolist() == [*map(len, filter(None, pieces)), 1]
  for chunk in range(sent.chunk[-1] + 1):
    texts = [
      ''.join(np.array(one.tokens)[one.chunk == chunk])
      for one in (sent, carried)
    ]
    assert texts[0] == texts[1]
  sums = [np.bincount(one.chunk, one.logp) for one in (sent, carried)]
  np.testing.assert_allclose(*sums, rtol=1e-6)
  np.testing.assert_array_equal(sent.logp, rollout.policy_logp)
  # The rollout is as it was.
  assert rollout.byte_lengths[-1] == 0


def test_tokens_of_untrusted_bytes_are_fit_to_be_shown():
  rollout = examples.rollout('é\u202e\x1b'.encode(), finish='length')
  sent, _ = sides.sides(rollout, SENTENCEPIECE, LIMITS)
  assert sent.tokens == ['\\xc3', '\\xa9', '\\xe2', '\\x80', '\\xae', '\\x1b']
  assert sent.lengths.sum() == len(rollout.payload)


def test_equal_tokenizers_have_a_chunk_for_each_token():
  rollout = examples.rollout(TEXT, encoder=BYTE_LEVEL)
  sent, carried = sides.sides(rollout, BYTE_LEVEL, LIMITS)
  assert sent.tokens == carried.tokens
  np.testing.assert_array_equal(sent.chunk, np.arange(len(rollout.ids)))
  np.testing.assert_array_equal(carried.logp, rollout.policy_logp)


def test_a_refused_rollout_has_no_sides():
  rollout = examples.rollout(TEXT, encoder=BYTE_LEVEL)
  with pytest.raises(checks.InputError, match='refused: too_long'):
    sides.sides(rollout, SENTENCEPIECE, transfer.Limits(max_tokens=2))


@hypothesis.given(st.lists(st.binary() | st.text().map(str.encode), min_size=1))
@hypothesis.example(tokens=[b'\x1b[31m', b'\xe2', b'\x89\x88', b' \\x20', b''])
@hypothesis.example(tokens=['␣∎∅\u202e\u0301\x85'.encode(), b'\x85', b'\r\n'])
def test_tokens_are_shown_in_one_way_and_without_control(tokens):
  rollout = examples.rollout(b''.join(tokens), finish='length')
  shown = sides.visible(rollout, [len(t) for t in tokens])
  assert [examples.read_back(text) for text in shown] == tokens
  assert all(text.isprintable() and ' ' not in text for text in shown)
