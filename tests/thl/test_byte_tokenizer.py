import functools
import json
import os
import pathlib
import unicodedata

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from tokenizers import processors

from mrl_jax import checks
from mrl_jax import config
from mrl_jax import hugging_face
from mrl_jax.thl import byte_tokenizer
from tests import examples
from tests import vocabularies

BYTE_LEVEL, SENTENCEPIECE = (
  examples.tokenizer('byte_level'),
  examples.tokenizer('sentencepiece'),
)
BOTH = pytest.mark.parametrize(
  'tokenizer', [BYTE_LEVEL, SENTENCEPIECE], ids=['byte_level', 'sentencepiece']
)


def from_backend(backend, eos_id=0):
  return byte_tokenizer.ByteTokenizer(backend, eos_id=eos_id)


@BOTH
@given(payload=st.one_of(st.binary(), st.text().map(str.encode)))
def test_any_bytes_round_trip(tokenizer, payload):
  if '\u2581'.encode() in payload and tokenizer is SENTENCEPIECE:
    return  # SentencePiece writes a space as this character.
  ids = tokenizer.encode(payload)
  assert tokenizer.decode(ids) == payload
  assert tokenizer.byte_length_V[ids].sum() == len(payload)


_PAYLOAD = st.one_of(
  st.binary(max_size=20),
  st.text(max_size=20).map(str.encode),
  st.sampled_from([b'', b' ', b'<eos>', b'<0x41>', '= 13 \u2581'.encode()]),
)


@pytest.mark.parametrize('kind', sorted(vocabularies.KINDS))
@settings(max_examples=25)
@given(payloads=st.lists(_PAYLOAD, max_size=6), batch=st.integers(1, 60))
def test_many_payloads_get_the_ids_of_each_by_itself(kind, payloads, batch):
  tokenizer = vocabularies.tokenizer(kind)

  def encode(payload):
    """One text after the other, by the library's other function."""
    ids = []
    for part in tokenizer._parts(payload):
      if isinstance(part, str):
        part = tokenizer._continue.encode(part, add_special_tokens=False).ids
      ids += part
    return ids

  expected = [*map(encode, payloads)]
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(byte_tokenizer, '_BATCH_BYTES', batch)
    found = [*tokenizer.encode_all(payloads)]
  assert [ids.tolist() for ids in found] == expected
  assert [tokenizer.encode(p).tolist() for p in payloads] == expected
  assert {ids.dtype for ids in found} <= {np.dtype(np.int32)}
  assert [*map(tokenizer.decode, found)] == [
    b''.join(tokenizer.token_bytes[i] for i in ids) for ids in expected
  ]


def test_a_batch_of_texts_is_bounded(monkeypatch):
  monkeypatch.setattr(byte_tokenizer, '_BATCH_BYTES', 10)
  tokenizer, taken = examples.tokenizer('byte_level'), []

  def payloads():
    for i in range(9):
      taken.append(i)
      yield b'1234'

  next(tokenizer.encode_all(payloads()))
  assert taken == [0, 1, 2]


@BOTH
def test_a_lost_character_shows_in_the_round_trip(tokenizer):
  payload = 'a\u2581b'.encode()
  changed = tokenizer.decode(tokenizer.encode(payload)) != payload
  assert changed == (tokenizer is SENTENCEPIECE)


@BOTH
def test_text_never_becomes_a_control_token(tokenizer):
  texts = (
    '<eos>',
    '<pad>',
    '<<eos>>',
    'a<eos><eos>b',
    '<unk>',
    '<0x0A>',
    '<0xAA>',
  )
  for text in texts:
    ids = tokenizer.encode(text.encode())
    assert tokenizer.eos_id not in ids, text
    assert tokenizer.decode(ids) == text.encode()
    assert tokenizer.eos_id not in tokenizer.encode_prompt(text), text


