import functools
import json
import os
import pathlib

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import msgspec
import numpy as np
import pytest

from mrl_jax import records
from mrl_jax.see import wire
from mrl_jax.thl import byte_tokenizer
from mrl_jax.thl import transfer
from tests import examples
from tests import vocabularies

BYTE_LEVEL, SENTENCEPIECE = (
  examples.tokenizer('byte_level'),
  examples.tokenizer('sentencepiece'),
)


def move(rollout, receiver, max_tokens=64, **limits):
  residual = transfer.Residual()
  limits = transfer.Limits(max_tokens=max_tokens, **limits)
  moved = transfer.transfer(rollout, receiver, limits, residual)
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


def test_a_budget_refuses_what_has_too_few_boundaries_in_common():
  # Half of the receiver's eight boundaries are the sender's.
  sent = examples.rollout(b'= 10 = 13', finish='length', encoder=BYTE_LEVEL)
  assert move(sent, SENTENCEPIECE, max_residual=0.5)[0] is not None
  moved, residual = move(sent, SENTENCEPIECE, max_residual=0.49)
  assert moved is None
  assert residual.refused == {'residual': 1}
  # The other way every boundary of the receiver is one.
  back = examples.rollout(b'= 10 = 13', encoder=SENTENCEPIECE)
  assert move(back, BYTE_LEVEL, max_residual=0.0)[0] is not None


# Where the receivers named can only refuse; the others carry every byte.
CASES = {
  'emoji in several tokens': (
    '👩\u200d👩\u200d👧 👍🏽',
    {'wordpiece', 'characters'},
  ),
  'han and hangul': ('漢字 한글', {'wordpiece', 'characters'}),
  'lone spaces': ('  =  1 ', {'wordpiece'}),
  'not NFC: cafe, angstrom': (
    'cafe\u0301 \u212b',
    {'byte_level_nfc', 'byte_level_nfkc', 'wordpiece', 'characters'},
  ),
  'not NFC: hangul in parts': (
    '\u1112\u1161\u11ab',
    {'byte_level_nfc', 'byte_level_nfkc', 'wordpiece', 'characters'},
  ),
  'NFKC changes what it means': (
    'x² ½ ① ﬁ',
    {'byte_level_nfkc', 'wordpiece', 'characters'},
  ),
  'what stands for a space': (
    'a\u2581b',
    {'sentencepiece', 'llama2_like', 'unigram', 'wordpiece', 'characters'},
  ),
  'what stands for a byte': ('<0x0A>', {'wordpiece', 'characters'}),
  'control tokens': (
    '<eos></s><s><pad>[SEP]<|im_end|>',
    {'wordpiece', 'characters'},
  ),
  'a replacement character': ('a\ufffdb', {'wordpiece', 'characters'}),
  'spaces that are cleaned up': ('x != y , z .', {'wordpiece', 'characters'}),
  'nul, line ends, byte-order mark': (
    '\x00\r\n\ufeff\n',
    {'wordpiece', 'characters'},
  ),
  'digits': (' 2 10 13', set()),
}


@pytest.mark.parametrize('receiver', sorted(vocabularies.KINDS))
@pytest.mark.parametrize('case', CASES)
def test_cases(case, receiver):
  text, refuse = CASES[case]
  payload = text.encode()
  sent = examples.rollout(payload, encoder=BYTE_LEVEL)
  tokenizer = tokenizer_of(receiver)
  moved, residual = move(sent, tokenizer, 200)
  assert residual.refused == ({'round_trip': 1} if receiver in refuse else {})
  if moved is None:
    return
  assert tokenizer.decode(moved.ids) == payload
  assert moved.ids.tolist().count(tokenizer.eos_id) == 1
  np.testing.assert_allclose(
    moved.behaviour_logp.sum(), sent.policy_logp.sum(), rtol=1e-5
  )


tokenizer_of = functools.cache(lambda kind: vocabularies.KINDS[kind]())


@pytest.mark.parametrize('receiver', ['byte_level', 'sentencepiece', 'unigram'])
def test_a_response_cut_inside_a_character(receiver):
  payload = '漢'.encode()[:2]
  sent = examples.rollout(payload, finish='length', encoder=SENTENCEPIECE)
  moved, _ = move(sent, tokenizer_of(receiver))
  assert tokenizer_of(receiver).decode(moved.ids) == payload


