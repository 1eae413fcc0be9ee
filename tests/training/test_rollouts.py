"""Stop strings are found where a search in all bytes of a completion finds them."""

import types

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from mrl_jax.training import rollouts

# A control token, letters, parts of a character, and tokens of several of them.
TOKENS = (
  b'',
  b'a',
  b'b',
  b'ab',
  b'aab',
  b'\xc3',
  b'\xa9',
  b'\xc3\xa9',
  b'\xa9ba',
)


def tokenizer(tokens):
  return types.SimpleNamespace(
    byte_length_V=np.array([*map(len, tokens)], np.int32),
    decode=lambda ids: b''.join(tokens[i] for i in ids),
  )


def in_parts(strings, ids, sizes, tokens=TOKENS):
  """Where a completion ends whose tokens come in parts of these sizes."""
  end, count = rollouts.ends(tokenizer(tokens), strings), 0
  for new in sizes:
    new = min(new, len(ids) - count)
    count += new
    if new and (found := end(np.array(ids[:count], np.int32), new)):
      return found
  return None


def by_bytes(strings, ids):
  """The first tokens, as many as needed, of which the bytes have a string."""
  text = b''
  for count, i in enumerate(ids, 1):
    text += TOKENS[i]
    if any(string.encode() in text for string in strings):
      return count
  return None


@hypothesis.given(
  st.lists(st.text('ab\xe9', min_size=1, max_size=5), min_size=1, max_size=3),
  st.lists(st.integers(0, len(TOKENS) - 1), min_size=1, max_size=24),
  st.data(),
)
def test_a_completion_ends_with_the_first_string_in_its_bytes(
  strings, ids, data
):
  sizes = [*data.draw(st.lists(st.integers(1, 4), max_size=24)), len(ids)]
  assert in_parts(strings, ids, sizes) == by_bytes(strings, ids)


@pytest.mark.parametrize(
  ('strings', 'ids', 'count'),
  [
    (('ab',), [1, 0, 2, 1], 3),  # Across tokens and a control token.
    (('\xe9',), [5, 6, 1], 2),  # In parts of a character.
    (('ab',), [1, 4, 1], 2),  # With bytes of its token before it.
    (('\xe9b',), [5, 8, 1], 2),  # With a byte of its token behind it.
    (('aab', 'b'), [1, 1, 2], 3),
    (('abab', 'ba'), [3, 3, 3], 2),  # 'ba' begins later and ends earlier.
    (('bb',), [3, 3, 3], None),
  ],
)
def test_the_token_that_completes_a_string_is_the_last(strings, ids, count):
  assert in_parts(strings, ids, [1] * len(ids)) == count
  assert in_parts(strings, ids, [len(ids)]) == count


def test_nothing_is_searched_for_without_strings():
  assert rollouts.ends(tokenizer(TOKENS), ()) is None