@BOTH
def test_every_byte_has_a_token_and_control_tokens_have_no_bytes(tokenizer):
  assert {bytes([b]) for b in range(256)} <= set(tokenizer.token_bytes)
  assert tokenizer.token_bytes[tokenizer.eos_id] == b''
  assert tokenizer.byte_length_V[tokenizer.eos_id] == 0


def prefix_space(pre_tokenizer):
  """A byte-level tokenizer with a space before all text."""
  backend = vocabularies.copy(BYTE_LEVEL)
  backend.pre_tokenizer = pre_tokenizer
  return from_backend(backend, BYTE_LEVEL.eos_id)


BYTE_LEVEL_SPACE = pre_tokenizers.ByteLevel(add_prefix_space=True)


@pytest.mark.parametrize(
  'tokenizer',
  [
    vocabularies.tokenizer('llama2_like'),
    vocabularies.tokenizer('unigram'),
    vocabularies.byte_level(normalizers.Prepend(' ')),
    prefix_space(BYTE_LEVEL_SPACE),
    prefix_space(pre_tokenizers.Sequence([BYTE_LEVEL_SPACE])),
  ],
)
def test_a_prompt_gets_a_space_before_it_and_a_response_does_not(tokenizer):
  assert tokenizer.decode(tokenizer.encode_prompt('hi')) == b' hi'
  for payload in (b'hi', b' hi', b'  hi\n'):
    assert tokenizer.decode(tokenizer.encode(payload)) == payload


def test_a_llama2_prompt_has_a_bos_token_and_a_response_has_not():
  tokenizer = vocabularies.tokenizer('llama2_like')
  np.testing.assert_array_equal(tokenizer.encode(b'hi'), [262])
  np.testing.assert_array_equal(tokenizer.encode(b' hi'), [263])
  np.testing.assert_array_equal(tokenizer.encode_prompt('hi'), [1, 263])


def test_different_tokenizers_have_different_fingerprints():
  assert BYTE_LEVEL.fingerprint == examples.tokenizer('byte_level').fingerprint
  assert len({BYTE_LEVEL.fingerprint, SENTENCEPIECE.fingerprint}) == 2
  backend = vocabularies.copy(BYTE_LEVEL)
  other_end = byte_tokenizer.ByteTokenizer(backend, eos_id=0)
  assert other_end.fingerprint != BYTE_LEVEL.fingerprint


def test_wordpiece_has_a_space_before_words_only():
  tokenizer = vocabularies.tokenizer('wordpiece')
  ids = tokenizer.encode(b' sort 13')
  assert tokenizer.decode(ids) == b' sort 13'
  backend = tokenizers.Tokenizer(
    models.WordPiece({'[UNK]': 0, 'sort': 1, '##s': 2}, unk_token='[UNK]')
  )
  backend.decoder = decoders.WordPiece()
  pieces = from_backend(backend, eos_id=0)
  assert pieces.token_bytes == [b'', b' sort', b's']


@pytest.mark.parametrize('kind', ['wordpiece', 'characters'])
def test_unknown_characters_show_in_the_round_trip(kind):
  tokenizer = vocabularies.tokenizer(kind)
  for payload in ('é', ' sort é', '\u6f22 0'):
    ids = tokenizer.encode(payload.encode())
    assert tokenizer.decode(ids) != payload.encode()
    assert tokenizer.byte_length_V[ids].sum() == len(tokenizer.decode(ids))


def test_an_unsupported_decoder_is_an_error():
  backend = tokenizers.Tokenizer(models.WordLevel({'unk': 0}, unk_token='unk'))
  backend.pre_tokenizer = pre_tokenizers.Whitespace()
  with pytest.raises(checks.InputError, match='byte-level, SentencePiece'):
    byte_tokenizer.ByteTokenizer(backend, eos_id=0)


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path):
  with pytest.raises(checks.InputError, match='no tokenizer could be loaded'):
    byte_tokenizer.load(os.fspath(tmp_path))


