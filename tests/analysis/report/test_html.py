"""Text in templates is escaped, and numbers are written for people."""

import math

import pytest

from mrl_jax.analysis.report import html


def shown(expression, value):
  template = html.ENVIRONMENT.from_string('{{ ' + expression + ' }}')
  return template.render(value=value)


@pytest.mark.parametrize(
  ('value', 'text'),
  [
    ('<script>', '&lt;script&gt;'),
    ('" onload="', '&#34; onload=&#34;'),
    ('\u202e\x00\x1b', '\\u202e\\x00\\x1b'),
    ('\ud800', '\\ud800'),
    (['<b>', '\u202e'], '[&#39;&lt;b&gt;&#39;, &#39;\\u202e&#39;]'),
  ],
)
def test_text_is_printable_and_escaped(value, text):
  assert shown('value', value) == text


def test_joined_text_is_printable_and_escaped():
  assert shown("value | join('; ')", ['<b>', '\u202e']) == '&lt;b&gt;; \\u202e'


@pytest.mark.parametrize(
  ('filter', 'value', 'text'),
  [
    ('number', 1234567, '1,234,567'),
    ("number('.3f')", -0.25, '-0.250'),
    ('percent', 0.734, '73.4'),
    ("percent('+.1f')", 0.381, '+38.1'),
    ('seconds', 0.6449, '0.645 s'),
    ('seconds', 59.9, '59.9 s'),
    ('seconds', 131.4, '2 min 11 s'),
    ('seconds', 119.7, '2 min 0 s'),
    ('seconds', 7325, '2 h 2 min'),
    ('bytes', 512, '512 B'),
    ('bytes', 54643458.0, '52.1 MiB'),
    ('bytes', 3 * 2**40, '3 TiB'),
    ('width', 0.256, '25.60%'),
    ('width', -1, '0.00%'),
    ('width', 7, '100.00%'),
    ('width', math.nan, '0.00%'),
  ],
)
def test_numbers_are_written_for_people(filter, value, text):
  assert shown(f'value | {filter}', value) == text


@pytest.mark.parametrize('filter', ['number', 'percent', 'seconds', 'bytes'])
@pytest.mark.parametrize('value', [None, math.nan, -math.inf])
def test_unknown_numbers_are_a_dash(filter, value):
  assert shown(f'value | {filter}', value) == '–'
