"""Exact verification of an answer against the gold one.

Nothing of a completion is evaluated: numbers are read as fractions, and
anything else is compared as text.
"""

import fractions
import re

from mrl_jax import records

NAME = 'exact'  # Of this verifier, in records.

_NUMBER = re.compile(r'-?(\d+(\.\d*)?|\.\d+)(/\d+)?')
_MAX_CHARACTERS = 100  # Of an answer; longer ones are compared as text.


def answer(text: str, marker: str) -> str | None:
  """What stands after the last `marker`; None without one."""
  _, found, rest = text.rpartition(marker)
  return ' '.join(rest.split()) if found else None


def verify(text: str, gold: str, marker: str) -> records.Verdict:
  """Whether the answer in `text` is `gold`, as text or as a number.

  Args:
    text: a completion; its answer follows the last `marker`.
    gold: the right answer, bare or behind a `marker` of its own.
    marker: such as '####'.
  """
  given = answer(text, marker)
  if not given:
    return 'unparsable'
  if marker in gold:
    gold = answer(gold, marker)
  gold = ' '.join(gold.split())
  if given == gold:
    return 'correct'
  number = _number(given)
  same = number is not None and number == _number(gold)
  return 'correct' if same else 'wrong'


def _number(text: str) -> fractions.Fraction | None:
  text = text.replace('$', '').replace(',', '').removesuffix('.').strip()
  if len(text) > _MAX_CHARACTERS or not _NUMBER.fullmatch(text):
    return None
  whole, _, denominator = text.partition('/')
  if denominator and not int(denominator):
    return None
  return fractions.Fraction(whole) / int(denominator or 1)