def test_the_end_of_sequence_is_a_control_token_even_if_not_special():
  backend = tokenizers.Tokenizer(
    models.BPE({'</s>': 0, '<': 1, '/': 2, 's': 3, '>': 4}, [])
  )
  backend.decoder = decoders.Metaspace()
  tokenizer = from_backend(backend)
  assert tokenizer.token_bytes[0] == b''
  np.testing.assert_array_equal(tokenizer.encode(b'</s>'), [1, 2, 3, 4])


def test_text_never_becomes_the_byte_pieces_of_a_unigram_tokenizer():
  tokenizer = vocabularies.unigram(prepend_scheme='never')
  for text in ('</s>', '<0x0A>', 'hi<0x0A></s>', '<unk>'):
    ids = tokenizer.encode(text.encode())
    assert tokenizer.decode(ids) == text.encode()
    assert not {0, 1} & set(ids.tolist()), text


def test_truncation_and_padding_of_the_backend_are_ignored():
  backend = vocabularies.copy(BYTE_LEVEL)
  backend.enable_truncation(4)
  backend.enable_padding(length=64)
  tokenizer = from_backend(backend, BYTE_LEVEL.eos_id)
  payload = b'= 10 = 13 = 10 = 13'
  np.testing.assert_array_equal(
    tokenizer.encode(payload), BYTE_LEVEL.encode(payload)
  )


@pytest.mark.parametrize('added', ['  \u00e9', '\u00abthink\u00bb'])
def test_added_tokens_that_are_not_special_stand_for_their_text(added):
  tokenizer = vocabularies.with_added('byte_level', added)
  payload = f'a{added}b'.encode()
  ids = tokenizer.encode(payload)
  assert added.encode() in [tokenizer.token_bytes[i] for i in ids]
  assert tokenizer.decode(ids) == payload


@pytest.mark.parametrize(
  ('normalizer', 'text'),
  [
    (normalizers.NFKC(), '＜／s＞'),
    (normalizers.NFKC(), '＜0x0A>'),
    (normalizers.NFKC(), '﹤/s﹥'),
    (normalizers.Lowercase(), '</S>'),
    (normalizers.Replace('~', ''), '<~/s>'),
    (normalizers.BertNormalizer(lowercase=False), '<\x00/s>'),
  ],
)
def test_normalised_text_never_becomes_a_control_token(normalizer, text):
  tokenizer = vocabularies.unigram(normalizer, prepend_scheme='never')
  for ids in (tokenizer.encode(text.encode()), tokenizer.encode_prompt(text)):
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == normalizer.normalize_str(text).encode()


def test_text_with_a_space_never_becomes_a_control_token():
  backend = vocabularies.copy(SENTENCEPIECE)
  backend.add_special_tokens(['<end\u2581of>'])
  tokenizer = from_backend(backend, SENTENCEPIECE.eos_id)
  ids = tokenizer.encode(b'<end of>')
  assert backend.token_to_id('<end\u2581of>') not in ids
  assert tokenizer.decode(ids) == b'<end of>'


def test_the_bos_token_is_a_control_token_even_if_not_special():
  backend = vocabularies.copy(BYTE_LEVEL)
  backend.add_tokens(['<bos>'])
  bos_id = backend.token_to_id('<bos>')
  tokenizer = byte_tokenizer.ByteTokenizer(
    backend, eos_id=BYTE_LEVEL.eos_id, bos_id=bos_id
  )
  assert tokenizer.token_bytes[bos_id] == b''
  assert bos_id not in tokenizer.encode(b'<bos>')
  assert tokenizer.encode_prompt('<bos>').tolist().count(bos_id) == 1


def test_a_control_token_of_one_character_is_an_error():
  backend = vocabularies.copy(BYTE_LEVEL)
  backend.add_special_tokens(['\u00a4'])
  with pytest.raises(checks.InputError, match='single character'):
    from_backend(backend, BYTE_LEVEL.eos_id)


@pytest.mark.parametrize('eos_id', [-1, 10**6])
def test_an_end_of_sequence_outside_the_vocabulary_is_an_error(eos_id):
  backend = vocabularies.copy(BYTE_LEVEL)
  with pytest.raises(checks.InputError, match=f'has no token {eos_id}'):
    from_backend(backend, eos_id)


