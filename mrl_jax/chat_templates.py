"""Renders the chat templates of tokenizers.

Imported only in processes that can be killed: a template is a program, which may
never end.
"""

from collections.abc import Mapping, Sequence

from transformers.utils import chat_template_utils

_MAX_CHARACTERS = 10**6


def render(
  template: str, messages: Sequence[Mapping], variables: Mapping
) -> tuple[str, str]:
  """The text of a chat up to the answer; ('', error) if there is none."""
  try:
    (text,), _ = chat_template_utils.render_jinja_template(
      [messages],
      chat_template=template,
      add_generation_prompt=True,
      **variables,
    )
  except Exception as error:  # A template may raise anything.
    return '', (str(error) or type(error).__name__)[:_MAX_CHARACTERS]
  if len(text) > _MAX_CHARACTERS:
    return '', f'it wrote {len(text):,} characters'
  return text, ''