def test_a_control_token_in_the_middle_loses_nothing_after_it():
  sent = examples.rollout(b'= 13', encoder=BYTE_LEVEL)
  pad = 0
  middle = msgspec.structs.replace(
    sent,
    ids=np.insert(sent.ids, 1, pad),
    byte_lengths=np.insert(sent.byte_lengths, 1, 0),
    policy_logp=np.insert(sent.policy_logp, 1, -3.0),
    sampling_logp=np.insert(sent.sampling_logp, 1, -3.0),
  )
  assert records.fault(middle) is None
  moved, _ = move(middle, SENTENCEPIECE)
  assert SENTENCEPIECE.decode(moved.ids) == b'= 13'
  # It is in the chunk of the token before it.
  np.testing.assert_allclose(
    moved.behaviour_logp[0], sent.policy_logp[0] - 3.0, rtol=1e-6
  )
  np.testing.assert_allclose(
    moved.behaviour_logp.sum(), middle.policy_logp.sum(), rtol=1e-6
  )


def test_a_very_long_response():
  sent = examples.rollout(b'= 10 = 13' * 25_000, encoder=BYTE_LEVEL)
  moved, residual = move(sent, SENTENCEPIECE, 10**6)
  assert residual.sender_tokens == len(sent.ids) > 100_000 - 1
  np.testing.assert_allclose(
    moved.behaviour_logp.sum(dtype=np.float64),
    sent.policy_logp.sum(dtype=np.float64),
    rtol=1e-5,
  )


def check_any(sender, receiver, payload):
  """What must hold of what a policy writes, for any receiver."""
  written = sender.decode(sender.encode(payload))
  sent = msgspec.structs.replace(
    examples.rollout(payload, encoder=sender), payload=written
  )
  assert records.fault(sent) is None
  before = wire.encode([sent])
  moved, residual = move(sent, receiver, 10**6)
  assert wire.encode([sent]) == before
  assert residual.rollouts == 1
  if moved is None:
    assert residual.refused == {'round_trip': 1}
    assert receiver.decode(receiver.encode(written)) != written
    return
  assert receiver.decode(moved.ids) == written
  assert len(moved.ids) == len(moved.chunk) == len(moved.behaviour_logp)
  assert sum(residual.chunks.values()) == moved.chunk[-1] + 1
  np.testing.assert_allclose(
    moved.behaviour_logp.sum(dtype=np.float64),
    sent.policy_logp.sum(dtype=np.float64),
    rtol=1e-6,
    atol=1e-6,
  )


PAYLOADS = st.one_of(
  st.binary(max_size=60),
  st.text(max_size=40).map(str.encode),
  st.text(' \u2581=<>/s0x1A|[]UNK', max_size=40).map(str.encode),
)
PAIRS = st.tuples(*[st.sampled_from(sorted(vocabularies.KINDS))] * 2)


@given(pair=PAIRS, payload=PAYLOADS)
def test_anything_between_any_two(pair, payload):
  check_any(*map(tokenizer_of, pair), payload)


@pytest.mark.slow
@settings(max_examples=20_000, deadline=None)
@given(pair=PAIRS, payload=PAYLOADS)
def test_very_much_between_any_two(pair, payload):
  check_any(*map(tokenizer_of, pair), payload)


@pytest.mark.slow
@pytest.mark.parametrize('names', [('llama3', 'llama2'), ('llama2', 'llama3')])
def test_every_solution_of_gsm8k_crosses_real_tokenizers(names):
  folder = os.environ.get('MRL_TEST_DATA')
  if not folder:
    pytest.skip('MRL_TEST_DATA does not name a folder of real data')
  data = pathlib.Path(folder)
  sender, receiver = (
    byte_tokenizer.load(os.fspath(data / 'tokenizers' / name)) for name in names
  )
  residual = transfer.Residual()
  lines = (data / 'math' / 'gsm8k_test.jsonl').read_text().splitlines()
  for line in lines:
    payload = json.loads(line)['answer'].encode()
    sent = examples.rollout(payload, encoder=sender)
    assert records.fault(sent) is None
    limits = transfer.Limits(max_tokens=10**6)
    moved = transfer.transfer(sent, receiver, limits, residual)
    assert receiver.decode(moved.ids) == payload
    np.testing.assert_allclose(
      moved.behaviour_logp.sum(), sent.policy_logp.sum(), rtol=1e-5
    )
  assert residual.rollouts == len(lines) == 1319
  assert residual.refused == {}


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