def test_a_piece_outside_the_byte_alphabet_stands_for_itself():
  spec = json.loads(BYTE_LEVEL._start.to_str())
  spec['model']['vocab']['\u65e5'] = len(spec['model']['vocab'])
  backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
  tokenizer = from_backend(backend, BYTE_LEVEL.eos_id)
  assert tokenizer.token_bytes[-1] == '\u65e5'.encode()
  assert backend.decode([tokenizer.vocab_size - 1]) == '\u65e5'


WITH_ALL_BYTES = pytest.mark.parametrize(
  'kind',
  ['byte_level', 'byte_level_nfc', 'sentencepiece', 'llama2_like', 'unigram'],
)


@WITH_ALL_BYTES
@pytest.mark.parametrize('special', [False, True])
def test_added_tokens_do_not_absorb_white_space_around_them(kind, special):
  tokenizer = vocabularies.with_added(
    kind, '<think>', lstrip=True, rstrip=True, normalized=False, special=special
  )
  text = 'a \t<think> \n = <think>1'
  backend = vocabularies.copy(tokenizer)
  hf = backend.decode(backend.encode(text).ids, skip_special_tokens=False)
  assert not {'\t', '\n'} & set(hf)
  ids = tokenizer.encode(text.encode())
  assert tokenizer.decode(ids) == text.encode()
  think = backend.token_to_id('<think>')
  assert ids.tolist().count(think) == (0 if special else 2)


@pytest.mark.parametrize('kind', sorted(vocabularies.KINDS))
def test_an_added_token_that_is_not_special_has_the_bytes_of_its_text(kind):
  tokenizer = vocabularies.with_added(kind, '<think>')
  # In WordPiece, every word has a space before it.
  text = b' <think> sort' if kind == 'wordpiece' else b'<think> sort'
  ids = tokenizer.encode(text)
  assert tokenizer.token_bytes[ids[0]] == text.removesuffix(b' sort')
  assert tokenizer.decode(ids) == text
  backend = vocabularies.copy(tokenizer)
  hf = backend.decode(ids.tolist(), skip_special_tokens=True)
  assert hf == '<think> sort'


def test_text_never_becomes_an_end_that_the_normaliser_rewrites():
  backend = vocabularies.copy(vocabularies.tokenizer('llama2_like'))
  backend.add_tokens([tokenizers.AddedToken('<end>', normalized=True)])
  end = backend.token_to_id('<end>')
  tokenizer = from_backend(backend, end)
  for ids in (tokenizer.encode(b'a<end>'), tokenizer.encode_prompt('a<end>')):
    assert end not in ids
    assert tokenizer.decode(ids).endswith(b'a<end>')


def test_added_tokens_of_spaces_stand_for_spaces():
  # Gemma lists runs of spaces as added tokens and as tokens of its model.
  backend = tokenizers.Tokenizer(
    models.BPE(
      {'</s>': 0, '\u2581': 1, '\u2581\u2581': 2, 'a': 3},
      [('\u2581', '\u2581')],
    )
  )
  backend.normalizer = normalizers.Replace(' ', '\u2581')
  backend.decoder = decoders.Sequence(
    [decoders.Replace('\u2581', ' '), decoders.ByteFallback(), decoders.Fuse()]
  )
  backend.add_tokens([tokenizers.AddedToken('\u2581\u2581', normalized=False)])
  tokenizer = from_backend(backend)
  np.testing.assert_array_equal(tokenizer.encode(b'a  a'), [3, 2, 3])
  assert tokenizer.decode([3, 2, 3]) == b'a  a'
  assert backend.decode([3, 2, 3]) == 'a  a'


@WITH_ALL_BYTES
def test_the_text_of_a_peer_never_becomes_a_control_token(kind):
  for control in (
    '<|im_end|>',
    '<|eot_id|>',
    '<｜end\u2581of\u2581sentence｜>',
  ):
    tokenizer = vocabularies.with_added(kind, control, special=True)
    payload = f'= 13{control}1'.replace('\u2581', ' ').encode()
    ids = tokenizer.encode(payload)
    assert tokenizer.byte_length_V[ids].all(), control
    assert tokenizer.decode(ids) == payload


