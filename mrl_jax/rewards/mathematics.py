r"""Verification of mathematical answers, such as `\boxed{\frac{1}{2}}`.

Answers that are equal as text, or are numbers, are decided here; math-verify
decides the rest, in processes that can be killed.
"""

from collections.abc import Sequence
import importlib.util
import re

from absl import logging

from mrl_jax import checks
from mrl_jax import processes
from mrl_jax import records
from mrl_jax.rewards import spelling
from mrl_jax.rewards import verify

_COMPARE = 'mrl_jax.rewards.equivalence:compare'
_BOX = re.compile(r'\\(?:boxed|fbox)\s*\{')
_BRACE = re.compile(r'\\.|[{}]', re.DOTALL)  # Escaped braces do not count.
_MAX_CHARACTERS = 1000  # Longer answers are compared as text.
_MAX_KNOWN = 2**16  # Cached results.
# Answers that sympy would compute for ever, or until the memory is full: long
# numbers, large exponents and factorials, towers of powers, deep nesting.
_ABSURD = re.compile(
  r'\d{60}|\^ ?\{? ?[-+]?\d{5}|\d{5} ?\}? ?!|\d ?\)? ?! ?\)? ?!|'
  r'\^ ?\{[^{}]{0,20}\d ?\^ ?\{?[^{}]{0,20}\d ?\^|(?:[({\[][^(){}\[\]]*){20}'
)
# CPU time (seconds) that comparisons get before the whole time limit; nearly all
# take less than the first.
_STEPS_S = (0.2, 0.5)
# What the others of a batch may take in all: so many time limits, or this share
# of the CPU time that the batch took until then.
_SLOW_LIMITS, _SLOW_SHARE = 5, 0.25


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

  A verdict depends on the two answers alone, unless it is 'timeout' or 'crash'.
  """

  counted = True

  def __init__(self, marker: str, timeout_s: float, workers: int = 0):
    """Starts no process yet; raises InputError if math-verify is missing.

    An answer without a box follows the last `marker`. The comparison of two
    answers may take `timeout_s` seconds of CPU time. Comparisons run in so many
    processes; 0 is one per core, up to four.
    """
    for package in ('math_verify', 'antlr4'):
      checks.require(
        importlib.util.find_spec(package) is not None,
        f"reward.verifier=math needs {package}: pip install -e '.[math]'",
      )
    self._marker = marker
    self._timeout_s = timeout_s
    self._pool = processes.Pool(_COMPARE, timeout_s, workers)
    self._known = {}  # Results by pair, the oldest first.

  def verify_all(
    self, answers: Sequence[tuple[str, str]]
  ) -> list[records.Verdict]:
    """The verdict on each (completion, gold answer).

    Gold answers are bare, in a box, or after a `marker` of their own.
    """
    pairs = [self._pair(*texts) for texts in answers]
    results = {pair: _easy(*pair) or self._known.get(pair) for pair in pairs}
    results |= self._compare([p for p, r in results.items() if r is None])
    return [results[pair] for pair in pairs]

  def bare(self, text: str) -> str:
    """The answer in a gold answer: in a box, after a marker, or all of it."""
    inside = boxed(text)
    return text.rpartition(self._marker)[2] if inside is None else inside

  def stated(self, answer: str) -> str:
    """A completion that gives this answer."""
    return rf'\boxed{{{answer}}}'

  @property
  def cpu_s(self) -> float:
    """CPU time of all comparisons so far, in seconds."""
    return self._pool.cpu_s

  def close(self) -> None:
    self._pool.close()

  def _pair(self, text, gold):
    known = answer(gold, self._marker)
    gold = gold if known is None else known
    return tuple(map(_plain, (answer(text, self._marker) or '', gold)))

  def _compare(self, pairs) -> dict:
    """Compares pairs in the processes; results by pair.

    First every pair gets a little time. Those that need more get it in steps,
    as long as that is a small part of the whole: answers whose comparison never
    ends must not delay a batch.
    """
    pool, began = self._pool, self._pool.cpu_s
    first_s, *more_s = (
      *(s for s in _STEPS_S if s < self._timeout_s),
      self._timeout_s,
    )
    results = dict(zip(pairs, pool.map(pairs, first_s), strict=True))
    tried_s = dict.fromkeys(pairs, first_s)
    most = pool.cpu_s + max(
      _SLOW_LIMITS * self._timeout_s, _SLOW_SHARE * (pool.cpu_s - began)
    )
    for step_s in more_s:
      slow = [p for p in pairs if results[p] == processes.TIMEOUT]
      while slow and pool.cpu_s < most:
        some, slow = slow[: pool.size], slow[pool.size :]
        results |= zip(some, pool.map(some, step_s), strict=True)
        tried_s |= dict.fromkeys(some, step_s)
    for pair, result in results.items():
      self._remember(pair, result, tried_s[pair] < self._timeout_s)
    return results

  def _remember(self, pair, result, early):
    if result in records.UNDECIDED:
      logging.log_first_n(
        logging.WARNING,
        'the verification of %.80r against %.80r ended in a %s; the answer '
        'earns nothing',
        10,
        *pair,
        result,
      )
    # It may go otherwise next time: with all of its time, or more memory.
    if result == processes.CRASH or (result == processes.TIMEOUT and early):
      return
    self._known[pair] = result
    if len(self._known) > _MAX_KNOWN:
      del self._known[next(iter(self._known))]


def _easy(given: str, gold: str) -> str | None:
  """The result if no mathematics is needed, else None."""
  if not given:
    return 'unparsable'
  same = spelling.same(given, gold)
  if same is not None:
    return 'correct' if same else 'wrong'
  absurd = any(
    len(x) > _MAX_CHARACTERS or _ABSURD.search(x) for x in (given, gold)
  )
  return 'unparsable' if absurd else None


def _plain(answer: str) -> str:
  answer = ' '.join(answer.split())
  return answer if len(answer) > _MAX_CHARACTERS else spelling.plain(answer)
