import os
import pathlib

import pytest

from mrl_jax.rewards import equivalence

VECTOR = r'\begin{pmatrix}1\\2\end{pmatrix}'


@pytest.mark.parametrize(
  ('given', 'gold'),
  [
    ('0.5', '1/2'),
    (r'\frac{1}{2}', '0.5'),
    (r'\frac12', '1/2'),
    (r'\dfrac{1}{2}', r'\tfrac12'),
    ('1,000', '1000'),
    (r'\$18', '18'),
    ('$x$', 'x'),
    (r'\[x\]', 'x'),
    (r'\begin{pmatrix}1\\[2]\end{pmatrix}', VECTOR.replace('2', ' [2]')),
    (r'3\frac{1}{2}', '7/2'),
    (r'1.5 \times 10^3', '1500'),
    ('1 + x', 'x+1'),
    ('(x-1)(x+1)', 'x^2-1'),
    (r'2\sqrt{2}', r'\sqrt{8}'),
    ('(1, 2)', '(1,2)'),
    (r'\left(1, \frac{1}{2}\right)', '(1,0.5)'),
    (r'\{2, 1\}', r'\{1,2\}'),
    ('2, 1', '1,2'),
    (r'1 \text{ and } 2', '1, 2'),
    ('[1, 2)', '[1,2)'),
    ('(1,2)', '1 < x < 2'),
    (r'(-\infty, 3) \cup [5, \infty)', r'(-\infty,3)\cup[5,\infty)'),
    ('x = 3', '3'),
    (VECTOR, VECTOR.replace('1', ' 1 ')),
    (r'18 \text{ dollars}', '18'),
    (r'90^\circ', '90'),
    (r'\text{Monday}', 'Monday'),
    (r'(\text{A})', 'A'),
    # math-verify accepts a percentage as the number and as the share.
    (r'10\%', '10'),
    (r'10\%', '0.1'),
  ],
)
def test_equivalent_answers_are_correct(given, gold):
  assert equivalence.compare(given, gold) == 'correct'


@pytest.mark.parametrize(
  ('given', 'gold'),
  [
    ('0.33', '1/3'),
    ('1,001', '1000'),
    ('x + 2', 'x+1'),
    ('y + 1', 'x+1'),
    ('(2,1)', '(1,2)'),
    ('(1,2,3)', '(1,2)'),
    (r'\{1,2,3\}', r'\{1,2\}'),
    ('1', '1,2'),
    ('[1,2]', '[1,2)'),
    (r'11\%', r'10\%'),
    ('y = 3', 'x=3'),
    (VECTOR, VECTOR.replace('2', '3')),
    ('B', 'A'),
    (r'\text{Tuesday}', 'Monday'),
    # A part of the answer is not the answer.
    ('The answer is 1', '1'),
    (r'1 \text{ or maybe } 2', '1'),
    ('2$ $3', '3'),
    ('1', '}'),  # The gold answer cannot be parsed.
  ],
)
def test_other_answers_are_wrong(given, gold):
  assert equivalence.compare(given, gold) == 'wrong'


@pytest.mark.parametrize(
  'given',
  [
    '',
    ' ',
    '}',
    r'\frac{',
    '{' * 20,
    'a\0b',
    '\ud800',
    r'\boxed{1',
    '$',
    r'} \frac{1}{2}',
  ],
)
def test_text_that_is_not_mathematics_is_unparsable(given):
  assert equivalence.compare(given, '1') == 'unparsable'


@pytest.mark.parametrize(
  'code',
  [
    "__import__('os').system('touch pwned')",
    r"\text{__import__('os').system('touch pwned')}",
    r"\operatorname{exec}(open('pwned', 'w'))",
    "open('pwned', 'w')",
    "1).__class__.__base__.__subclasses__(open('pwned', 'w')",
    r"\variable{open('pwned', 'w')}",
  ],
)
def test_no_code_in_answers_is_executed(code, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for pair in ((code, '1'), ('1', code), (f'1 + {code}', '1')):
    assert equivalence.compare(*pair) in ('wrong', 'unparsable')
  assert os.listdir(pathlib.Path.cwd()) == []