def test_bytes_tile_the_payload_even_if_offsets_are_trimmed():
  backend = vocabularies.copy(BYTE_LEVEL)
  backend.post_processor = processors.ByteLevel(trim_offsets=True)
  tokenizer = from_backend(backend, BYTE_LEVEL.eos_id)
  payload = b'= 10   = \xf0\x9f\x91\x8d'
  ids = tokenizer.encode(payload)
  offsets = backend.encode(payload.decode()).offsets
  assert sum(end - start for start, end in offsets) < len(payload)
  lengths = tokenizer.byte_length_V[ids]
  assert lengths.sum() == len(payload)
  for end, n, i in zip(np.cumsum(lengths), lengths, ids, strict=True):
    assert tokenizer.token_bytes[i] == payload[end - n : end]


def test_one_byte_may_have_two_ids():
  tokenizer = SENTENCEPIECE
  newlines = [i for i, b in enumerate(tokenizer.token_bytes) if b == b'\n']
  assert len(newlines) == 2
  assert tokenizer.decode(newlines) == b'\n\n'
  assert tokenizer.encode(b'\n')[0] in newlines


def test_clean_up_tokenization_spaces_is_ignored(tmp_path):
  folder = tmp_path / 'tokenizer'
  hugging_face.save_tokenizer(
    vocabularies.copy(BYTE_LEVEL), os.fspath(folder), eos_token='<eos>'
  )
  settings = folder / 'tokenizer_config.json'
  cleaned = {'clean_up_tokenization_spaces': True}
  settings.write_text(json.dumps(json.loads(settings.read_text()) | cleaned))
  loaded = hugging_face.load_tokenizer(os.fspath(folder))
  assert loaded.clean_up_tokenization_spaces
  tokenizer = byte_tokenizer.load(os.fspath(folder))
  payload = b"x != y , z . I 'm"
  assert tokenizer.decode(tokenizer.encode(payload)) == payload


def test_the_clean_up_of_the_wordpiece_decoder_is_ignored():
  tokenizer = vocabularies.tokenizer('wordpiece')
  payload = b' Tom has 4 , gets 6'
  ids = tokenizer.encode(payload)
  hf = vocabularies.copy(tokenizer).decode(ids.tolist())
  assert hf == 'Tom has 4, gets 6'
  assert tokenizer.decode(ids) == payload


@pytest.mark.parametrize(
  ('text', 'character'),
  [
    ('ab\ud83dc', r"2 of a prompt is '\\ud83d'"),
    ('\udc80', r"0 of a prompt is '\\udc80'"),
    ('\ud83d\ude00', r"0 of a prompt is '\\ud83d'"),
  ],
)
def test_half_of_a_surrogate_pair_is_an_error(text, character):
  message = f'character {character}, half of a surrogate pair'
  with pytest.raises(checks.InputError, match=message):
    BYTE_LEVEL.encode_prompt(text)
  with pytest.raises(checks.InputError, match=message):
    BYTE_LEVEL.encode_chat(text, 'b', 'c')


@pytest.mark.parametrize('kind', ['llama2_like', 'unigram'])
def test_a_prompt_gets_one_space_even_where_it_is_cut(kind):
  tokenizer = vocabularies.tokenizer(kind)
  assert tokenizer.decode(tokenizer.encode_prompt('hi</s>hi')) == b' hi</s>hi'


@pytest.mark.parametrize('kind', vocabularies.KINDS)
def test_a_tokenizer_is_restored_from_its_json(kind):
  tokenizer = vocabularies.tokenizer(kind)
  again = byte_tokenizer.from_json(tokenizer.to_json())
  assert again.fingerprint == tokenizer.fingerprint
  assert again.token_bytes == tokenizer.token_bytes
  np.testing.assert_array_equal(
    again.encode(b'= 10'), tokenizer.encode(b'= 10')
  )


