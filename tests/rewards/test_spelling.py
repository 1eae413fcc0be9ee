import fractions
import time

import hypothesis
from hypothesis import strategies as st
import pytest

from mrl_jax.rewards import spelling

FRAGMENTS = (
  *(
    '{',
    '}',
    '(',
    ')',
    '1',
    '12',
    '1,234',
    '.',
    '-',
    ' ',
    'e5',
    '10^',
    'x',
    'a',
  ),
  *('**', '$', '%', '\\', r'\text{', r'\textbf{', r'\frac{', r'\times', '~'),
  *('/', '^2', r'\mathrm{m}', 'apples', 'percent', r'\,', '{,}', '!', "'"),
)


@pytest.mark.parametrize(
  ('text', 'expected'),
  [
    (r'\(\textbf{5}\)', '5'),
    ('**5 apples**.', '5'),
    ('$1{,}000', '1,000'),
    ('9 (apples)', '9'),
    ('(9)', '9'),
    ('(1,200)', '(1,200)'),  # A point.
    ('9 x', '9 x'),
    ('9 or 10', '9 or 10'),
    ('9 million', '9 million'),
    ('148.5 e', '148.5 e'),
    ('4.5e33', r'4.5 \times 10^{33}'),
    ('2e^3', '2e^3'),
    (
      r'\begin{pmatrix}1\\[2]\end{pmatrix}',
      r'\begin{pmatrix}1\\[2]\end{pmatrix}',
    ),
    ('5%', r'5\%'),
    ('', ''),
  ],
)
def test_plain_answers(text, expected):
  assert spelling.plain(text) == expected


@hypothesis.given(
  st.integers(-(10**6), 10**6),
  st.integers(-30, 30),
  st.sampled_from(
    ['{}e{}', r'{} \times 10^{{{}}}', r'{}\cdot 10^{{{}}}', '{}E{}']
  ),
  st.sampled_from(
    ['{}', '**{}**', '${}$', r'\textbf{{{}}}', '({})', r'{}\text{{ kg}}']
  ),
)
def test_every_spelling_of_a_power_of_ten_is_its_number(m, e, form, markup):
  text = spelling.plain(markup.format(form.format(m, e)))
  assert spelling.number(text) == m * fractions.Fraction(10) ** e
  assert spelling.same(text, f'{m}e{e}'.replace('e', r' \times 10^{') + '}')


@pytest.mark.parametrize(
  ('given', 'gold', 'expected'),
  [
    (r'10\%', '10', True),
    (r'10\%', '0.1', True),
    (r'0.1\%', '10', False),
    (r'10\%', r'10\%', True),
    (r'10\%', r'0.1\%', False),
    ('10^{999999}', '1', None),  # Left to math-verify, with its time limit.
    ('x', '1', None),
  ],
)
def test_equality_of_numbers(given, gold, expected):
  assert spelling.same(given, gold) is expected


@hypothesis.given(
  st.lists(st.sampled_from(FRAGMENTS), max_size=300).map(''.join)
)
@hypothesis.settings(deadline=None)
def test_any_text_has_one_spelling_that_takes_little_time(text):
  for long in (text[:1000], (text * 1000)[:1000]):
    began = time.process_time()
    plain = spelling.plain(long)
    spelling.same(plain, '1')
    assert time.process_time() - began < 0.1
