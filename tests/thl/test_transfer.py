import json
import os
import pathlib
import time

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
from tests.thl import references

BYTE_LEVEL, SENTENCEPIECE = (
  examples.tokenizer('byte_level'),
  examples.tokenizer('sentencepiece'),
)


def move(rollout, receiver, max_tokens=64, **limits):
  residual = transfer.Residual()
  limits = transfer.Limits(max_tokens=max_tokens, **limits)
  moved = transfer.transfer(rollout, receiver, limits, residual)
  return moved, residual


def sampled(encoder, ids, **changes):
  """A rollout of a policy that sampled these ids."""
  ids = np.array(ids, np.int32)
  logp = -np.arange(1, len(ids) + 1, dtype=np.float32) / 8
  stopped = bool(len(ids)) and ids[-1] == encoder.eos_id
  fields = {
    'payload': encoder.decode(ids),
    'finish': 'stop' if stopped else 'length',
    'ids': ids,
    'byte_lengths': encoder.byte_length_V[ids],
    'sampling_logp': logp,
    'policy_logp': 2 * logp,
    'mask': np.ones(len(ids), bool),
  }
  return msgspec.structs.replace(
    examples.rollout(encoder=encoder), **{**fields, **changes}
  )


def checked_move(sent, sender, receiver):
  """Transfers a rollout, and checks what holds for every rollout."""
  assert records.fault(sent) is None
  before = wire.encode([sent])
  moved, residual = move(sent, receiver, 10**6)
  assert wire.encode([sent]) == before
  size = len(sent.payload)
  assert (residual.rollouts, residual.payload_bytes) == (1, size)
  if moved is None:
    (reason,) = residual.refused
    assert residual.refused == {reason: 1}
    assert residual.refused_bytes == {reason: size}
    if reason == 'empty':
      assert not size
      assert sent.finish == 'length'
    else:
      assert reason == 'round_trip'
      assert receiver.decode(receiver.encode(sent.payload)) != sent.payload
  elif sender.fingerprint == receiver.fingerprint:
    np.testing.assert_array_equal(moved.ids, sent.ids)
    np.testing.assert_array_equal(moved.behaviour_logp, sent.sampling_logp)
    np.testing.assert_array_equal(moved.mask, sent.mask)
  else:
    check_alignment(sent, sender, receiver, moved, residual)
    check_way_back(sent, sender, receiver, moved)
  return moved, residual


def test_many_rollouts_are_transferred_as_each_by_itself():
  """Among them are refused ones, and ones that need no encoding."""
  receiver = examples.tokenizer('sentencepiece')
  kinds = ('byte_level', 'sentencepiece', 'byte_level')
  sent = [
    examples.rollout(payload, encoder=examples.tokenizer(kind), finish=finish)
    for payload in (b'= 13', b'', b'= 1 2 3 4 5 6 7 8 9', b'so = 4')
    for kind, finish in zip(kinds, ('stop', 'stop', 'length'), strict=True)
  ]
  limits = transfer.Limits(max_tokens=12)
  one, two, residual = transfer.Residual(), transfer.Residual(), []
  residuals = [two if i % 3 else one for i in range(len(sent))]
  moved = transfer.transfer_all(
    zip(sent, residuals, strict=True), receiver, limits
  )
  found = [*moved]
  for own in (one, two):
    alone = transfer.Residual()
    for rollout, of, many in zip(sent, residuals, found, strict=True):
      if of is own:
        single = transfer.transfer(rollout, receiver, limits, alone)
        assert (single is None) == (many is None)
        if single:
          for name, array in vars(single).items():
            np.testing.assert_array_equal(array, getattr(many, name))
    assert alone == own
    residual.append(own)
  assert residual[0].rollouts == 4
  assert residual[1].refused == {'empty': 1, 'too_long': 2}