@pytest.mark.parametrize(
  'edited',
  [
    lambda parts: '',
    lambda parts: '[]',
    lambda parts: json.dumps({**parts, 'tokenizer': '{}'}),
    lambda parts: json.dumps({**parts, 'tokenizer': 3}),
    lambda parts: json.dumps({**parts, 'eos_id': 10_000}),
    lambda parts: json.dumps({**parts, 'eos_id': None}),
    lambda parts: json.dumps({**parts, 'size': 10**12}),
  ],
)
def test_other_json_is_an_error(edited):
  parts = json.loads(BYTE_LEVEL.to_json())
  with pytest.raises(checks.InputError):
    byte_tokenizer.from_json(edited(parts))


TEXTS = (
  '',
  'max 4 9 3',
  ' 13  = ',
  '\n\n1\r\n',
  '\u00e9 e\u0301 \u0338 \u65e5\u672c \U0001f44d',
  'a < |end|> <|end <end> <think> [UNK',
)


@pytest.mark.parametrize('kind', sorted(vocabularies.KINDS))
def test_a_chat_has_the_ids_of_hugging_face(tmp_path, kind):
  for name, template in vocabularies.CHATS.items():
    folder = os.fspath(tmp_path / name)
    vocabularies.chat_folder(kind, folder, template)
    hf = hugging_face.load_tokenizer(folder)
    tokenizer = byte_tokenizer.load(folder)
    before, after = hugging_face.chat_template(hf)
    for text in map(str.strip, TEXTS) if name == 'trimming' else TEXTS:
      expected = hf.apply_chat_template(
        [{'role': 'user', 'content': text}], add_generation_prompt=True
      ).input_ids
      ids = tokenizer.encode_chat(before, text, after)
      assert ids.dtype == np.int32
      np.testing.assert_array_equal(ids, expected)


AROUND = (  # The text of a template before and after the prompt.
  ('<|start|>user\n', '<|end|>\n<|start|>assistant\n'),
  ('<|begin|><|start|>', '<|end|>'),
  ('<|begin|>a<', '>b<|over|>'),
  ('<|start|>a<|en', 'd|><|end|>'),
)
WRITTEN = st.lists(
  st.sampled_from(
    [
      *(*vocabularies.CONTROLS, '<|', 'end', '|', 'd', '>', '<', '|>', ' '),
      *('\n', '\uff1c', '\uff5c', '\u0338', 'e\u0301', '\u65e5', '<unk>'),
    ]
  )
).map(''.join)


@pytest.mark.parametrize(
  ('kind', 'form'),
  [
    ('byte_level', str),
    ('byte_level_nfkc', functools.partial(unicodedata.normalize, 'NFKC')),
    ('llama2_like', str),
    ('unigram', str),
  ],
)
def test_a_chat_has_only_the_control_tokens_of_its_template(kind, form):
  tokenizer = vocabularies.chat(kind)
  backend = vocabularies.copy(tokenizer)
  controls = {
    i: backend.id_to_token(i)
    for i, n in enumerate(tokenizer.byte_length_V)
    if not n
  }

  def encoded(text):
    ids = backend.encode(text, add_special_tokens=False).ids
    return ids, [i for i in ids if i in controls]

  def written(text):
    return [text.count(c) for c in controls.values()]

  @settings(max_examples=150, deadline=None)
  @given(around=st.sampled_from(AROUND), text=WRITTEN)
  def check(around, text):
    before, after = around
    whole = before + text + after
    ids = tokenizer.encode_chat(before, text, after).tolist()
    (first, opening), (last, closing) = map(encoded, around)
    assert [i for i in ids if i in controls] == opening + closing
    if kind == 'byte_level':
      parts = tokenizer.decode(first), text.encode(), tokenizer.decode(last)
      assert tokenizer.decode(ids) == b''.join(parts)
    if all(
      written(f(whole))
      == np.add(written(f(before)), written(f(after))).tolist()
      for f in (str, form)
    ):
      assert ids == encoded(whole)[0]

  check()


