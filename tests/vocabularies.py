"""Small tokenizers of every supported kind; imports no jax."""

import functools
import json

import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from tokenizers import trainers

from mrl_jax import hugging_face
from mrl_jax.thl import byte_tokenizer
from tests import examples

BYTE_PIECES = [f'<0x{b:02X}>' for b in range(256)]
CONTROLS = ('<|begin|>', '<|start|>', '<|end|>', '<|over|>')
# Like Qwen's: with a system prompt and a switch for thinking.
CHATML = (
  '{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n'
  '{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n'
  '{% if enable_thinking is defined and enable_thinking is false %}'
  '<think>\n\n</think>\n\n{% endif %}{% endif %}'
)
# Like Llama 3's: it writes the bos token and trims the message.
TRIMMING = (
  '{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|over|>\n\n'
  '{{ m.content | trim }}<|end|>{% endfor %}'
  '{% if add_generation_prompt %}<|start|>assistant<|over|>\n\n{% endif %}'
)
# Like Gemma 2's: it rejects a system prompt.
SYSTEMLESS = (
  "{% if messages[0].role == 'system' %}"
  "{{ raise_exception('System role not supported') }}{% endif %}"
  '{{ bos_token }}<|start|>user {{ messages[0].content }}<|end|>'
  '{% if add_generation_prompt %}\n<|start|>model {% endif %}'
)
CHATS = {'chatml': CHATML, 'trimming': TRIMMING, 'systemless': SYSTEMLESS}


def copy(tokenizer: byte_tokenizer.ByteTokenizer) -> tokenizers.Tokenizer:
  """A copy of its backend, which a test may change."""
  return tokenizers.Tokenizer.from_str(
    json.loads(tokenizer.to_json())['tokenizer']
  )


def with_added(
  kind: str, content: str, **options
) -> byte_tokenizer.ByteTokenizer:
  """A tokenizer of a kind with an added token."""
  plain = tokenizer(kind)
  backend = copy(plain)
  backend.add_tokens([tokenizers.AddedToken(content, **options)])
  return byte_tokenizer.ByteTokenizer(
    backend, eos_id=plain.eos_id, bos_id=plain.bos_id
  )


def chat(kind: str, **options) -> byte_tokenizer.ByteTokenizer:
  """A tokenizer of a kind with the control tokens of `CHATS`."""
  backend = copy(tokenizer(kind))
  backend.add_special_tokens([*CONTROLS])
  end = backend.token_to_id('<|end|>')
  return byte_tokenizer.ByteTokenizer(backend, eos_id=end, **options)


def chat_folder(kind: str, folder: str, template: str | None = None) -> None:
  """Writes the tokenizer of `chat` and a chat template to a folder."""
  hugging_face.save_tokenizer(
    copy(chat(kind)),
    folder,
    bos_token='<|begin|>',
    eos_token='<|end|>',
    chat_template=template,
  )


def byte_level(
  normalizer: normalizers.Normalizer | None = None,
) -> byte_tokenizer.ByteTokenizer:
  """Byte-level BPE, as of Llama 3 and Qwen; Qwen has an NFC normaliser."""
  backend = copy(examples.tokenizer('byte_level'))
  if normalizer is not None:
    backend.normalizer = normalizer
  return byte_tokenizer.ByteTokenizer(backend, eos_id=1)


def sentencepiece() -> byte_tokenizer.ByteTokenizer:
  """BPE with byte fallback, as of Gemma."""
  return examples.tokenizer('sentencepiece')


def llama2_like() -> byte_tokenizer.ByteTokenizer:
  """BPE with byte fallback that puts a space before all text."""
  pieces = ['<unk>', '<s>', '</s>', *BYTE_PIECES]
  pieces += ['\u2581', 'h', 'i', 'hi', '\u2581hi']
  backend = tokenizers.Tokenizer(
    models.BPE(
      {piece: i for i, piece in enumerate(pieces)},
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


def unigram(
  normalizer: normalizers.Normalizer | None = None, **metaspace
) -> byte_tokenizer.ByteTokenizer:
  """Unigram with byte fallback, the default of SentencePiece."""
  pieces = ['<unk>', '</s>', *BYTE_PIECES]
  pieces += ['\u2581', 'h', 'i', 'hi', '\u2581hi']
  backend = tokenizers.Tokenizer(
    models.Unigram(
      [(piece, -float(i)) for i, piece in enumerate(pieces)],
      unk_id=0,
      byte_fallback=True,
    )
  )
  if normalizer is not None:
    backend.normalizer = normalizer
  backend.pre_tokenizer = pre_tokenizers.Metaspace(**metaspace)
  backend.decoder = decoders.Sequence(
    [decoders.Metaspace(), decoders.ByteFallback()]
  )
  backend.add_special_tokens(['<unk>', '</s>'])
  return byte_tokenizer.ByteTokenizer(backend, eos_id=1)


def wordpiece() -> byte_tokenizer.ByteTokenizer:
  """WordPiece, as of BERT: pieces of words, and [UNK] for other text."""
  backend = tokenizers.Tokenizer(models.WordPiece(unk_token='[UNK]'))
  backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  backend.decoder = decoders.WordPiece()
  backend.train_from_iterator(
    examples.TEXTS * 20,
    trainers.WordPieceTrainer(
      vocab_size=200, special_tokens=['[UNK]', '[SEP]'], show_progress=False
    ),
  )
  return byte_tokenizer.ByteTokenizer(backend, eos_id=1)


def characters() -> byte_tokenizer.ByteTokenizer:
  """A token for every character of the texts, and <unk> for other text."""
  pieces = ['<unk>', '</s>', *sorted(set(''.join(examples.TEXTS)))]
  backend = tokenizers.Tokenizer(
    models.WordLevel(
      {piece: i for i, piece in enumerate(pieces)}, unk_token='<unk>'
    )
  )
  backend.pre_tokenizer = pre_tokenizers.Split('', 'isolated')
  backend.decoder = decoders.Fuse()
  backend.add_special_tokens(['<unk>', '</s>'])
  return byte_tokenizer.ByteTokenizer(backend, eos_id=1)


KINDS = {
  'byte_level': byte_level,
  'byte_level_nfc': functools.partial(byte_level, normalizers.NFC()),
  'byte_level_nfkc': functools.partial(byte_level, normalizers.NFKC()),
  'sentencepiece': sentencepiece,
  'llama2_like': llama2_like,
  'unigram': functools.partial(unigram, prepend_scheme='always'),
  'wordpiece': wordpiece,
  'characters': characters,
}


@functools.cache
def tokenizer(kind: str) -> byte_tokenizer.ByteTokenizer:
  """The shared tokenizer of a kind."""
  return KINDS[kind]()