def check_alignment(sent, sender, receiver, moved, residual):
  """Compares with the bytes, and with the alignment token by token."""
  assert receiver.decode(moved.ids) == sent.payload
  stopped = sent.finish == 'stop'
  assert (receiver.eos_id in moved.ids) == stopped
  from_lengths, to_lengths = (
    tokenizer.byte_length_V[ids]
    for tokenizer, ids in ((sender, sent.ids), (receiver, moved.ids))
  )
  assert from_lengths.sum() == to_lengths.sum() == len(sent.payload)
  if stopped:
    assert moved.ids[-1] == receiver.eos_id
    from_lengths[-1] = to_lengths[-1] = 1
  assert residual.specials_dropped == (from_lengths == 0).sum()
  from_chunk, to_chunk = references.chunks(from_lengths, to_lengths)
  np.testing.assert_array_equal(moved.chunk, to_chunk)
  count = moved.chunk[-1] + 1
  assert sum(residual.chunks.values()) == count
  assert chunk_bytes(sender, sent.ids, from_chunk, count) == chunk_bytes(
    receiver, moved.ids, to_chunk, count
  )
  np.testing.assert_allclose(
    np.bincount(to_chunk, moved.behaviour_logp),
    np.bincount(from_chunk, sent.sampling_logp),
    rtol=1e-6,
    atol=1e-6,
  )
  lengths = from_lengths, to_lengths
  np.testing.assert_allclose(
    moved.behaviour_logp,
    references.extensive(sent.sampling_logp, *lengths),
    rtol=1e-6,
    atol=1e-6,
  )
  np.testing.assert_array_equal(
    moved.mask, references.mask(sent.mask, *lengths)
  )


def chunk_bytes(tokenizer, ids, chunk, count):
  """The bytes of every chunk."""
  parts = [b''] * count
  for i, c in zip(ids, chunk, strict=True):
    parts[c] += tokenizer.token_bytes[i]
  return parts


def check_way_back(sent, sender, receiver, moved):
  """The transfer back gives the same text, if its sender can encode it."""
  back, residual = move(sampled(receiver, moved.ids), sender, 10**6)
  if sender.decode(sender.encode(sent.payload)) == sent.payload:
    assert sender.decode(back.ids) == sent.payload
  else:
    assert residual.refused == {'round_trip': 1}


@pytest.mark.parametrize('finish', ['stop', 'length'])
def test_bytes_and_log_probabilities_are_conserved(finish):
  for payload in (b'= 10 = 13', b'', b'\xff= 1', 'é 漢'.encode()):
    sent = examples.rollout(payload, finish=finish, encoder=BYTE_LEVEL)
    _, residual = checked_move(sent, BYTE_LEVEL, SENTENCEPIECE)
    cut_off_at_once = not payload and finish == 'length'
    assert residual.refused == ({'empty': 1} if cut_off_at_once else {})


def test_a_rollout_that_a_stop_string_ended_crosses_as_its_bytes():
  sent = examples.rollout(
    b'= 10\n\n7', finish='stop_string', encoder=BYTE_LEVEL
  )
  for receiver in (SENTENCEPIECE, BYTE_LEVEL):
    moved, _ = checked_move(sent, BYTE_LEVEL, receiver)
    assert moved.ids.tolist() == receiver.encode(sent.payload).tolist()
    np.testing.assert_allclose(
      moved.behaviour_logp.sum(), sent.sampling_logp.sum(), rtol=1e-6
    )


def test_end_of_sequence_is_aligned_with_end_of_sequence():
  sent = examples.rollout(b'= 13', encoder=BYTE_LEVEL)
  moved, _ = move(sent, SENTENCEPIECE)
  assert moved.chunk[-1] > moved.chunk[-2]
  np.testing.assert_allclose(moved.behaviour_logp[-1], sent.sampling_logp[-1])


