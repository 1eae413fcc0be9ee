"""Both sides of a rollout write the same bytes, in tokens fit to be shown."""

import hypothesis
from hypothesis import strategies as st
import msgspec
import numpy as np
import pytest

from mrl_jax import checks
from mrl_jax.analysis import alignment
from mrl_jax.thl import transfer
from tests import examples

TOKENIZERS = BYTE_LEVEL, SENTENCEPIECE = (
  examples.tokenizer('byte_level'),
  examples.tokenizer('sentencepiece'),
)
LIMITS = transfer.Limits(max_tokens=1000)
TEXT = b'sort 7 0 2\n= 0 2 7'
PAYLOADS = (b'= 10 = 13', b'top score\n= 9', ' ≈ 3\\␣∎'.encode(), b'\xe2\x89')


def test_both_sides_write_the_same_bytes():
  rollout = examples.rollout(TEXT, encoder=BYTE_LEVEL)
  both = sent, carried = alignment.sides(rollout, SENTENCEPIECE, LIMITS)
  for side, ids, encoder in (
    (sent, rollout.ids, BYTE_LEVEL),
    (carried, SENTENCEPIECE.encode(TEXT), SENTENCEPIECE),
  ):
    pieces = [encoder.token_bytes[i].decode() for i in ids]
    shown = [p.replace(' ', '␣').replace('\n', '\\n') for p in pieces if p]
    assert side.tokens == [*shown, '∎']
    assert side.lengths.tolist() == [*map(len, filter(None, pieces)), 1]
  sums = [np.bincount(side.chunk, side.logp) for side in both]
  np.testing.assert_allclose(*sums, rtol=1e-6)
  np.testing.assert_array_equal(sent.logp, rollout.sampling_logp)
  # The rollout itself is unchanged.
  assert rollout.byte_lengths[-1] == 0


def test_tokens_of_untrusted_bytes_are_printable():
  rollout = examples.rollout('é\u202e\x1b'.encode(), finish='length')
  sent, _ = alignment.sides(rollout, SENTENCEPIECE, LIMITS)
  assert sent.tokens == ['\\xc3', '\\xa9', '\\xe2', '\\x80', '\\xae', '\\x1b']
  assert sent.lengths.sum() == len(rollout.payload)


def test_a_refused_rollout_has_no_sides():
  rollout = examples.rollout(TEXT, encoder=BYTE_LEVEL)
  with pytest.raises(checks.InputError, match='refused: too_long'):
    alignment.sides(rollout, SENTENCEPIECE, transfer.Limits(max_tokens=2))


@hypothesis.settings(max_examples=50)
@hypothesis.given(st.lists(st.binary() | st.text().map(str.encode), min_size=1))
@hypothesis.example(tokens=[b'\x1b[31m', b'\xe2', b'\x89\x88', b' \\x20', b''])
@hypothesis.example(tokens=['␣∎∅\u202e\u0301\x85'.encode(), b'\x85', b'\r\n'])
def test_different_bytes_are_shown_differently_and_without_control(tokens):
  rollout = examples.rollout(b''.join(tokens), finish='length')
  shown = alignment.visible(rollout, [len(token) for token in tokens])
  assert [examples.read_back(text) for text in shown] == tokens
  assert all(text.isprintable() and ' ' not in text for text in shown)


def byte_ends(lengths):
  return {*np.cumsum(lengths).tolist()}


@pytest.mark.parametrize('payload', PAYLOADS)
@pytest.mark.parametrize('finish', ['stop', 'stop_string', 'length'])
@pytest.mark.parametrize('sender', TOKENIZERS, ids=['byte', 'sentencepiece'])
def test_chunks_lie_between_common_boundaries_and_keep_sums(
  sender, finish, payload
):
  (receiver,) = (t for t in TOKENIZERS if t is not sender)
  rollout = examples.rollout(payload, finish=finish, encoder=sender)
  chunks = alignment.chunks(rollout, receiver, LIMITS)
  carried = receiver.byte_length_V[receiver.encode(payload)]
  common = byte_ends(rollout.byte_lengths) & byte_ends(carried)
  assert len(chunks) == len(common) + (finish == 'stop')
  total = rollout.sampling_logp.sum(dtype=float)
  assert sum(c.sent_logp for c in chunks) == pytest.approx(total)
  for c in chunks:
    assert c.sent_logp == pytest.approx(c.carried_logp, abs=1e-5)
  if finish == 'stop':
    assert chunks.pop()[:3] == ('∎', ['∎'], ['∎'])
  for c in chunks:
    for side in (c.sent, c.carried):
      parts = map(examples.read_back, side)
      assert examples.read_back(c.text) == b''.join(parts)
  assert b''.join(examples.read_back(c.text) for c in chunks) == payload


def test_between_equal_tokenizers_every_token_is_a_chunk():
  control = next(
    i for i, b in enumerate(BYTE_LEVEL.token_bytes)
    if not b and i != BYTE_LEVEL.eos_id
  )  # fmt: skip
  ids = [*BYTE_LEVEL.encode(b'= 9'), control, BYTE_LEVEL.eos_id]
  rollout = msgspec.structs.replace(
    examples.rollout(b'= 9', encoder=BYTE_LEVEL),
    ids=np.array(ids, np.int32),
    byte_lengths=BYTE_LEVEL.byte_length_V[ids],
    sampling_logp=-np.arange(len(ids), dtype=np.float32),
    mask=np.ones(len(ids), bool),
  )
  chunks = alignment.chunks(rollout, BYTE_LEVEL, LIMITS)
  assert len(chunks) == len(ids)
  assert [c[:3] for c in chunks[-2:]] == [('∅', ['∅'], ['∅']),
                                          ('∎', ['∎'], ['∎'])]  # fmt: skip
  assert [c.carried_logp for c in chunks] == [*rollout.sampling_logp]
