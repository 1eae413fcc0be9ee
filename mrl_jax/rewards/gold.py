"""Finds gold answers that no completion could be rewarded for.

With the wrong field of a file, or the wrong marker, every reward is 0 for ever.
"""

from collections.abc import Iterable
import re

from mrl_jax.rewards import judge

_MAX_WORDS = 12  # A longer text is a problem or a solution, not an answer.
_WORD = re.compile(r'(?<!\\)\b[^\W\d_]{2,}')  # And not a command of LaTeX.


def faults(verifier: judge.Verifier, texts: Iterable[str]) -> dict[str, str]:
  """What is wrong with gold answers, by their text; sound ones are left out.

  Each has to be verified as correct against itself.
  """
  answers = {text: verifier.bare(text).strip() for text in texts}
  verdicts = verifier.verify_all(
    [(verifier.stated(answer), text) for text, answer in answers.items()]
  )
  found = {}
  for (text, answer), verdict in zip(answers.items(), verdicts, strict=True):
    words = len(_WORD.findall(answer))
    if not answer:
      found[text] = 'no answer is in it'
    elif '\n' in answer and r'\begin{' not in answer:  # A matrix.
      found[text] = 'the answer in it has several lines'
    elif '://' in answer:
      found[text] = 'the answer in it is an address'
    elif words > _MAX_WORDS:
      found[text] = f'the answer in it has {words} words'
    elif verdict != 'correct':
      found[text] = f'against itself, it is {verdict}'
  return found
