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

_PROMPT = '{prompt}'
# Put before a template, so that it cannot tell today's date: it is that which
# Llama 3's writes where there is no clock.
_SAME_DAY = (
  '{% macro strftime_now(form) %}{{ form'
  " | replace('%d', '26') | replace('%b', 'Jul') | replace('%B', 'July')"
  " | replace('%m', '07') | replace('%Y', '2024') }}{% endmacro %}"
)
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
  except Exception as error:  # Files that cannot be read raise anything.
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
  """What a completion ends with, by a model's config of generation, or its own.

  Nothing where neither is there, or says so.

  Args:
    path: a folder or a hub name.

  Raises:
    InputError: one is malformed, or the hub does not answer.
  """
  for name in ('generation_config.json', 'config.json'):
    found = _field(path, name, 'eos_token_id')
    if found is not None:
      break
  else:
    return ()
  ids = found if isinstance(found, list) else [found]
  checks.require(
    all(type(i) is int for i in ids),
    f'{name} of {path!r}: eos_token_id = {found!r} is neither an id nor a list '
    'of ids',
  )
  return tuple(ids)


def _field(path, name, key):
  """What a JSON file says of `key`; None without such a file."""
  file = os.path.join(path, name)
  if not os.path.isdir(path):
    file = _downloaded(path, name)
  if file is None or not os.path.exists(file):
    return None
  try:
    with open(file, encoding='utf-8') as f:
      return json.load(f).get(key)
  except (ValueError, AttributeError) as error:
    raise checks.InputError(f'{file} is malformed: {error}') from error


def _downloaded(path, name) -> str | None:
  """A file of the hub; None if there is no such file."""
  import huggingface_hub
  from huggingface_hub import errors

  try:
    return huggingface_hub.hf_hub_download(path, name)
  except errors.RemoteEntryNotFoundError:
    return None
  except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
    raise _no_answer(path, error) from error


def _no_answer(path, error) -> checks.InputError:
  return checks.InputError(
    f'{path!r} is not a folder, and the hub did not give it: {error}'
  )


def chat_template(
  tokenizer, system: str = '', thinking: bool | None = None
) -> tuple[str, str]:
  """What a tokenizer's chat template writes before and after a prompt.

  Some templates write today's date; here, every day is 26 July 2024, so that a
  run can be repeated. Some trim what the user says; prompts are not trimmed.

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

  def render(**options):
    return tokenizer.apply_chat_template(
      messages,
      tokenize=False,
      add_generation_prompt=True,
      chat_template=_SAME_DAY + tokenizer.get_chat_template(),
      **options,
    )

  try:
    if thinking is None:
      text = render()
    else:
      text = render(enable_thinking=thinking)
      switches = text != render(enable_thinking=not thinking)
  except Exception as error:  # A template is a program, and may raise anything.
    raise checks.InputError(
      f'the chat template at {path!r} cannot write a prompt'
      f'{" with a system prompt" if system else ""}: {error}'
    ) from error
  checks.require(
    thinking is None or switches,
    f'the chat template at {path!r} writes the same with and without thinking; '
    'leave it to the template',
  )
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
      path,
      allow_patterns=['*.safetensors', '*.json', '*.txt', '*.model', '*.jinja'],
      ignore_patterns=['*/*', 'consolidated*'],
    )
  except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
    raise _no_answer(path, error) from error


def source_dtype(path: str) -> str | None:
  """What the weights at `path` are said to be stored as."""
  dtype = load_config(path).get('dtype')
  return dtype and str(dtype).removeprefix('torch.')


def copy_config(path: str, tokenizer: str, folder: str, dtype: str) -> None:
  """Writes what belongs to the model at `path`, but the weights, to `folder`.

  Its tokenizer may be that at another path.
  """
  source = weights_folder(path)
  mine = tokenizer == path
  for name in os.listdir(source):
    beside = name.endswith(_BESIDE_WEIGHTS) and not name.endswith('.index.json')
    if beside if mine else name == 'config.json':
      shutil.copyfile(os.path.join(source, name), os.path.join(folder, name))
  if not mine:
    _save_tokenizer(tokenizer, folder)
  about = os.path.join(folder, 'config.json')
  with open(about, encoding='utf-8') as f:
    values = json.load(f)
  values.pop('torch_dtype', None)  # As transformers 4 calls it.
  files.write(about, json.dumps({**values, 'dtype': dtype}, indent=2))


def save_config(
  values: Mapping, tokenizer: str, folder: str, dtype: str
) -> None:
  """Writes the config of a model, and a copy of its tokenizer, to `folder`."""
  ids = _save_tokenizer(tokenizer, folder)
  kind = values['model_type']
  fields = {key: v for key, v in values.items() if key != 'model_type'}
  _transformers().AutoConfig.for_model(
    kind, **fields, **ids, dtype=dtype
  ).save_pretrained(folder)


def _save_tokenizer(path, folder) -> dict:
  """Writes a tokenizer, and its ids of generation, which it returns."""
  tokenizer = load_tokenizer(path)
  tokenizer.save_pretrained(folder)
  ends = sorted({tokenizer.eos_token_id, *stop_ids(path)})
  ids = {
    'bos_token_id': tokenizer.bos_token_id,
    'eos_token_id': ends if len(ends) > 1 else tokenizer.eos_token_id,
    'pad_token_id': tokenizer.pad_token_id,
  }
  _transformers().GenerationConfig(**ids).save_pretrained(folder)
  return ids
