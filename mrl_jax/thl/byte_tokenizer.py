"""A tokenizer that encodes bytes, and knows the bytes of each of its ids."""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
import json
import re
from typing import Annotated

import msgspec
import numpy as np
import tokenizers

from mrl_jax import checks
from mrl_jax import config
from mrl_jax import hugging_face

_SPACE = '\u2581'  # How SentencePiece writes a space.
_BYTE_PIECE = re.compile(r'<0x([0-9A-F]{2})>')
_LONE_BYTES = re.compile('([\udc80-\udcff])')
# The largest `size` that JSON, which may come from anywhere, can ask for.
_MAX_SIZE = 2**22
# Bytes of text that are encoded together: enough for many cores, and the library's
# results take some ten times as much memory.
_BATCH_BYTES = 2**22


def from_json(text: str) -> 'ByteTokenizer':
  """The tokenizer that `to_json` wrote.

  Raises InputError if `text` is not the JSON of a tokenizer.
  """
  try:
    parts = msgspec.structs.asdict(msgspec.json.decode(text, type=_Parts))
    backend = tokenizers.Tokenizer.from_str(parts.pop('tokenizer'))
  except Exception as error:  # The library raises plain exceptions.
    raise checks.InputError(f'not the JSON of a tokenizer: {error}') from error
  return ByteTokenizer(backend, **parts)


def load(
  path: str, size: int | None = None, stop_ids: Iterable[int] = ()
) -> 'ByteTokenizer':
  """Loads the Hugging Face tokenizer at `path`, a folder or a hub name.

  Its stop tokens are `stop_ids` and the ones that the configs there name;
  `size` is passed on to `ByteTokenizer`.
  """
  hf = hugging_face.load_tokenizer(path)
  # Some tokenizers name a bos token that they never add.
  has_bos = hf('a').input_ids[:1] == [hf.bos_token_id]
  return ByteTokenizer(
    hf.backend_tokenizer,
    eos_id=hf.eos_token_id,
    bos_id=hf.bos_token_id if has_bos else None,
    stop_ids=(*stop_ids, *hugging_face.stop_ids(path)),
    size=size,
  )


class _Parts(msgspec.Struct, kw_only=True):
  """What `ByteTokenizer.to_json` writes."""

  tokenizer: str
  eos_id: int
  bos_id: int | None
  stop_ids: tuple[int, ...] = ()
  size: Annotated[int, msgspec.Meta(le=_MAX_SIZE)] | None = None


