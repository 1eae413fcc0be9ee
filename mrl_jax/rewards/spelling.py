r"""One spelling for answers that are written in different ways.

  plain(r'**$1{,}000**') == plain(r'\(1,000 \text{ dollars}\)') == '1,000'
  number(plain('4.5e33')) == number(plain(r'4.5\times10^{33}'))

Where math-verify reads an answer as something else, it is rewritten here. The
value decides: units are left out, and not compared.
"""

import fractions
import re

from mrl_jax.rewards import verify

_MAX_EXPONENT = 400  # Of ten.
# Possessive: text of a model must not make a search quadratic.
_DIGITS = r'[-+]?(?:(?:\d{1,3}(?:,\d{3})++|\d++)\.?+\d*+|\.\d++)'
_VALUE = (
  rf'(?:{_DIGITS}(?:/\d+)?|{_DIGITS} ?\\times ?10\^\{{[-+]?\d+\}}'
  r'|[-+]?\\[dt]?frac ?(?:\{\d+\}\{\d+\}|\d\d))'
)
_TEXT = r'\\(?:text|textrm|textnormal|mathrm|mbox|rm)\b ?'
_BOLD = r'\\(?:textbf|mathbf|boldsymbol|bm|bf)\b ?'
_INSIDE = r'((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)'  # With braces, three deep.
_WORDS = r"[A-Za-z][A-Za-z.,'/ -]*[A-Za-z.]"
_SHORT = 'cm|mm|km|kg|mg|lb|ft|mi|yd|oz|m[lL]|hr|min|sec|mph'
# These words change the value. `psi`, `sec` and `min` do not: they are units.
_NOT_UNITS = (
  r'(?![^{}]*\b(?i:(?:hundred|thousand|million|billion|trillion|dozen|half|'
  r'halves|thirds?|\w*(?:tenth|hundredth|thousandth|millionth|fourth|fifth|'
  r'sixth|seventh|eighth|ninth)|ten|squared|cubed|factorial|pi|and|or|to|not|'
  r'plus|minus|over|mod|choose|sqrt|sin|cos|tan|log|exp|inf|infinity|e)s?|'
  r'[ap]\.?m|noon|midnight|b\.?c(?:\.?e)?|a\.?d|c\.?e|negative|below|base|than|'
  r'root|doubled|tripled|gross|score|kilo|mega|nano|alpha|beta|gamma|delta|'
  r'epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|omicron|rho|sigma|tau|'
  r'upsilon|phi|chi|omega|(?:arc|a)?(?:sin|cos|tan|cot|csc)h?|arcsec|ln)\b)'
)
# One letter may be a variable or a constant: 148.5 e, 2 x.
_LATEX_UNIT = (
  rf'{_TEXT}\{{{_NOT_UNITS}(?! ?(?:[eijkx-z]|\\pi) ?\}})'
  r'[^{}\d=<>]*\}(?: ?\^ ?\{?-?\d\}?)?'
)

