"""Compares mathematical answers by math-verify.

Imported only in processes that can be killed: sympy may never end.
"""

import re

import math_verify

from mrl_jax import records

# Delimiters of formulas. A dollar may also be money, and `\\[` starts a row.
_DELIMITERS = re.compile(r'\\?\$|(?<!\\)\\[()\[\]]')


def compare(given: str, gold: str) -> records.Verdict:
  """The verdict on an answer; 'unparsable' if it is not mathematics."""
  given = _parse(given)
  if not given:
    return 'unparsable'
  # The process has a time-out; math-verify's own cannot stop everything.
  same = math_verify.verify(_parse(gold), given, timeout_seconds=None)
  return 'correct' if same else 'wrong'


def _parse(answer):
  # As LaTeX, never as Python, and as a whole, without inner delimiters.
  return math_verify.parse(
    f'${_DELIMITERS.sub("", answer)}$',
    [math_verify.LatexExtractionConfig()],
    fallback_mode='no_fallback',
    parsing_timeout=None,
  )