def test_control_tokens_of_a_template_absorb_white_space_of_the_prompt():
  # Phi 3 has such tokens, and Hugging Face does the same.
  backend = vocabularies.copy(BYTE_LEVEL)
  backend.add_special_tokens(
    [tokenizers.AddedToken('<|user|>', lstrip=True, rstrip=True)]
  )
  tokenizer = from_backend(backend, BYTE_LEVEL.eos_id)
  around = '<|user|>\n', '\n<|user|>'
  user = backend.token_to_id('<|user|>')
  ids = tokenizer.encode_chat(around[0], ' hi ', around[1])
  hi = BYTE_LEVEL.encode(b'hi').tolist()
  assert ids.tolist() == [user, *hi, user]
  ids = tokenizer.encode_chat(around[0], ' <|user|> ', around[1])
  assert ids.tolist().count(user) == 2
  assert tokenizer.decode(ids) == b' <|user|> '


@pytest.mark.parametrize(
  ('text', 'control'), [('-', '::end::'), ('::end', '::end::')]
)
def test_a_prompt_cannot_absorb_the_control_token_after_it(text, control):
  backend = vocabularies.copy(BYTE_LEVEL)
  backend.add_special_tokens([control])
  # The added token that begins first is matched, though it is not special.
  backend.add_tokens([tokenizers.AddedToken('-:', normalized=False)])
  end = backend.token_to_id(control)
  assert backend.encode(text + control).ids[-1] != end
  tokenizer = from_backend(backend, BYTE_LEVEL.eos_id)
  ids = tokenizer.encode_chat('', text, control)
  assert ids[-1] == end
  assert tokenizer.decode(ids) == text.encode()


def test_the_unknown_token_in_a_chat_is_not_a_forged_control_token():
  tokenizer = vocabularies.tokenizer('wordpiece')
  whole = vocabularies.copy(tokenizer).encode('sort \u00e9').ids
  assert whole[-1] == tokenizer.token_bytes.index(b'')
  # Encoded by itself, the prompt would not continue the first word.
  ids = tokenizer.encode_chat('so', 'rt \u00e9', '')
  np.testing.assert_array_equal(ids, whole)


@pytest.mark.slow
def test_chats_of_llama3_have_the_ids_of_hugging_face():
  folder = os.environ.get('MRL_TEST_DATA')
  if not folder:
    pytest.skip('MRL_TEST_DATA does not name a folder of real data')
  data = pathlib.Path(folder)
  path = os.fspath(data / 'tokenizers' / 'llama3')
  hf = hugging_face.load_tokenizer(path)
  hf.chat_template = (
    '{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}'
    '<|end_header_id|>\\n\\n{{ m.content | trim }}<|eot_id|>{% endfor %}'
    '<|start_header_id|>assistant<|end_header_id|>\\n\\n'
  )
  tokenizer = byte_tokenizer.load(path)
  before, after = hugging_face.chat_template(hf, 'Think first.')
  lines = (data / 'math' / 'gsm8k_test.jsonl').read_text().splitlines()
  for line in lines[:200]:
    text = json.loads(line)['question']
    messages = [
      {'role': 'system', 'content': 'Think first.'},
      {'role': 'user', 'content': text},
    ]
    expected = hf.apply_chat_template(messages, add_generation_prompt=True)
    ids = tokenizer.encode_chat(before, text, after)
    assert ids.tolist() == expected.input_ids
    forged = f'{text}<|eot_id|>'
    ids = tokenizer.encode_chat(before, forged, after).tolist()
    assert ids.count(hf.convert_tokens_to_ids('<|eot_id|>')) == 2
    assert text.encode() + b'<|eot_id|>' in tokenizer.decode(ids)


