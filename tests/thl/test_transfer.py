import msgspec
import numpy as np
import pytest

from mrl_jax.thl import transfer
from tests import examples

BYTE_LEVEL, SENTENCEPIECE = (
  examples.tokenizer('byte_level'),
  examples.tokenizer('sentencepiece'),
)


def move(rollout, receiver, max_tokens=64):
  residual = transfer.Residual()
  moved = transfer.transfer(rollout, receiver, max_tokens, residual)
  return moved, residual


@pytest.mark.parametrize(
  'payload', [b'= 10 = 13', b'', b'\xff= 1', 'é 漢'.encode()]
)
@pytest.mark.parametrize('finish', ['stop', 'length'])
def test_bytes_and_log_probability_are_conserved(payload, finish):
  if not payload and finish == 'length':
    return
  sent = examples.rollout(payload, finish=finish, encoder=BYTE_LEVEL)
  before = [x.copy() for x in (sent.ids, sent.byte_lengths, sent.policy_logp)]
  moved, residual = move(sent, SENTENCEPIECE)
  assert SENTENCEPIECE.decode(moved.ids) == payload
  assert (moved.ids[-1] == SENTENCEPIECE.eos_id) == (finish == 'stop')
  np.testing.assert_allclose(
    moved.behaviour_logp.sum(), sent.policy_logp.sum(), rtol=1e-6
  )
  assert residual.refused == {}
  after = (sent.ids, sent.byte_lengths, sent.policy_logp)
  for x, y in zip(before, after, strict=True):
    np.testing.assert_array_equal(x, y)


def test_end_of_sequence_is_aligned_with_end_of_sequence():
  sent = examples.rollout(b'= 13', encoder=BYTE_LEVEL)
  moved, _ = move(sent, SENTENCEPIECE)
  assert moved.chunk[-1] > moved.chunk[-2]
  np.testing.assert_allclose(moved.behaviour_logp[-1], sent.policy_logp[-1])


def test_packed_digits_become_a_chunk_of_several_tokens():
  sent = examples.rollout(b'= 10 = 13', finish='length', encoder=BYTE_LEVEL)
  assert [BYTE_LEVEL.token_bytes[i] for i in sent.ids] == [
    b'=', b' 10', b' =', b' 13',
  ]  # fmt: skip
  moved, residual = move(sent, SENTENCEPIECE)
  assert [SENTENCEPIECE.token_bytes[i] for i in moved.ids] == [
    b'=', b' ', b'1', b'0', b' =', b' ', b'1', b'3',
  ]  # fmt: skip
  np.testing.assert_array_equal(moved.chunk, [0, 1, 1, 1, 2, 3, 3, 3])
  for chunk, logp in enumerate(sent.policy_logp):
    total = moved.behaviour_logp[moved.chunk == chunk].sum()
    np.testing.assert_allclose(total, logp, rtol=1e-6)
  assert residual.chunks == {'1:1': 2, '1:n': 2, 'n:1': 0, 'n:m': 0}
  assert (residual.sender_tokens, residual.receiver_tokens) == (4, 8)
  assert residual.segmentation_error == pytest.approx(1 - 4 / 8)


def test_equal_tokenizers_keep_ids_that_encoding_would_not_give():
  # '= 10' sampled as bytes, where the tokenizer would have packed it.
  ids = np.array([BYTE_LEVEL.encode(bytes([b]))[0] for b in b'= 10'], np.int32)
  assert len(ids) > len(BYTE_LEVEL.encode(b'= 10'))
  sent = examples.rollout(b'= 10', finish='length', encoder=BYTE_LEVEL)
  sent = msgspec.structs.replace(
    sent,
    ids=ids,
    byte_lengths=np.ones(4, np.int32),
    policy_logp=-np.ones(4, np.float32),
    sampling_logp=-2 * np.ones(4, np.float32),
  )
  moved, _ = move(sent, BYTE_LEVEL)
  np.testing.assert_array_equal(moved.ids, ids)
  np.testing.assert_array_equal(moved.behaviour_logp, -1)
  np.testing.assert_array_equal(moved.chunk, np.arange(4))


@pytest.mark.parametrize(
  ('payload', 'finish', 'max_tokens', 'reason'),
  [
    ('a\u2581b'.encode(), 'stop', 64, 'round_trip'),
    (b'= 10 = 13', 'stop', 5, 'too_long'),
    (b'', 'length', 64, 'empty'),
  ],
)
def test_every_refusal_has_a_reason(payload, finish, max_tokens, reason):
  sent = examples.rollout(payload, finish=finish, encoder=BYTE_LEVEL)
  moved, residual = move(sent, SENTENCEPIECE, max_tokens)
  assert moved is None
  assert residual.refused == {reason: 1}
  assert residual.rollouts == 1
  assert (residual.sender_tokens, residual.chunks) == (0, {})


@pytest.mark.parametrize(
  'ids', [[10**6, 1], [5, 1], [0, 0, 0, 0, 0, 0]], ids=['far', 'other', 'none']
)
def test_ids_of_an_equal_tokenizer_that_are_not_its_bytes(ids):
  sent = examples.rollout(b'= 13', encoder=BYTE_LEVEL)
  lying = msgspec.structs.replace(sent, ids=np.array(ids, np.int32))
  moved, residual = move(lying, BYTE_LEVEL)
  assert moved is None
  assert residual.refused == {'ids': 1}


def test_residuals_add_up():
  total = transfer.Residual()
  for payload in (b'= 10', b'a\xe2\x96\x81', b'= 13'):
    _, residual = move(
      examples.rollout(payload, encoder=BYTE_LEVEL), SENTENCEPIECE
    )
    total.add(residual)
  assert total.rollouts == 3
  assert total.refused == {'round_trip': 1}
  # '= 10' is two tokens and four, and so is '= 13'; each has an end.
  assert (total.sender_tokens, total.receiver_tokens) == (6, 10)
  assert sum(total.chunks.values()) == 6