@pytest.mark.parametrize('end', [True, False])
def test_tokens_with_bytes_that_the_peer_masked_are_masked(end):
  # The peer's tokens '=', ' 10', ' =', ' 13' and the end; ' =' is masked.
  sent = examples.rollout(b'= 10 = 13', encoder=BYTE_LEVEL)
  sent = msgspec.structs.replace(
    sent, mask=np.array([True, True, False, True, end])
  )
  moved, _ = move(sent, SENTENCEPIECE)
  assert [SENTENCEPIECE.token_bytes[i] for i in moved.ids] == [
    b'=', b' ', b'1', b'0', b' =', b' ', b'1', b'3', b'',
  ]  # fmt: skip
  np.testing.assert_array_equal(moved.mask, [1, 1, 1, 1, 0, 1, 1, 1, end])
  assert moved.mask.dtype == bool
  same, _ = move(sent, BYTE_LEVEL)
  np.testing.assert_array_equal(same.mask, sent.mask)


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
  for chunk, logp in enumerate(sent.sampling_logp):
    total = moved.behaviour_logp[moved.chunk == chunk].sum()
    np.testing.assert_allclose(total, logp, rtol=1e-6)
  assert residual.chunks == {'1:1': 2, '1:n': 2, 'n:1': 0, 'n:m': 0}
  assert (residual.sender_tokens, residual.receiver_tokens) == (4, 8)
  assert residual.segmentation_error == pytest.approx(1 - 4 / 8)


def test_equal_tokenizers_keep_sampled_ids_that_are_not_canonical():
  # '= 10' sampled byte by byte, where encoding gives larger tokens.
  ids = np.array([BYTE_LEVEL.encode(bytes([b]))[0] for b in b'= 10'], np.int32)
  assert len(ids) > len(BYTE_LEVEL.encode(b'= 10'))
  sent = sampled(BYTE_LEVEL, ids)
  moved, _ = move(sent, BYTE_LEVEL)
  np.testing.assert_array_equal(moved.ids, ids)
  np.testing.assert_array_equal(moved.behaviour_logp, sent.sampling_logp)
  np.testing.assert_array_equal(moved.chunk, np.arange(4))


def test_log_probabilities_stay_with_the_bytes_of_sampled_tokens():
  # '= 10' and the end, sampled byte by byte, onto '=', ' 1', '0' and the end.
  ids = [BYTE_LEVEL.encode(bytes([b]))[0] for b in b'= 10']
  receiver = vocabularies.with_added('sentencepiece', ' 1')
  sent = sampled(BYTE_LEVEL, [*ids, BYTE_LEVEL.eos_id])
  moved, residual = move(sent, receiver)
  assert [receiver.token_bytes[i] for i in moved.ids] == [
    b'=', b' 1', b'0', b'',
  ]  # fmt: skip
  np.testing.assert_allclose(
    moved.behaviour_logp, np.array([-1, -2 - 3, -4, -5]) / 8
  )
  np.testing.assert_array_equal(moved.chunk, range(4))
  assert residual.chunks == {'1:1': 3, '1:n': 0, 'n:1': 1, 'n:m': 0}


@pytest.mark.parametrize(
  ('payload', 'finish', 'max_tokens', 'reason'),
  [
    ('a\u2581b'.encode(), 'stop', 64, 'round_trip'),
    (b'= 10 = 13', 'stop', 8, 'too_long'),
    (b'', 'length', 64, 'empty'),
  ],
)
def test_refusals_are_counted_with_their_reason(
  payload, finish, max_tokens, reason
):
  sent = examples.rollout(payload, finish=finish, encoder=BYTE_LEVEL)
  moved, residual = move(sent, SENTENCEPIECE, max_tokens)
  assert moved is None
  assert residual.refused == {reason: 1}
  assert residual.refused_bytes == {reason: len(payload)}
  assert (residual.rollouts, residual.payload_bytes) == (1, len(payload))
  assert (residual.sender_tokens, residual.chunks) == (0, {})
  accepted = move(sent, SENTENCEPIECE, max_tokens + 1)[0] is not None
  assert accepted == (reason == 'too_long')


