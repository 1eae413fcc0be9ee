r"""Verification of mathematical answers, such as `\boxed{\frac{1}{2}}`.

What is equal as text or as a number is decided as by the exact verifier, and
the rest by math-verify, in processes that can be killed.
"""

import collections
from collections.abc import Sequence
import importlib.util
import re

from absl import logging

from mrl_jax import checks
from mrl_jax import records
from mrl_jax.rewards import processes
from mrl_jax.rewards import verify

_COMPARE = 'mrl_jax.rewards.equivalence:compare'
_BOX = re.compile(r'\\(?:boxed|fbox)\s*\{')
_BRACE = re.compile(r'\\.|[{}]', re.DOTALL)  # Those behind a \ are passed over.
_MAX_CHARACTERS = 1000  # Of an answer; longer ones are compared as text.
_MAX_KNOWN = 2**16  # Results that are remembered.
# Records know no verdict for an answer that could not be verified.
_VERDICTS = {
  'correct': 'correct',
  'wrong': 'wrong',
  'unparsable': 'unparsable',
  processes.TIMEOUT: 'unparsable',
  processes.CRASH: 'unparsable',
}


def boxed(text: str) -> str | None:
  r"""What is in the last `\boxed{}` or `\fbox{}`.

  None without one, or where its braces are not balanced.
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
  """What is in the last box or else, without one, behind the last `marker`."""
  found = boxed(text)
  return verify.answer(text, marker) if found is None else found


class Mathematics:
  """Verifies answers by what they mean.

  A result depends on the two answers only, unless it is a timeout or a crash.
  """

  def __init__(self, marker: str, timeout_s: float):
    """Starts no process yet.

    Args:
      marker: what an answer without a box stands behind.
      timeout_s: seconds that the comparison of two answers may take.

    Raises:
      InputError: math-verify is not installed.
    """
    for package in ('math_verify', 'antlr4'):
      checks.require(
        importlib.util.find_spec(package) is not None,
        f"reward.verifier=math needs {package}: pip install -e '.[math]'",
      )
    self._marker = marker
    self._pool = processes.Pool(_COMPARE, timeout_s)
    self._known = collections.OrderedDict()
    self._counts = collections.Counter()

  def verify_all(
    self, answers: Sequence[tuple[str, str]]
  ) -> list[records.Verdict]:
    """The verdict on each (completion, gold answer).

    Gold answers are bare, in a box, or behind a `marker` of their own.
    """
    pairs = [self._pair(*texts) for texts in answers]
    results = {pair: _easy(*pair) or self._recall(pair) for pair in pairs}
    hard = [pair for pair, result in results.items() if result is None]
    for pair, result in zip(hard, self._pool.map(hard), strict=True):
      results[pair] = result
      self._remember(pair, result)
    self._counts.update(results[pair] for pair in pairs)
    return [_VERDICTS[results[pair]] for pair in pairs]

  def since_last(self) -> dict[str, int]:
    """How many answers had each result, since this was last called."""
    counts, self._counts = self._counts, collections.Counter()
    return dict(sorted(counts.items()))

  def close(self) -> None:
    self._pool.close()

  def _pair(self, text, gold):
    """The given answer and the gold one, without what is around them."""
    known = answer(gold, self._marker)
    return (
      answer(text, self._marker) or '',
      ' '.join(gold.split()) if known is None else known,
    )

  def _recall(self, pair):
    if pair not in self._known:
      return None
    self._known.move_to_end(pair)
    return self._known[pair]

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
      return  # It may have been killed by somebody who needed its memory.
    self._known[pair] = result
    if len(self._known) > _MAX_KNOWN:
      self._known.popitem(last=False)


def _easy(given: str, gold: str) -> str | None:
  """The result where it takes no mathematics."""
  if not given:
    return 'unparsable'
  same = verify.same(given, gold)
  if same is not None:
    return 'correct' if same else 'wrong'
  too_long = max(len(given), len(gold)) > _MAX_CHARACTERS
  return 'unparsable' if too_long else None
