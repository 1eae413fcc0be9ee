r"""Verification of mathematical answers, such as `\boxed{\frac{1}{2}}`.

The exact verifier decides answers that are equal as text or as numbers;
math-verify decides the rest, in processes that can be killed.
"""

from collections.abc import Sequence
import importlib.util
import re

from absl import logging

from mrl_jax import checks
from mrl_jax.rewards import processes
from mrl_jax.rewards import verify

_COMPARE = 'mrl_jax.rewards.equivalence:compare'
_BOX = re.compile(r'\\(?:boxed|fbox)\s*\{')
_BRACE = re.compile(r'\\.|[{}]', re.DOTALL)  # Escaped braces do not count.
_MAX_CHARACTERS = 1000  # Longer answers are compared as text.
_MAX_KNOWN = 2**16  # Cached results.


def boxed(text: str) -> str | None:
  r"""The content of the last `\boxed{}` or `\fbox{}`.

  Returns None if there is no box, or if its braces are not balanced.
  """
  boxes = list(_BOX.finditer(text))
  if not boxes:
    return None
  start, depth = boxes[-1].end(), 1
  for brace in _BRACE.finditer(text, start):
    depth += {'{': 1, '}': -1}.get(brace[0], 0)
    if not depth:
      return ' '.join(text[start : brace.start()].split())
  return None


def answer(text: str, marker: str) -> str | None:
  """The content of the last box or, without a box, the text after `marker`."""
  inside = boxed(text)
  return verify.answer(text, marker) if inside is None else inside


class Mathematics:
  """Verifies answers by their mathematical meaning.

  A result depends on the two answers alone, unless it is a timeout or a crash.
  """

  counted = True

  def __init__(self, marker: str, timeout_s: float):
    """Starts no process yet; raises InputError if math-verify is missing.

    An answer without a box follows the last `marker`. The comparison of two
    answers may take `timeout_s` seconds.
    """
    for package in ('math_verify', 'antlr4'):
      checks.require(
        importlib.util.find_spec(package) is not None,
        f"reward.verifier=math needs {package}: pip install -e '.[math]'",
      )
    self._marker = marker
    self._pool = processes.Pool(_COMPARE, timeout_s)
    self._known = {}  # Results by pair, the oldest first.

  def verify_all(self, answers: Sequence[tuple[str, str]]) -> list[str]:
    """The verdict on each (completion, gold answer), 'timeout' or 'crash'.

    Gold answers are bare, in a box, or after a `marker` of their own.
    """
    pairs = [self._pair(*texts) for texts in answers]
    results = {pair: _easy(*pair) or self._known.get(pair) for pair in pairs}
    hard = [pair for pair, result in results.items() if result is None]
    for pair, result in zip(hard, self._pool.map(hard), strict=True):
      results[pair] = result
      self._remember(pair, result)
    return [results[pair] for pair in pairs]

  def close(self) -> None:
    self._pool.close()

  def _pair(self, text, gold):
    known = answer(gold, self._marker)
    return (
      answer(text, self._marker) or '',
      ' '.join(gold.split()) if known is None else known,
    )

  def _remember(self, pair, result):
    if result in (processes.TIMEOUT, processes.CRASH):
      logging.log_first_n(
        logging.WARNING,
        'the verification of %.80r against %.80r ended in a %s; the answer '
        'counts as unparsable',
        10,
        *pair,
        result,
      )
    if result == processes.CRASH:
      return  # Not cached: the system may have killed it for its memory.
    self._known[pair] = result
    if len(self._known) > _MAX_KNOWN:
      del self._known[next(iter(self._known))]


def _easy(given: str, gold: str) -> str | None:
  """The result if no mathematics is needed, else None."""
  if not given:
    return 'unparsable'
  same = verify.same(given, gold)
  if same is not None:
    return 'correct' if same else 'wrong'
  too_long = max(len(given), len(gold)) > _MAX_CHARACTERS
  return 'unparsable' if too_long else None