@pytest.mark.parametrize(
  'ids', [[10**6, 1], [5, 1], [0, 0, 0, 0, 0, 0]], ids=['far', 'other', 'none']
)
def test_ids_of_an_equal_tokenizer_must_stand_for_the_payload(ids):
  sent = examples.rollout(b'= 13', encoder=BYTE_LEVEL)
  forged = msgspec.structs.replace(sent, ids=np.array(ids, np.int32))
  moved, residual = move(forged, BYTE_LEVEL)
  assert moved is None
  assert residual.refused == {'ids': 1}


@pytest.mark.parametrize(
  ('ids', 'finish'),
  [
    ([1, 5, 1], 'stop'),
    ([5, 1, 6], 'length'),
    ([5, 1], 'length'),
    ([5, 0], 'stop'),
    ([5, 1, 6], 'stop_string'),
  ],
  ids=[
    'two ends',
    'text after the end',
    'end but cut off',
    'not an end',
    'a string after the end',
  ],
)
def test_ids_of_an_equal_tokenizer_must_end_as_sampling_does(ids, finish):
  sent = sampled(BYTE_LEVEL, ids, finish=finish)
  assert records.fault(sent) is None
  moved, residual = move(sent, BYTE_LEVEL)
  assert moved is None
  assert residual.refused == {'ids': 1}
  assert residual.refused_bytes == {'ids': len(sent.payload)}


def test_a_rollout_may_end_with_any_stop_token():
  over = 0
  backend = vocabularies.copy(BYTE_LEVEL)
  receiver = byte_tokenizer.ByteTokenizer(backend, eos_id=1, stop_ids=(over,))
  sent = sampled(receiver, [5, 6, over], finish='stop')
  for moved_to in (receiver, BYTE_LEVEL, SENTENCEPIECE):
    moved = checked_move(sent, receiver, moved_to)[0]
    end = over if moved_to is receiver else moved_to.eos_id
    assert moved.ids[-1] == end
  for ids in ([5, over, 6, 1], [5, over, 1], [over, over]):
    sent = sampled(receiver, ids, finish='stop')
    assert move(sent, receiver)[1].refused == {'ids': 1}


def test_equal_tokenizers_keep_sampled_control_tokens():
  pad = 0
  sent = sampled(BYTE_LEVEL, [5, pad, 6, BYTE_LEVEL.eos_id])
  moved, residual = move(sent, BYTE_LEVEL)
  np.testing.assert_array_equal(moved.ids, sent.ids)
  np.testing.assert_array_equal(moved.behaviour_logp, sent.sampling_logp)
  assert residual.specials_dropped == 0


def test_a_budget_refuses_rollouts_with_few_common_boundaries():
  # Half of the receiver's eight boundaries are the sender's.
  sent = examples.rollout(b'= 10 = 13', finish='length', encoder=BYTE_LEVEL)
  assert move(sent, SENTENCEPIECE, max_residual=0.5)[0] is not None
  moved, residual = move(sent, SENTENCEPIECE, max_residual=0.49)
  assert moved is None
  assert residual.refused == {'residual': 1}
  # In the other direction, every boundary of the receiver is common.
  back = examples.rollout(b'= 10 = 13', encoder=SENTENCEPIECE)
  assert move(back, BYTE_LEVEL, max_residual=0.0)[0] is not None


