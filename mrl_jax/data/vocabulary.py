"""Tokenizers trained from text, saved as Hugging Face folders."""

from collections.abc import Iterable
import os

import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import trainers

from mrl_jax import checks
from mrl_jax import hugging_face

_PAD, _EOS, _UNKNOWN = '<pad>', '<eos>', '<unk>'


def byte_level_bpe(
  texts: Iterable[str], vocab_size: int
) -> tokenizers.Tokenizer:
  """Byte-level BPE, as in Llama 3 and Qwen: every byte is a token."""
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


def sentencepiece_bpe(
  texts: Iterable[str], vocab_size: int
) -> tokenizers.Tokenizer:
  """SentencePiece-style BPE, as in Gemma: single digits and byte fallback.

  Unigram, the other style of SentencePiece, can be loaded but not trained: its
  trainer is not deterministic.
  """
  learner = tokenizers.Tokenizer(
    models.BPE(unk_token=_UNKNOWN, byte_fallback=True, fuse_unk=True)
  )
  learner.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Metaspace(prepend_scheme='never'),
      pre_tokenizers.Digits(individual_digits=True),
    ]
  )
  special = [_PAD, _EOS, _UNKNOWN]
  byte_pieces = [f'<0x{b:02X}>' for b in range(256)]
  learner.train_from_iterator(
    texts,
    trainers.BpeTrainer(
      vocab_size=vocab_size,
      special_tokens=special + byte_pieces,
      show_progress=False,
    ),
  )
  # A new tokenizer: in the learner, byte pieces are special tokens too.
  tokenizer = tokenizers.Tokenizer(learner.model)
  tokenizer.pre_tokenizer = learner.pre_tokenizer
  tokenizer.decoder = decoders.Sequence(
    [decoders.Replace('\u2581', ' '), decoders.ByteFallback(), decoders.Fuse()]
  )
  tokenizer.add_special_tokens(special)
  return tokenizer


KINDS = {'byte_level': byte_level_bpe, 'sentencepiece': sentencepiece_bpe}


def train(kind: str, texts: Iterable[str], vocab_size: int, folder: str):
  """Trains a tokenizer and saves it in `folder`, unless the folder exists."""
  if os.path.isdir(folder):
    return
  tokenizer = checks.choose(kind, KINDS, 'tokenizer')(texts, vocab_size)
  hugging_face.save_tokenizer(tokenizer, folder, pad_token=_PAD, eos_token=_EOS)