def test_stop_tokens_are_control_tokens_and_part_of_the_fingerprint():
  backend = vocabularies.copy(BYTE_LEVEL)
  backend.add_tokens(['<over>'])
  over = backend.token_to_id('<over>')
  tokenizer = byte_tokenizer.ByteTokenizer(
    backend, eos_id=over, stop_ids=(over, 1, 0, 1)
  )
  assert tokenizer.stop_ids == (over, 0, 1)
  assert [tokenizer.token_bytes[i] for i in (over, 0, 1)] == [b''] * 3
  assert not {over, 0, 1} & {*tokenizer.encode(b'<over><eos>')}
  alone = byte_tokenizer.ByteTokenizer(backend, eos_id=over)
  same = byte_tokenizer.ByteTokenizer(backend, eos_id=over, stop_ids=(over,))
  assert alone.fingerprint == same.fingerprint != tokenizer.fingerprint
  # A single end adds no 'stop' key: existing journals have this fingerprint.
  parts = json.loads(backend.to_str()) | {'eos': over, 'bos': None}
  assert alone.fingerprint == config.digest(parts)
  with pytest.raises(checks.InputError, match='has no token 1000000'):
    byte_tokenizer.ByteTokenizer(backend, eos_id=1, stop_ids=(10**6,))


def test_embedding_rows_without_a_token_have_no_bytes():
  backend, n = vocabularies.copy(BYTE_LEVEL), BYTE_LEVEL.vocab_size
  padded = byte_tokenizer.ByteTokenizer(backend, eos_id=1, size=n + 3)
  assert padded.vocab_size == len(padded.byte_length_V) == n + 3
  assert padded.decode([n, *padded.encode(b'hi'), n + 2]) == b'hi'
  assert padded.fingerprint == BYTE_LEVEL.fingerprint
  with pytest.raises(checks.InputError, match=f'has {n} tokens, the model'):
    byte_tokenizer.ByteTokenizer(backend, eos_id=1, size=n - 1)


def test_unused_control_tokens_need_no_embedding_row():
  backend, n = vocabularies.copy(BYTE_LEVEL), BYTE_LEVEL.vocab_size
  backend.add_special_tokens(['<image>'])
  tokenizer = byte_tokenizer.ByteTokenizer(backend, eos_id=1, size=n)
  assert tokenizer.vocab_size == n
  for ids in (
    tokenizer.encode(b'an <image>'),
    tokenizer.encode_chat('a', 'n <image>', 'x'),
  ):
    assert max(ids) < n
  with pytest.raises(checks.InputError, match='the model'):
    byte_tokenizer.ByteTokenizer(backend, eos_id=1, stop_ids=(n,), size=n)


def test_stop_tokens_and_size_are_in_the_json():
  first = vocabularies.chat('byte_level', stop_ids=(0, 1), size=400)
  text = first.to_json()
  again = byte_tokenizer.from_json(text)
  assert (again.stop_ids, again.vocab_size) == (first.stop_ids, 400)
  assert again.fingerprint == first.fingerprint
  old = json.loads(text)
  del old['stop_ids'], old['size']
  assert byte_tokenizer.from_json(json.dumps(old)).stop_ids == (first.eos_id,)


@pytest.mark.parametrize('added', [False, True])
def test_a_bos_token_is_used_only_if_the_folder_adds_it(tmp_path, added):
  backend = vocabularies.copy(vocabularies.chat('byte_level'))
  begin = backend.token_to_id('<|begin|>')
  if added:
    backend.post_processor = processors.TemplateProcessing(
      '<|begin|> $A', special_tokens=[('<|begin|>', begin)]
    )
  folder = tmp_path / 'a'
  hugging_face.save_tokenizer(
    backend, os.fspath(folder), bos_token='<|begin|>', eos_token='<|end|>'
  )
  (folder / 'generation_config.json').write_text('{"eos_token_id": [0, 1]}')
  tokenizer = byte_tokenizer.load(os.fspath(folder), size=500)
  assert tokenizer.bos_id == (begin if added else None)
  assert tokenizer.stop_ids == (backend.token_to_id('<|end|>'), 0, 1)
  assert tokenizer.vocab_size == 500