LOSSY = {'wordpiece', 'characters'}  # They have an unknown token.
# Texts, and the receivers that cannot encode them and must refuse; the others
# transfer every byte.
CASES = {
  'emoji in several tokens': ('👩\u200d👩\u200d👧 👍🏽', LOSSY),
  'han and hangul': ('漢字 한글', LOSSY),
  'no space before': ('hi', {'wordpiece'}),
  'a space before': (' hi', set()),
  'two spaces before': ('  hi', {'wordpiece'}),
  'lone spaces': ('  =  1 ', {'wordpiece'}),
  'not NFC: cafe, angstrom': (
    'cafe\u0301 \u212b',
    {'byte_level_nfc', 'byte_level_nfkc', *LOSSY},
  ),
  'not NFC: hangul in parts': (
    '\u1112\u1161\u11ab',
    {'byte_level_nfc', 'byte_level_nfkc', *LOSSY},
  ),
  'NFKC changes the meaning': ('x² ½ ① ﬁ', {'byte_level_nfkc', *LOSSY}),
  'the character that stands for a space': (
    'a\u2581b',
    {'sentencepiece', 'llama2_like', 'unigram', *LOSSY},
  ),
  'the piece that stands for a byte': ('<0x0A>', LOSSY),
  'control tokens': ('<eos></s><s><pad>[SEP]<|im_end|>', LOSSY),
  'a replacement character': ('a\ufffdb', LOSSY),
  'spaces that are cleaned up': ('x != y , z .', LOSSY),
  'nul, line ends, byte-order mark': ('\x00\r\n\ufeff\n', LOSSY),
  'digits': (' 2 10 13', set()),
}


@pytest.mark.parametrize('case', CASES)
def test_text_is_transferred_whole_or_refused(case):
  text, refusing = CASES[case]
  ids = [*BYTE_LEVEL.encode(text.encode()), BYTE_LEVEL.eos_id]
  sent = sampled(BYTE_LEVEL, ids)
  for receiver in vocabularies.KINDS:
    moved, residual = checked_move(
      sent, BYTE_LEVEL, vocabularies.tokenizer(receiver)
    )
    refused = {'round_trip': 1} if receiver in refusing else {}
    assert (residual.refused, moved is None) == (refused, bool(refused)), (
      receiver
    )


WITH_ALL_BYTES = pytest.mark.parametrize(
  'receiver', ['byte_level', 'sentencepiece', 'llama2_like', 'unigram']
)


@WITH_ALL_BYTES
def test_a_response_may_be_cut_inside_a_character(receiver):
  for text in map(str.encode, ('漢', '= é', '👍🏽', '\ufffd漢')):
    for end in range(1, len(text)):
      sent = sampled(SENTENCEPIECE, SENTENCEPIECE.encode(text[:end]))
      assert sent.payload == text[:end]
      moved, _ = checked_move(
        sent, SENTENCEPIECE, vocabularies.tokenizer(receiver)
      )
      assert moved is not None


@pytest.mark.parametrize('receiver', sorted(LOSSY))
def test_a_character_in_parts_is_refused_by_receivers_without_bytes(receiver):
  sent = sampled(BYTE_LEVEL, BYTE_LEVEL.encode(b'= 1\xe6\xbc'))
  moved, residual = checked_move(
    sent, BYTE_LEVEL, vocabularies.tokenizer(receiver)
  )
  assert moved is None
  assert residual.refused_bytes == {'round_trip': 5}


@pytest.mark.parametrize('control', ['<|im_end|>', '<｜end▁of▁sentence｜>'])
def test_a_control_token_in_the_middle_loses_nothing_after_it(control):
  sender = vocabularies.with_added('byte_level', control, special=True)
  first, *rest = sender.encode(b'= 13')
  middle = sender.vocab_size - 1
  sent = sampled(sender, [first, middle, middle, *rest, sender.eos_id])
  assert sent.payload == b'= 13'
  moved, residual = checked_move(sent, sender, SENTENCEPIECE)
  # The control tokens are in the chunk of the token before them.
  np.testing.assert_allclose(moved.behaviour_logp[0], -(1 + 2 + 3) / 8)
  np.testing.assert_allclose(
    moved.behaviour_logp.sum(), sent.sampling_logp.sum(), rtol=1e-6
  )
  assert residual.specials_dropped == 2
  # End-of-sequence is transferred, not dropped.
  _, residual = move(examples.rollout(encoder=sender), SENTENCEPIECE)
  assert residual.specials_dropped == 0


