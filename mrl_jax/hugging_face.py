"""Configs, tokenizers and chat templates of Hugging Face folders.

`transformers` is imported only when it is used: the import takes a second, and
warns that torch, which nothing here uses, is missing.
"""

from collections.abc import Mapping
import json
import os
import shutil

import tokenizers

from mrl_jax import checks
from mrl_jax import files
from mrl_jax import processes

_PROMPT = '{prompt}'
# Prepended to a template, so that its text does not depend on today's date. The
# date is the default of Llama 3's template.
_SAME_DAY = (
  '{% macro strftime_now(form) %}{{ form'
  " | replace('%d', '26') | replace('%b', 'Jul') | replace('%B', 'July')"
  " | replace('%m', '07') | replace('%Y', '2024') }}{% endmacro %}"
)
# A template is a program: it runs in a process that can be killed.
_RENDER_S = 5.0
_renderer = processes.Pool('mrl_jax.chat_templates:render', _RENDER_S, 1)
# Suffixes of configs, tokenizers in new and old formats, and chat templates.
_BESIDE_WEIGHTS = ('.json', '.txt', '.model', '.jinja')


def _transformers():
  os.environ.setdefault('TRANSFORMERS_VERBOSITY', 'error')
  import transformers

  return transformers


def load_tokenizer(path: str):
  """Loads the fast tokenizer at `path`, a folder or a hub name.

  Raises InputError if there is none, or it has no end-of-sequence token.
  """
  tokenizer = _load('AutoTokenizer', 'tokenizer', path)
  checks.require(
    tokenizer.is_fast and tokenizer.eos_token_id is not None,
    f'the tokenizer at {path!r} must be a fast one with an end-of-sequence '
    'token; name it in its tokenizer_config.json',
  )
  return tokenizer


def stop_ids(path: str) -> tuple[int, ...]:
  """The stop tokens of the model at `path`, a folder or a hub name.

  They are in its generation config or else in its config; () if in neither.
  Raises InputError if a file is malformed, or the hub does not answer.
  """
  folder = _folder(path, '*config.json')
  for name in ('generation_config.json', 'config.json'):
    file = os.path.join(folder, name)
    try:
      with open(file, encoding='utf-8') as f:
        ids = json.load(f).get('eos_token_id')
    except FileNotFoundError:
      continue
    except (ValueError, AttributeError) as error:
      raise checks.InputError(f'{file} is malformed: {error}') from error
    if ids is not None:
      ids = ids if isinstance(ids, list) else [ids]
      checks.require(
        all(type(i) is int for i in ids),
        f'{file}: eos_token_id must be an id or a list of ids, not {ids!r}',
      )
      return tuple(ids)
  return ()


def weights_folder(path: str) -> str:
  """The folder with a model's weights, downloaded if `path` is a hub name.

  Raises InputError if `path` is neither a folder nor a name on the hub.
  """
  return _folder(path, '*.safetensors', *(f'*{s}' for s in _BESIDE_WEIGHTS))


def _folder(path, *patterns) -> str:
  """The folder `path`, or a download of the files that match the patterns."""
  if os.path.isdir(path):
    return path
  import huggingface_hub
  from huggingface_hub import errors

  try:
    return huggingface_hub.snapshot_download(
      path, allow_patterns=patterns, ignore_patterns=['*/*', 'consolidated*']
    )
  except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
    raise checks.InputError(
      f'{path!r} is not a folder, and cannot be downloaded from the hub: {error}'
    ) from error


