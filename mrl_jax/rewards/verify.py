"""Exact verification of an answer against the gold answer.

Nothing in a completion is evaluated: numbers are read as fractions, and
everything else is compared as text.
"""

from collections.abc import Sequence
import fractions
import re

from mrl_jax import records

_NUMBER = re.compile(r'-?(\d+(\.\d*)?|\.\d+)(/\d+)?')
_THOUSANDS = re.compile(r'-?\d{1,3}(,\d{3})+(\.\d*)?')  # Not a list.
_MAX_CHARACTERS = 100  # Longer answers are compared as text.


def answer(text: str, marker: str) -> str | None:
  """The text after the last `marker`; None if there is no marker."""
  _, found, rest = text.rpartition(marker)
  return ' '.join(rest.split()) if found else None


def verify(text: str, gold: str, marker: str) -> records.Verdict:
  """Compares the answer in `text` with `gold`, as text or as a number.

  The answer follows the last `marker`, for example '####'. The gold answer is
  bare, or follows a marker of its own.
  """
  given = answer(text, marker)
  if not given:
    return 'unparsable'
  if marker in gold:
    gold = answer(gold, marker)
  return 'correct' if same(given, ' '.join(gold.split())) else 'wrong'


def same(given: str, gold: str) -> bool | None:
  """Whether two answers are equal; None if they differ and one is not a number."""
  if given == gold:
    return True
  numbers = number(given), number(gold)
  return None if None in numbers else numbers[0] == numbers[1]


class Exact:
  """The exact verifier; `mathematics.Mathematics` is the other one.

  with contextlib.closing(Exact(marker='####')) as verifier:
    verdicts = verifier.verify_all([('so it is #### 13', '13'), ...])
  """

  counted = False  # Whether results are metrics: here they are the verdicts.

  def __init__(self, marker: str):
    self._marker = marker

  def bare(self, text: str) -> str:
    """The answer in a gold answer, which may follow a marker of its own."""
    return text.rpartition(self._marker)[2]

  def stated(self, answer: str) -> str:
    """A completion that gives this answer."""
    return f'{self._marker} {answer}'

  def verify_all(
    self, answers: Sequence[tuple[str, str]]
  ) -> list[records.Verdict]:
    """The verdict on each (completion, gold answer)."""
    return [verify(text, gold, self._marker) for text, gold in answers]

  def close(self) -> None:
    """Does nothing; this verifier has no processes."""


def number(text: str) -> fractions.Fraction | None:
  text = text.replace('$', '').removesuffix('.').strip()
  if _THOUSANDS.fullmatch(text):
    text = text.replace(',', '')
  if len(text) > _MAX_CHARACTERS or not _NUMBER.fullmatch(text):
    return None
  whole, _, denominator = text.partition('/')
  if denominator and not int(denominator):
    return None
  return fractions.Fraction(whole) / int(denominator or 1)