# Applied everywhere, in this order.
_RULES = tuple(
  (re.compile(pattern), new)
  for pattern, new in (
    (r'\s+', ' '),
    ('[\u2212\u2013]', '-'),
    ('\u00d7', r'\\times '),
    ('\u00b0', r'^\\circ '),
    # Delimiters of formulas and currencies; but `\\[` starts a row.
    ('\\\\?[$\u20ac\u00a3]|(?<!\\\\)\\\\[()\\[\\]]', ''),
    (r'(?<!\\)\\!|\\displaystyle\b|\\(?:left|right)(?= ?[()])', ''),
    (r'(?<!\\)\\[,;: ]|~|\\q?quad\b', ' '),
    (r'\{,\}', ','),
    # Bold: as a whole, around a number, in Markdown; else `**` is a power.
    (rf'^ *{_BOLD}\{{{_INSIDE}\}} *$', r'\1'),
    (rf'(?:{_BOLD}|{_TEXT})\{{([^{{}}A-Za-z\\]*)\}}', r'\1'),
    (r'\\bf\b ?(?!\{)', ''),
    (r'^ *\*\* ?(.*?) ?(?:\*\*)?[ .]*$', r'\1'),
    (r'\*\*', '^'),
    # More than a word; math-verify reads one itself.
    (rf'^ *{_TEXT}\{{([^{{}}]*[^ {{}}] [^{{}}]*)\}} *$', r'\1'),
    # To math-verify, `e` is Euler's number, and `%` starts a comment.
    (r'(\d\.?)[eE]([-+]?\d+)(?![\d.])', r'\1 \\times 10^{\2}'),
    (
      r'(\d) ?(?:\\times|\\cdot|\*|x) ?10 ?\^ ?(?:\{ ?([-+]?\d+) ?\}|([-+]?\d+))',
      r'\1 \\times 10^{\2\3}',
    ),
    (rf'(?<=\d) ?(?:{_TEXT}\{{ ?)?per ?cent(?:age)?\b ?\}}?', r'\\%'),
    (r'(?<!\\) ?%', r'\\%'),
    (r' +', ' '),
    (r'^ | $|(?<!\d)\.$|(?<=\d)\.(?= ?$)', ''),
    (rf'(?<=\d) ?({_TEXT}\{{ ?)?([AaPp])\.?[mM]\b\.? ?(?(1)\}})$', r' \2m'),
    # Units: in LaTeX, of degrees, and behind a value as words.
    (
      rf'(?<=[\d)}}]) ?{_LATEX_UNIT}(?:(?:[ /]|\\cdot)*{_LATEX_UNIT})*+'
      rf'(?: \({_WORDS}\))?$',
      '',
    ),
    (r'(?<=\d) ?\^ ?(?:\\circ|\{ ?\\circ ?\}) ?[CF]?$', ''),
    (
      rf'^(\(?{_VALUE}\)?)(?: \({_NOT_UNITS}{_WORDS}\)'
      rf'| ?(?:{_SHORT})(?: ?\^ ?\{{?\d\}}?)?'
      rf'| {_NOT_UNITS}[A-Za-z]{{3,}}(?:[ /-]{_WORDS})?)$',
      r'\1',
    ),
    # Parentheses around a value, which is no point such as `(1,200)`.
    (rf'^([-+]?)[({{]+(?!.*,) ?({_VALUE}(?:\\%)?) ?[)}}]+$', r'\1\2'),
    (r'^(-?\d+) (\d+)/(\d+)$', r'\1\\frac{\2}{\3}'),
    (r'^([-+]?)\\[dt]?frac ?(?:\{(\d+)\}\{(\d+)\}|(\d)(\d))$', r'\1\2\4/\3\5'),
  )
)
_WORD = re.compile(r'(?![a-z]{2}$)[A-Za-z]{2,}|no|on')  # `ab` is a product.
_SUBSCRIPT = re.compile(r'\(?([^\W_]+)\)?_ ?\{?([^\W_]+)\}?')  # As of a base.
_SCIENTIFIC = re.compile(r'(?:(.+) \\times )?10\^\{([-+]?\d{1,5})\}')


def plain(text: str) -> str:
  """The answer without markup and unit."""
  for pattern, new in _RULES:
    text = pattern.sub(new, text)
  return text.removeprefix('+')


def number(text: str) -> fractions.Fraction | None:
  """The number that a plain answer is, if it is one."""
  scientific = _SCIENTIFIC.fullmatch(text)
  if not scientific:
    return verify.number(text)
  mantissa, exponent = verify.number(scientific[1] or '1'), int(scientific[2])
  if mantissa is None or abs(exponent) > _MAX_EXPONENT:
    return None
  return mantissa * fractions.Fraction(10) ** exponent


def same(given: str, gold: str) -> bool | None:
  r"""Whether plain answers are equal; None if only mathematics can tell.

  A percentage is equal to its number and to its share: 10\% is 10 and 0.1.
  """
  if given == gold:
    return True
  # math-verify reads a word as a product of letters, and drops a base.
  if _WORD.fullmatch(given) and _WORD.fullmatch(gold):
    return not gold.isupper() and given.lower() == gold.lower()
  names = [_SUBSCRIPT.fullmatch(text.lower()) for text in (given, gold)]
  if all(names):
    return names[0].groups() == names[1].groups()
  values = []
  for text in (given, gold):
    value = number(text.removesuffix(r'\%').rstrip())
    if value is None:
      return None
    values.append((value, value / 100 if text.endswith(r'\%') else value))
  return any(a == b for a, b in zip(*values, strict=True))
