"""Tokenizers as Hugging Face folders; `transformers` is imported when used.

It takes a second to import, and warns that torch, which nothing here uses, is
missing.
"""

import os

import tokenizers

from mrl_jax import checks
from mrl_jax import files


def _transformers():
  os.environ.setdefault('TRANSFORMERS_VERBOSITY', 'error')
  import transformers

  return transformers


def load_tokenizer(path: str):
  """The fast tokenizer at `path`, a folder or a hub name.

  Raises:
    InputError: there is none, or it has no end-of-sequence token.
  """
  try:
    tokenizer = _transformers().AutoTokenizer.from_pretrained(path)
  except (OSError, ValueError, KeyError) as error:
    raise checks.InputError(
      f'no tokenizer could be loaded from {path!r}: {error}'
    ) from error
  checks.require(
    tokenizer.is_fast and tokenizer.eos_token_id is not None,
    f'the tokenizer at {path!r} must be a fast one with an end-of-sequence '
    'token; name it in its tokenizer_config.json',
  )
  return tokenizer


def save_tokenizer(
  tokenizer: tokenizers.Tokenizer, folder: str, **special_tokens: str
) -> None:
  """Writes a folder that `load_tokenizer` reads."""
  with files.new_folder(folder) as aside:
    _transformers().PreTrainedTokenizerFast(
      tokenizer_object=tokenizer,
      clean_up_tokenization_spaces=False,
      **special_tokens,
    ).save_pretrained(aside)
