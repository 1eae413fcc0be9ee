"""Exact verification of an answer against the gold one.

Nothing of a completion is evaluated: numbers are read as fractions, and
anything else is compared as text.
"""

from collections.abc import Sequence
import fractions
import re

from mrl_jax import records

_NUMBER = re.compile(r'-?(\d+(\.\d*)?|\.\d+)(/\d+)?')
_THOUSANDS = re.compile(r'-?\d{1,3}(,\d{3})+(\.\d*)?')  # And no list.
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
  return 'correct' if same(given, ' '.join(gold.split())) else 'wrong'


def same(given: str, gold: str) -> bool | None:
  """Whether two answers are equal; None if they differ and one is no number."""
  if given == gold:
    return True
  numbers = _number(given), _number(gold)
  return None if None in numbers else numbers[0] == numbers[1]


class Exact:
  """The verifier of a run.

      with contextlib.closing(Exact(marker='####')) as verifier:
        verdicts = verifier.verify_all([('so it is #### 13', '13'), ...])

  `mathematics.Mathematics` is the other one.
  """

  def __init__(self, marker: str):
    self._marker = marker

  def verify_all(
    self, answers: Sequence[tuple[str, str]]
  ) -> list[records.Verdict]:
    """The verdict on each (completion, gold answer)."""
    return [verify(text, gold, self._marker) for text, gold in answers]

  def since_last(self) -> dict[str, int]:
    """Nothing: its verdicts, which are in records, say it all."""
    return {}

  def close(self) -> None:
    """There is nothing to close."""


def _number(text: str) -> fractions.Fraction | None:
  text = text.replace('$', '').removesuffix('.').strip()
  if _THOUSANDS.fullmatch(text):
    text = text.replace(',', '')
  if len(text) > _MAX_CHARACTERS or not _NUMBER.fullmatch(text):
    return None
  whole, _, denominator = text.partition('/')
  if denominator and not int(denominator):
    return None
  return fractions.Fraction(whole) / int(denominator or 1)