def chat_template(
  tokenizer, system: str = '', thinking: bool | None = None
) -> tuple[str, str]:
  """The text of a tokenizer's chat template before and after a prompt.

  Some templates write today's date; here it is always 26 July 2024, so that
  runs can be repeated. Some templates trim the user's message; prompts are not
  trimmed.

  `system` is the system prompt, '' for none; `thinking` is the template's
  `enable_thinking`, None for its default. Raises InputError if there is no
  template, if it cannot write such a chat, or takes too much time or memory.
  """
  path = tokenizer.name_or_path
  checks.require(
    tokenizer.chat_template is not None,
    f'the tokenizer at {path!r} has no chat template; give a plain one, such '
    "as '{prompt}\\n'",
  )
  messages = [{'role': 'system', 'content': system}] if system else []
  messages.append({'role': 'user', 'content': _PROMPT})

  def render(thinking):
    switch = {} if thinking is None else {'enable_thinking': thinking}
    template = _SAME_DAY + tokenizer.get_chat_template()
    variables = {**tokenizer.special_tokens_map, **switch}
    (reply,) = _renderer.map([(template, messages, variables)])
    if isinstance(reply, str):
      limit = f'{_RENDER_S:.0f} s of CPU time, or a gibibyte of memory'
      reply = '', f'it ended in a {reply}; it may take {limit}'
    text, error = reply
    checks.require(
      not error,
      f'the chat template at {path!r} cannot write a prompt'
      f'{" with a system prompt" if system else ""}: {error}',
    )
    return text

  text = render(thinking)
  checks.require(
    thinking is None or text != render(not thinking),
    f'the chat template at {path!r} writes the same with and without thinking; '
    'leave it to the template',
  )
  parts = text.split(_PROMPT)
  checks.require(
    len(parts) == 2,
    f'the chat template at {path!r} wrote {_PROMPT!r}, which stands for the '
    f'prompt, {len(parts) - 1} times in {text!r}; it must be there once',
  )
  return tuple(parts)


def save_tokenizer(
  tokenizer: tokenizers.Tokenizer, folder: str, **special_tokens: str
) -> None:
  """Writes a folder that `load_tokenizer` can read."""
  with files.new_folder(folder) as aside:
    _transformers().PreTrainedTokenizerFast(
      tokenizer_object=tokenizer,
      clean_up_tokenization_spaces=False,
      **special_tokens,
    ).save_pretrained(aside)


def load_config(path: str) -> dict:
  """Loads the config of the model at `path`, with the defaults of its family.

  Raises InputError if there is none, or if `transformers` lacks the family.
  """
  return _load('AutoConfig', 'config of a model', path).to_dict()


def with_defaults(values: Mapping) -> dict:
  """The `values` of a model's config, with the defaults of its family."""
  return _transformers().AutoConfig.for_model(**values).to_dict()


def _load(kind, what, path):
  try:
    auto = getattr(_transformers(), kind)
    return auto.from_pretrained(path, trust_remote_code=False)
  except Exception as error:  # `transformers` may raise anything.
    raise checks.InputError(
      f'no {what} could be loaded from {path!r}: {error}'
    ) from error


def source_dtype(path: str) -> str | None:
  """The dtype in the config at `path`; None if it names none."""
  dtype = load_config(path).get('dtype')
  return dtype and str(dtype).removeprefix('torch.')


def copy_config(path: str, tokenizer: str, folder: str, dtype: str) -> None:
  """Copies the config of the model at `path`, but not its weights, to `folder`.

  The tokenizer is copied from the path `tokenizer`, which may be the same.
  """
  source = weights_folder(path)
  names = ['config.json']
  if tokenizer == path:
    names = [n for n in os.listdir(source) if n.endswith(_BESIDE_WEIGHTS)]
  else:
    _save_tokenizer(tokenizer, folder)
  for name in names:
    if not name.endswith('.index.json'):  # An index of shards of weights.
      shutil.copyfile(os.path.join(source, name), os.path.join(folder, name))
  about = os.path.join(folder, 'config.json')
  with open(about, encoding='utf-8') as f:
    values = json.load(f)
  values.pop('torch_dtype', None)  # The name of `dtype` in transformers 4.
  files.write(about, json.dumps({**values, 'dtype': dtype}, indent=2))


def save_config(
  values: Mapping, tokenizer: str, folder: str, dtype: str
) -> None:
  """Writes a model's config, and a copy of its tokenizer, to `folder`."""
  ids = _save_tokenizer(tokenizer, folder)
  config = _transformers().AutoConfig.for_model(**values, **ids, dtype=dtype)
  config.save_pretrained(folder)


def _save_tokenizer(path, folder) -> dict:
  """Writes a tokenizer and a generation config; returns its special ids."""
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
