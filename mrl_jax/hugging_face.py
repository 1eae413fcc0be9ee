"""Tokenizers as Hugging Face folders; `transformers` is imported when used.

It takes a second to import, and warns that torch, which nothing here uses, is
missing.
"""

from collections.abc import Mapping
import json
import os
import shutil

import tokenizers

from mrl_jax import checks
from mrl_jax import files

_GENERATION = 'generation_config.json'
_PROMPT = '{prompt}'
# Configs, tokenizers, their old forms, and chat templates.
_BESIDE_WEIGHTS = ('.json', '.txt', '.model', '.jinja')


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


def stop_ids(path: str) -> tuple[int, ...]:
  """What `generation_config.json` says that a completion ends with.

  Nothing where it does not say so, or is missing.

  Args:
    path: a folder or a hub name.

  Raises:
    InputError: it is malformed.
  """
  file = os.path.join(path, _GENERATION)
  try:
    found = _transformers().GenerationConfig.from_pretrained(path).eos_token_id
  except (OSError, TypeError, ValueError) as error:
    # A file that is missing and one that is not JSON are the same error.
    checks.require(not os.path.exists(file), f'{file} is malformed: {error}')
    return ()
  if found is None:
    return ()
  ids = found if isinstance(found, list) else [found]
  checks.require(
    all(type(i) is int for i in ids),
    f'{file}: eos_token_id = {found!r} is neither an id nor a list of ids',
  )
  return tuple(ids)


def chat_template(
  tokenizer, system: str = '', thinking: bool | None = None
) -> tuple[str, str]:
  """What a tokenizer's chat template writes before and after a prompt.

  Args:
    tokenizer: of `load_tokenizer`.
    system: the system prompt; '' is none.
    thinking: the template's `enable_thinking`; None leaves it to the template.

  Raises:
    InputError: there is no template, or it cannot write such a chat.
  """
  path = tokenizer.name_or_path
  checks.require(
    tokenizer.chat_template is not None,
    f'the tokenizer at {path!r} has no chat template; give a plain one, such '
    "as '{prompt}\\n'",
  )
  messages = [{'role': 'system', 'content': system}] if system else []
  messages.append({'role': 'user', 'content': _PROMPT})
  options = {} if thinking is None else {'enable_thinking': thinking}
  try:
    text = tokenizer.apply_chat_template(
      messages, tokenize=False, add_generation_prompt=True, **options
    )
  except Exception as error:  # A template is a program, and may raise anything.
    raise checks.InputError(
      f'the chat template at {path!r} cannot write a prompt'
      f'{" with a system prompt" if system else ""}: {error}'
    ) from error
  count = text.count(_PROMPT)
  checks.require(
    count == 1,
    f'the chat template at {path!r} wrote {_PROMPT!r}, which stands for the '
    f'prompt, {count} times in {text!r}; it must be there once',
  )
  before, after = text.split(_PROMPT)
  return before, after


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


def load_config(path: str) -> dict:
  """The config of the model at `path`, with all that its family takes for set.

  Raises:
    InputError: there is none, or `transformers` does not know its family.
  """
  try:
    config = _transformers().AutoConfig.from_pretrained(path)
  except Exception as error:  # Fields that cannot be raise anything.
    raise checks.InputError(
      f'no config of a model could be loaded from {path!r}: {error}'
    ) from error
  return config.to_dict()


def weights_folder(path: str) -> str:
  """The folder with a model's weights; a hub name is downloaded.

  Raises:
    InputError: it is neither a folder nor a name that the hub answers to.
  """
  if os.path.isdir(path):
    return path
  import huggingface_hub
  from huggingface_hub import errors

  try:
    return huggingface_hub.snapshot_download(
      path, allow_patterns=['*.safetensors', '*.json']
    )
  except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
    raise checks.InputError(
      f'{path!r} is not a folder, and the hub did not give it: {error}'
    ) from error


def source_dtype(path: str) -> str | None:
  """What the weights at `path` are said to be stored as."""
  dtype = load_config(path).get('dtype')
  return dtype and str(dtype).removeprefix('torch.')


def copy_config(path: str, tokenizer: str, folder: str, dtype: str) -> None:
  """Writes what belongs to the model at `path`, but the weights, to `folder`.

  Its tokenizer may be that at another path.
  """
  source = weights_folder(path)
  for name in os.listdir(source):
    if name.endswith(_BESIDE_WEIGHTS) and not name.endswith('.index.json'):
      shutil.copyfile(os.path.join(source, name), os.path.join(folder, name))
  if tokenizer != path:
    load_tokenizer(tokenizer).save_pretrained(folder)
  about = os.path.join(folder, 'config.json')
  with open(about, encoding='utf-8') as f:
    values = json.load(f)
  values.pop('torch_dtype', None)  # As transformers 4 calls it.
  files.write(about, json.dumps({**values, 'dtype': dtype}, indent=2))


def save_config(
  values: Mapping, tokenizer: str, folder: str, dtype: str
) -> None:
  """Writes the config of a model, and a copy of its tokenizer, to `folder`."""
  special = load_tokenizer(tokenizer)
  special.save_pretrained(folder)
  ends = sorted({special.eos_token_id, *stop_ids(tokenizer)})
  ids = {
    'bos_token_id': special.bos_token_id,
    'eos_token_id': ends if len(ends) > 1 else special.eos_token_id,
    'pad_token_id': special.pad_token_id,
  }
  kind = values['model_type']
  fields = {key: v for key, v in values.items() if key != 'model_type'}
  transformers = _transformers()
  transformers.AutoConfig.for_model(
    kind, **fields, **ids, dtype=dtype
  ).save_pretrained(folder)
  transformers.GenerationConfig(**ids).save_pretrained(folder)
