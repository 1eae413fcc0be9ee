from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from mrl_jax.thl import align


def i32(*values):
  return np.array(values, np.int32)


def test_chunks_lie_between_common_boundaries():
  # abc|d|ef against ab|c|d|ef|: ends 3 4 6 and 2 3 4 6.
  a, b = align.chunks(i32(3, 1, 2), i32(2, 1, 1, 2))
  np.testing.assert_array_equal(a, [0, 1, 2])
  np.testing.assert_array_equal(b, [0, 0, 1, 2])


def test_tokens_that_cross_share_a_chunk():
  a, b = align.chunks(i32(2, 3), i32(3, 2))
  np.testing.assert_array_equal(a, [0, 0])
  np.testing.assert_array_equal(b, [0, 0])


def test_a_token_without_bytes_belongs_where_it_stands():
  a, b = align.chunks(i32(1, 0, 1), i32(1, 1))
  np.testing.assert_array_equal(a, [0, 0, 1])
  np.testing.assert_array_equal(b, [0, 1])


def test_different_bytes_cannot_be_aligned():
  with pytest.raises(ValueError, match='3 bytes cannot be aligned with 2'):
    align.chunks(i32(3), i32(2))


def test_extensive_traces_are_split_by_bytes():
  # A token of 3 bytes and -0.9 nats onto tokens of 1 and 2 bytes.
  carried = align.carry_extensive(
    np.array([-0.9, -0.4]), i32(3, 1), i32(1, 2, 1)
  )
  np.testing.assert_allclose(carried, [-0.3, -0.6, -0.4])


def test_the_value_of_a_token_without_bytes_is_not_lost():
  middle = align.carry_extensive(
    np.array([-1.0, -2.0, -4.0]), i32(1, 0, 1), i32(1, 1)
  )
  np.testing.assert_allclose(middle, [-3.0, -4.0])
  first = align.carry_extensive(np.array([-1.0, -2.0]), i32(0, 1), i32(1))
  np.testing.assert_allclose(first, [-3.0])
  last = align.carry_extensive(np.array([-1.0, -2.0]), i32(1, 0), i32(1))
  np.testing.assert_allclose(last, [-3.0])


def test_nothing_carries_to_nothing():
  assert align.carry_extensive(np.zeros(0), i32(), i32()).shape == (0,)


@st.composite
def two_tokenizations(draw):
  """Byte lengths of two tokenizations of the same number of bytes.

  Tokens of the first may have none; a vocabulary's own encoding has no such.
  """
  total = draw(st.integers(1, 40))

  def lengths(empty):
    cuts = sorted(draw(st.sets(st.integers(1, total - 1)))) if total > 1 else []
    some = list(np.diff([0, *cuts, total]))
    for at in draw(st.lists(st.integers(0, len(some)), max_size=empty)):
      some.insert(at, 0)
    return np.array(some, np.int32)

  return lengths(empty=3), lengths(empty=0)


def chunks_by_two_pointers(a_lengths, b_lengths):
  """The reference: where both have ended at the same byte, a chunk ends."""
  ends = set(np.cumsum(a_lengths)) & set(np.cumsum(b_lengths))

  def chunk(lengths):
    at, out = 0, []
    for n in lengths:
      at += n
      out.append(sum(end < at for end in ends))
    return out

  return chunk(a_lengths), chunk(b_lengths)


@given(two_tokenizations(), st.integers(0, 2**32 - 1))
def test_chunks_tile_and_sums_are_conserved(lengths, seed):
  a_lengths, b_lengths = lengths
  before = a_lengths.copy(), b_lengths.copy()
  a, b = align.chunks(a_lengths, b_lengths)
  expected_a, expected_b = chunks_by_two_pointers(a_lengths, b_lengths)
  np.testing.assert_array_equal(a, expected_a)
  np.testing.assert_array_equal(b, expected_b)
  np.testing.assert_array_equal(
    np.bincount(a, a_lengths, a.max() + 1),
    np.bincount(b, b_lengths, a.max() + 1),
  )
  trace = -np.random.default_rng(seed).random(len(a_lengths))
  carried = align.carry_extensive(trace, a_lengths, b_lengths)
  np.testing.assert_allclose(
    np.bincount(b, carried, a.max() + 1),
    np.bincount(a, trace, a.max() + 1),
    atol=1e-6,
  )
  np.testing.assert_array_equal(a_lengths, before[0])
  np.testing.assert_array_equal(b_lengths, before[1])