@WITH_ALL_BYTES
def test_a_control_token_of_the_receiver_is_text_of_the_sender(receiver):
  control = '<｜end▁of▁sentence｜>'
  tokenizer = vocabularies.with_added(receiver, control, special=True)
  for space in '▁ ':
    payload = f'= 1{control.replace("▁", space)}3'.encode()
    sent = sampled(BYTE_LEVEL, BYTE_LEVEL.encode(payload))
    moved, _ = checked_move(sent, BYTE_LEVEL, tokenizer)
    # Only byte-level BPE can write the character that stands for a space.
    assert (moved is None) == (receiver != 'byte_level' and space == '▁')
    if moved is not None:
      assert tokenizer.byte_length_V[moved.ids].all()


def test_specials_of_a_refused_rollout_are_not_counted():
  pad = 0
  sent = sampled(BYTE_LEVEL, [pad, *BYTE_LEVEL.encode(b'= 10')])
  moved, residual = move(sent, SENTENCEPIECE, max_tokens=1)
  assert moved is None
  assert residual.specials_dropped == 0


@WITH_ALL_BYTES
@pytest.mark.parametrize('both', [True, False])
def test_an_added_token_that_is_not_special_is_transferred(receiver, both):
  sender = vocabularies.with_added('byte_level', '<think>')
  if both:
    receiver = vocabularies.with_added(receiver, '<think>')
  else:
    receiver = vocabularies.tokenizer(receiver)
  sent = sampled(sender, sender.encode(b'= <think>13'))
  think = sent.ids.tolist().index(sender.vocab_size - 1)
  moved, residual = checked_move(sent, sender, receiver)
  assert receiver.decode(moved.ids) == b'= <think>13'
  assert residual.specials_dropped == 0
  chunk_bytes = [receiver.token_bytes[i] for i in moved.ids]
  assert (b'<think>' in chunk_bytes) == both
  if both:
    at = chunk_bytes.index(b'<think>')
    np.testing.assert_allclose(
      moved.behaviour_logp[at], sent.sampling_logp[think]
    )
  # The same backwards, where the receiver may lack the added token.
  back, _ = checked_move(
    sampled(receiver, receiver.encode(b'= <think>13')), receiver, sender
  )
  assert sender.vocab_size - 1 in back.ids


@pytest.mark.parametrize(
  'receiver', ['byte_level', 'sentencepiece', 'unigram', 'wordpiece']
)
@pytest.mark.parametrize('piece', [b' 13', b'1'], ids=['words', 'one word'])
def test_a_very_long_response_takes_seconds(receiver, piece):
  ids = np.tile(BYTE_LEVEL.encode(piece), 100_000)
  sent = sampled(BYTE_LEVEL, [*ids, BYTE_LEVEL.eos_id])
  start = time.perf_counter()
  moved, residual = move(sent, vocabularies.tokenizer(receiver), 10**6)
  assert time.perf_counter() - start < 10
  if receiver == 'wordpiece' and piece == b'1':
    assert residual.refused_bytes == {'round_trip': 100_000}
    return
  assert residual.sender_tokens == 100_001
  np.testing.assert_allclose(
    moved.behaviour_logp.sum(dtype=np.float64),
    sent.sampling_logp.sum(dtype=np.float64),
    rtol=1e-5,
  )
  assert moved.mask.all()


PAYLOADS = st.one_of(
  st.binary(max_size=60),
  st.text(max_size=40).map(str.encode),
  st.text(' \u2581=<>/s0x1A|[]UNK', max_size=40).map(str.encode),
)
DRAWS = st.lists(st.integers(0, 2**16), max_size=30)
PAIRS = st.tuples(*[st.sampled_from(sorted(vocabularies.KINDS))] * 2)
MOVES = given(
  pair=PAIRS,
  written=st.one_of(PAYLOADS, DRAWS),
  stop=st.booleans(),
  seed=st.integers(0, 2**32 - 1),
)


