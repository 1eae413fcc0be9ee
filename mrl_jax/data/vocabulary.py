"""Tokenizers trained from text, saved as Hugging Face folders."""

from collections.abc import Iterable
import json
import os

import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import trainers

from mrl_jax import checks

_PAD, _EOS, _UNKNOWN = '<pad>', '<eos>', '<unk>'
_NEVER = -1e4  # A score with which Unigram takes no piece of its own accord.


def byte_level_bpe(
  texts: Iterable[str], vocab_size: int
) -> tokenizers.Tokenizer:
  """Byte-level BPE, as Llama 3's or Qwen's: any byte is a token."""
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.train_from_iterator(
    texts,
    trainers.BpeTrainer(
      vocab_size=vocab_size,
      special_tokens=[_PAD, _EOS],
      initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
      show_progress=False,
    ),
  )
  return tokenizer


def unigram(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
  """Unigram with single digits and byte fallback, as Gemma's.

  The trainer may find fewer pieces than asked for; the 256 bytes are added to
  what it finds, so that no text is unknown.
  """
  tokenizer = tokenizers.Tokenizer(models.Unigram())
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Metaspace(prepend_scheme='never'),
      pre_tokenizers.Digits(individual_digits=True),
    ]
  )
  special = [_PAD, _EOS, _UNKNOWN]
  bytes_ = [f'<0x{b:02X}>' for b in range(256)]
  tokenizer.train_from_iterator(
    texts,
    trainers.UnigramTrainer(
      vocab_size=max(vocab_size - len(special) - len(bytes_), 1),
      unk_token=_UNKNOWN,
      special_tokens=[_UNKNOWN],
      show_progress=False,
    ),
  )
  learned = json.loads(tokenizer.to_str())['model']['vocab']
  tokenizer.model = models.Unigram(
    [(piece, _NEVER) for piece in special + bytes_]
    + [(piece, score) for piece, score in learned if piece != _UNKNOWN],
    unk_id=special.index(_UNKNOWN),
    byte_fallback=True,
  )
  tokenizer.decoder = decoders.Sequence(
    [
      decoders.Replace('\u2581', ' '),
      decoders.ByteFallback(),
      decoders.Fuse(),
    ]
  )
  return tokenizer


KINDS = {'bpe': byte_level_bpe, 'unigram': unigram}


def train(kind: str, texts: Iterable[str], vocab_size: int, folder: str):
  """Trains a tokenizer and saves it in `folder`, unless it is there already."""
  if os.path.exists(os.path.join(folder, 'tokenizer.json')):
    return
  tokenizer = checks.choose(kind, KINDS, 'tokenizer')(texts, vocab_size)
  import transformers

  transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizer,
    pad_token=_PAD,
    eos_token=_EOS,
    unk_token=_UNKNOWN if kind == 'unigram' else None,
    clean_up_tokenization_spaces=False,
  ).save_pretrained(folder)