class ByteTokenizer:
  """Encodes and decodes bytes, and knows the bytes of every id.

  Text is untrusted: control tokens written in it are encoded as ordinary text.
  """

  token_bytes: list[bytes]  # The bytes of each id; empty for control tokens.
  byte_length_V: np.ndarray  # i32, the lengths of `token_bytes`.
  eos_id: int  # The end-of-sequence token.
  bos_id: int | None  # The token that starts a sequence, if any.
  stop_ids: tuple[int, ...]  # All tokens that end a completion, `eos_id` first.
  fingerprint: str  # Equal for tokenizers that encode alike and stop alike.

  def __init__(
    self,
    backend: tokenizers.Tokenizer,
    *,
    eos_id: int,
    bos_id: int | None = None,
    stop_ids: Iterable[int] = (),
    size: int | None = None,
  ):
    """Reads a tokenizer; `backend` is copied.

    `stop_ids` end a completion as `eos_id` does. `size` is the number of rows
    of the model's embedding, by default one for each token; ids beyond the
    tokens have no bytes.

    Raises InputError if the tokenizer is of an unsupported kind, lacks one of
    these tokens, or has more than `size` tokens.
    """
    spec = json.loads(backend.to_str())
    spec.update(post_processor=None, truncation=None, padding=None)
    self._backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
    self._size = size
    self.eos_id, self.bos_id = eos_id, bos_id
    others = sorted({*stop_ids} - {eos_id})
    self.stop_ids = (eos_id, *others)
    ends = {'eos': eos_id, 'bos': bos_id} | ({'stop': others} if others else {})
    self.fingerprint = config.digest({**spec, **ends})
    # A tokenizer may normalise added tokens. The encoders of this class have no
    # normaliser, and match added tokens as they are listed.
    added = {t['id']: t['content'] for t in spec['added_tokens']}
    count = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    pieces = [added.get(i, backend.id_to_token(i)) for i in range(count)]
    used = {*self.stop_ids, bos_id} - {None}
    special = used | {t['id'] for t in spec['added_tokens'] if t['special']}
    for i in special:
      checks.require(
        0 <= i < count and pieces[i] is not None,
        f'the vocabulary has no token {i}, which is named as a control token',
      )
      checks.require(
        len(pieces[i]) > 1,
        f'the control token {pieces[i]!r} is a single character and cannot be '
        'distinguished from that character in a text',
      )
    rows = count if size is None else size
    # Control tokens for other uses, such as images, may have no row.
    checks.require(
      max({*range(count)} - special | used) < rows,
      f"the tokenizer has {count} tokens, the model's embedding {rows} rows; "
      'give the tokenizer that belongs to the model',
    )
    to_bytes = _piece_reader(spec['decoder'], {*added.values()})
    token_bytes = [
      b'' if piece is None or i in special else to_bytes(piece)
      for i, piece in enumerate(pieces)
    ]
    self.token_bytes = (token_bytes + [b''] * rows)[:rows]
    self.byte_length_V = np.array([len(b) for b in self.token_bytes], np.int32)
    self._byte_ids = {
      b: [i] for i, b in reversed([*enumerate(self.token_bytes)]) if len(b) == 1
    }
    self._controls = {i: pieces[i] for i in special}
    unknown = spec['model'].get('unk_token')  # Unigram names its id instead.
    self._unknown_id = spec['model'].get(
      'unk_id', unknown and backend.token_to_id(unknown)
    )
    byte_pieces = filter(_BYTE_PIECE.fullmatch, filter(None, pieces))
    self._cut = _inside_any([*self._controls.values(), *byte_pieces])
    self._normalize_start, self._start = _steps(spec)
    self._normalize, self._continue = _steps(_continuation(spec))

  @property
  def vocab_size(self) -> int:
    return len(self.token_bytes)

  def to_json(self) -> str:
    """The tokenizer as JSON, for `from_json`."""
    parts = _Parts(
      tokenizer=self._backend.to_str(),
      eos_id=self.eos_id,
      bos_id=self.bos_id,
      stop_ids=self.stop_ids,
      size=self._size,
    )
    return msgspec.json.encode(parts).decode()

  def encode_prompt(self, text: str) -> np.ndarray:
    """Ids (i32) of `text` at the start of a sequence.

    Raises InputError if the text has half of a surrogate pair.
    """
    _check_prompt(text)
    first = [] if self.bos_id is None else [self.bos_id]
    ids = self._encode(self._start, self._normalize_start(text))
    return np.array(first + ids, np.int32)

  def encode_chat(self, before: str, text: str, after: str) -> np.ndarray:
    """Ids (i32) of a prompt in a chat template, at the start of a sequence.

    The template writes `before` and `after` around the prompt `text`; they are
    trusted and may have control tokens, `text` is not. The ids are those of
    Hugging Face, unless `text` holds a control token or completes one with the
    text around it. In that case `text` is encoded by itself, so that all
    control tokens are those of the template.

    Raises InputError if there is half of a surrogate pair.
    """
    whole = before + text + after
    _check_prompt(whole)
    whole_ids, controls = self._with_controls(whole)
    before_ids, expected = self._with_controls(before)
    after_ids, more = self._with_controls(after)
    shift = len(whole) - len(after)
    expected += [(i, start + shift) for i, start in more]
    if controls == expected:
      return np.array(whole_ids, np.int32)
    ids = [before_ids, self.encode(text.encode()), after_ids]
    return np.concatenate(ids).astype(np.int32)

  def encode(self, payload: bytes) -> np.ndarray:
    """Ids (i32) of `payload` as the continuation of a sequence.

    Bytes that are not UTF-8 become single-byte tokens if the vocabulary has
    them, and are lost otherwise. A normaliser or a missing piece may change or
    lose bytes too: check `decode(encode(payload)) == payload`.
    """
    (ids,) = self.encode_all([payload])
    return ids

  def encode_all(self, payloads: Iterable[bytes]) -> Iterator[np.ndarray]:
    """Yields `encode` of each payload, many of which are encoded in parallel."""
    batch, size = [], 0
    for payload in payloads:
      batch.append(self._parts(payload))
      size += len(payload)
      if size >= _BATCH_BYTES:
        yield from self._encode_parts(batch)
        batch, size = [], 0
    yield from self._encode_parts(batch)

  def decode(self, ids: Sequence[int]) -> bytes:
    """The bytes that `ids` stand for."""
    return b''.join(map(self.token_bytes.__getitem__, np.asarray(ids).tolist()))

  def _with_controls(self, text) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids of `text`, and (id, offset) of the control tokens in it.

    Offsets are in characters, after the white space that some control tokens
    absorb before them.
    """
    encoding = self._backend.encode(text, add_special_tokens=False)
    controls = []
    for i, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
      if i in self._controls:
        written = text[start:end]
        forms = written.strip(), self._normalize(written).strip()
        # Text that the vocabulary lacks becomes the unknown token, which may be
        # a control token, but the text does not name it.
        if i != self._unknown_id or self._controls[i] in forms:
          controls.append((i, end - len(written.lstrip())))
    return encoding.ids, controls

  def _parts(self, payload) -> list[str | list[int]]:
    """Texts to be encoded each by itself, and ids of bytes that are not text."""
    parts = []
    text = payload.decode('utf-8', errors='surrogateescape')
    for i, part in enumerate(_LONE_BYTES.split(text)):
      if i % 2:
        byte = part.encode('utf-8', errors='surrogateescape')
        parts.append(self._byte_ids.get(byte, []))
      elif part:
        parts += self._cut.split(self._normalize(part))
    return parts

  def _encode_parts(self, batch) -> Iterator[np.ndarray]:
    """Yields the ids of each of several results of `_parts`."""
    texts = [part for parts in batch for part in parts if isinstance(part, str)]
    # The library's threads share a list of texts; a single one takes one thread.
    encodings = iter(
      self._continue.encode_batch_fast(texts, add_special_tokens=False)
    )
    for parts in batch:
      ids = []
      for part in parts:
        ids.extend(next(encodings).ids if isinstance(part, str) else part)
      yield np.array(ids, np.int32)

  def _encode(self, encoder, normalized: str) -> list[int]:
    ids = []
    # Cut after normalisation, which can create what the text did not have.
    for part in self._cut.split(normalized):
      ids.extend(encoder.encode(part, add_special_tokens=False).ids)
      encoder = self._continue
    return ids


def _check_prompt(text: str) -> None:
  try:
    text.encode()
  except UnicodeEncodeError as error:
    raise checks.InputError(
      f'character {error.start} of a prompt is {text[error.start]!r}, half of '
      'a surrogate pair, which has no bytes; replace it by the whole character'
    ) from error


def _inside_any(contents: Iterable[str]) -> re.Pattern:
  """Matches after the first character of any of these control tokens or pieces.

  Text that is cut at every match contains none of them any more: `<eos>` is cut
  into `<` and `eos>`, which are then encoded separately.
  """
  rests = collections.defaultdict(list)
  for content in contents:
    for written in {content, content.replace(_SPACE, ' ')}:
      rests[written[0]].append(re.escape(written[1:]))
  cuts = [f'(?<={re.escape(c)})(?={"|".join(r)})' for c, r in rests.items()]
  return re.compile('|'.join(cuts) or '(?!)')


def _steps(spec: dict) -> tuple[Callable[[str], str], tokenizers.Tokenizer]:
  """The normaliser of a tokenizer, and the tokenizer without it."""
  empty = {'type': 'BPE', 'vocab': {}, 'merges': []}
  alone = json.dumps({**spec, 'added_tokens': [], 'model': empty})
  normalizer = tokenizers.Tokenizer.from_str(alone).normalizer
  rest = json.dumps({**spec, 'normalizer': None})
  return (
    normalizer.normalize_str if normalizer else str,
    tokenizers.Tokenizer.from_str(rest),
  )


def _continuation(spec: dict) -> dict:
  """The JSON of the tokenizer of text that continues a sequence.

  Some tokenizers put a space before every text, and some added tokens absorb
  the white space around them; here neither happens.
  """

  def strip(step):
    if step is None:
      return None
    for part in ('normalizers', 'pretokenizers'):
      if part in step:
        kept = [strip(s) for s in step[part] if s['type'] != 'Prepend']
        return {**step, part: kept}
    if step['type'] == 'Metaspace':
      return {**step, 'prepend_scheme': 'never'}
    if step['type'] == 'ByteLevel':
      return {**step, 'add_prefix_space': False}
    return None if step['type'] == 'Prepend' else step

  return {
    **spec,
    'normalizer': strip(spec['normalizer']),
    'pre_tokenizer': strip(spec['pre_tokenizer']),
    'added_tokens': [
      {**token, 'lstrip': False, 'rstrip': False}
      for token in spec['added_tokens']
    ],
  }


def _piece_reader(decoder: dict | None, added: set[str]):
  """A function from a piece to its bytes, as the tokenizer's decoder."""
  steps = decoder.get('decoders', [decoder]) if decoder else []
  kinds = {step['type']: step for step in steps}
  if 'ByteLevel' in kinds:
    alphabet = _byte_level_alphabet()

    def byte_level(piece):
      # Added tokens and a few others are not written in the byte alphabet.
      if piece in added or not alphabet.keys() >= set(piece):
        return piece.encode()
      return bytes(alphabet[c] for c in piece)

    return byte_level
  if 'WordPiece' in kinds:
    prefix = kinds['WordPiece']['prefix']

    def wordpiece(piece):
      # The first piece of a word stands for a space too, wherever it is.
      inner = piece.startswith(prefix)
      return (piece.removeprefix(prefix) if inner else f' {piece}').encode()

    return wordpiece
  if {'ByteFallback', 'Metaspace'} & kinds.keys():

    def sentencepiece(piece):
      byte = _BYTE_PIECE.fullmatch(piece)
      if byte:
        return bytes([int(byte[1], 16)])
      return piece.replace(_SPACE, ' ').encode()

    return sentencepiece
  if kinds.keys() == {'Fuse'}:
    return str.encode
  raise checks.InputError(
    'supported are byte-level, SentencePiece-style, WordPiece and character '
    f'tokenizers; this one decodes with {json.dumps(decoder)}'
  )


def _byte_level_alphabet() -> dict[str, int]:
  """The byte of every character of byte-level BPE's alphabet (GPT-2)."""
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  rest = sorted({*range(256)} - {*printable})
  alphabet = map(chr, [*printable, *range(256, 256 + len(rest))])
  return dict(zip(alphabet, printable + rest, strict=True))