def check_any(pair, written, stop, seed):
  """Transfers canonical ids of a payload, or any ids, between any two kinds."""
  sender, receiver = map(vocabularies.tokenizer, pair)
  if isinstance(written, bytes):
    ids = sender.encode(written)
  else:
    ids = np.array(written, np.int32) % sender.vocab_size
  ids = [*ids[ids != sender.eos_id], *[sender.eos_id] * stop]
  mask = np.random.default_rng(seed).random(len(ids)) < 0.8
  checked_move(sampled(sender, ids, mask=mask), sender, receiver)


@MOVES
def test_any_rollout_between_any_two_kinds(pair, written, stop, seed):
  check_any(pair, written, stop, seed)


@pytest.mark.slow
@settings(max_examples=8000, deadline=None)
@MOVES
def test_many_rollouts_between_any_two_kinds(pair, written, stop, seed):
  check_any(pair, written, stop, seed)


@pytest.mark.slow
@pytest.mark.parametrize('names', [('llama3', 'llama2'), ('llama2', 'llama3')])
def test_solutions_of_gsm8k_are_transferred_between_real_tokenizers(names):
  folder = os.environ.get('MRL_TEST_DATA')
  if not folder:
    pytest.skip('MRL_TEST_DATA does not name a folder of real data')
  data = pathlib.Path(folder)
  sender, receiver = (
    byte_tokenizer.load(os.fspath(data / 'tokenizers' / name)) for name in names
  )
  lines = (data / 'math' / 'gsm8k_test.jsonl').read_text().splitlines()
  assert len(lines) == 1319
  rng = np.random.default_rng(0)
  for line in lines:
    payload = json.loads(line)['answer'].encode()
    ids = [*sender.encode(payload), sender.eos_id]
    sent = sampled(sender, ids, mask=rng.random(len(ids)) < 0.8)
    assert sent.payload == payload
    moved, _ = checked_move(sent, sender, receiver)
    assert moved is not None


@pytest.mark.parametrize(
  ('payload', 'most', 'refused'),
  [
    (b'= 10 = 13', 9, {}),  # Eight tokens and end-of-sequence.
    (b'= 10 = 13', 8, {'too_long': 1}),
    (b'a\xe2\x96\x81', 20, {'round_trip': 1}),  # Stands for a space.
    (b'', 1, {}),  # Only the end-of-sequence.
  ],
)
def test_a_text_without_tokens_is_encoded_with_end_of_sequence(
  payload, most, refused
):
  residual = transfer.Residual()
  limits = transfer.Limits(max_tokens=most)
  (ids,) = transfer.encode_all([(payload, residual)], SENTENCEPIECE, limits)
  assert residual.refused == refused
  assert residual.refused_bytes == dict.fromkeys(refused, len(payload))
  assert (residual.rollouts, residual.payload_bytes) == (1, len(payload))
  assert (ids is None) == bool(refused)
  if ids is not None:
    assert ids.dtype == np.int32
    assert SENTENCEPIECE.decode(ids) == payload
    assert ids.tolist().index(SENTENCEPIECE.eos_id) == len(ids) - 1


def test_residuals_add_up():
  total = transfer.Residual()
  pad = 0
  for ids in (
    BYTE_LEVEL.encode(b'= 10'),
    BYTE_LEVEL.encode(b'a\xe2\x96\x81'),
    BYTE_LEVEL.encode(b'\xe2\x96\x81'),
    [pad, *BYTE_LEVEL.encode(b'= 13')],
  ):
    sent = sampled(BYTE_LEVEL, [*ids, BYTE_LEVEL.eos_id])
    total.add(move(sent, SENTENCEPIECE)[1])
  assert (total.rollouts, total.payload_bytes) == (4, 4 + 4 + 3 + 4)
  assert total.refused == {'round_trip': 2}
  assert total.refused_bytes == {'round_trip': 4 + 3}
  assert total.specials_dropped == 1
  # '= 10' is two tokens and four, and so is '= 13'; each has an end.
  assert (total.sender_tokens, total.receiver_tokens) == (7, 10)
  assert sum(total.chunks.values()) == 6
