"""Compares mathematical answers by math-verify.

Imported only in processes that can be killed: sympy may never end.
"""

import dataclasses

import math_verify
import sympy

from mrl_jax import records
from mrl_jax.rewards import spelling

_SMALL = 1e-3  # math-verify compares numbers to six decimals.
_LATEX = math_verify.LatexExtractionConfig()
# Its units are letters such as `ab` and `t`, so that it reads `2ab` as 2.
_LATEX = dataclasses.replace(
  _LATEX,
  normalization_config=dataclasses.replace(
    _LATEX.normalization_config, units=False
  ),
)


def compare(given: str, gold: str) -> records.Verdict:
  """The verdict on an answer; 'unparsable' if it is not mathematics."""
  given = _parse(given)
  if not given:
    return 'unparsable'
  given, gold = _relative(given, _parse(gold))
  # The process has a time-out; math-verify's own cannot stop everything.
  same = math_verify.verify(
    gold, given, allow_set_relation_comp=True, timeout_seconds=None
  )
  return 'correct' if same else 'wrong'


def _parse(answer):
  # As LaTeX, never as Python, and as a whole, without inner delimiters.
  return math_verify.parse(
    f'${spelling.plain(answer)}$',
    [_LATEX],
    fallback_mode='no_fallback',
    parsing_timeout=None,
  )


def _relative(given: list, gold: list) -> tuple[list, list]:
  """Both over the gold answer, if that is so small that rounding would hide it."""
  (unit,) = gold[:1] or [None]
  if not (isinstance(unit, sympy.Expr) and unit.is_number):
    return given, gold
  try:
    small = 0 < abs(unit.evalf()) < _SMALL
  except TypeError:
    return given, gold
  if not small:
    return given, gold
  sides = [x.rhs if isinstance(x, sympy.Eq) else x for x in given]
  return [x / unit for x in sides if isinstance(x, sympy.Expr)], [sympy.S.One]


# Fills the caches of the parser before the first comparison is timed.
compare(r'\frac{1}{2}x^2', 'x+1')
