from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from mrl_jax.thl import align
from tests.thl import references


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
  # At the start, on one side or on both, in the first chunk.
  for b_lengths in (i32(2), i32(0, 2)):
    a, b = align.chunks(i32(0, 2), b_lengths)
    assert not a.any()
    assert not b.any()


@pytest.mark.parametrize(
  'align_them',
  [
    align.chunks,
    lambda *lengths: align.carry_extensive(np.zeros(1), *lengths),
    lambda *lengths: align.carry_intensive(np.zeros(1), *lengths),
    lambda *lengths: align.carry_mask(np.ones(1, bool), *lengths),
  ],
  ids=['chunks', 'extensive', 'intensive', 'mask'],
)
def test_different_bytes_cannot_be_aligned(align_them):
  with pytest.raises(ValueError, match='3 bytes cannot be aligned with 2'):
    align_them(i32(3), i32(2))


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


def test_intensive_traces_are_means_over_bytes():
  # Tokens of 3 bytes at 1 and 1 byte at 5 onto tokens of 2 and 2 bytes.
  carried = align.carry_intensive(np.array([1.0, 5.0]), i32(3, 1), i32(2, 2))
  np.testing.assert_allclose(carried, [1.0, 3.0])


def test_a_value_without_bytes_has_no_weight_in_a_mean():
  carried = align.carry_intensive(
    np.array([1.0, 100.0, 5.0]), i32(1, 0, 1), i32(1, 1)
  )
  np.testing.assert_allclose(carried, [1.0, 5.0])


def test_a_mask_is_the_least_of_what_lies_under_a_token():
  # ab|cd|ef, of which cd is masked, onto a|bc|d|ef.
  carried = align.carry_mask(
    np.array([True, False, True]), i32(2, 2, 2), i32(1, 2, 1, 2)
  )
  np.testing.assert_array_equal(carried, [True, False, False, True])


def test_a_masked_token_without_bytes_masks_where_its_value_goes():
  middle = align.carry_mask(
    np.array([True, False, True]), i32(1, 0, 1), i32(1, 1)
  )
  np.testing.assert_array_equal(middle, [False, True])
  first = align.carry_mask(
    np.array([False, True, True]), i32(0, 1, 1), i32(1, 1)
  )
  np.testing.assert_array_equal(first, [False, True])


def test_a_receivers_token_without_bytes_is_as_the_one_before_it():
  lengths = i32(1, 1), i32(0, 1, 0, 1, 0)
  values = align.carry_intensive(np.array([2.0, 4.0]), *lengths)
  np.testing.assert_allclose(values, [2, 2, 2, 4, 4])
  mask = align.carry_mask(np.array([True, False]), *lengths)
  np.testing.assert_array_equal(mask, [True, True, True, False, False])
  # What adds up is not there twice.
  sums = align.carry_extensive(np.array([2.0, 4.0]), *lengths)
  np.testing.assert_allclose(sums, [0, 2, 0, 4, 0])


@pytest.mark.parametrize('tokens', [0, 2])
def test_where_there_are_no_bytes_nothing_is_carried(tokens):
  lengths = np.zeros(3, np.int32), np.zeros(tokens, np.int32)
  for carry in (align.carry_extensive, align.carry_intensive):
    np.testing.assert_array_equal(carry(np.ones(3), *lengths), [0] * tokens)
  mask = align.carry_mask(np.ones(3, bool), *lengths)
  np.testing.assert_array_equal(mask, [False] * tokens)


def test_nothing_carries_to_nothing():
  for carry, dtype in (
    (align.carry_extensive, float),
    (align.carry_intensive, float),
    (align.carry_mask, bool),
  ):
    assert carry(np.zeros(0, dtype), i32(), i32()).shape == (0,)


@st.composite
def two_tokenizations(draw):
  """Byte lengths of two tokenizations of the same number of bytes."""
  total = draw(st.integers(1, 40))

  def lengths():
    cuts = sorted(draw(st.sets(st.integers(1, total - 1)))) if total > 1 else []
    some = list(np.diff([0, *cuts, total]))
    for at in draw(st.lists(st.integers(0, len(some)), max_size=3)):
      some.insert(at, 0)
    return np.array(some, np.int32)

  return lengths(), lengths()


@given(two_tokenizations(), st.integers(0, 2**32 - 1))
def test_chunks_tile_and_sums_are_conserved(lengths, seed):
  a_lengths, b_lengths = lengths
  a, b = align.chunks(a_lengths, b_lengths)
  expected_a, expected_b = references.chunks(a_lengths, b_lengths)
  np.testing.assert_array_equal(a, expected_a)
  np.testing.assert_array_equal(b, expected_b)
  np.testing.assert_array_equal(
    np.bincount(a, a_lengths, a.max() + 1),
    np.bincount(b, b_lengths, a.max() + 1),
  )
  trace = -np.random.default_rng(seed).random(len(a_lengths))
  carried = align.carry_extensive(trace, a_lengths, b_lengths)
  np.testing.assert_allclose(
    carried, references.extensive(trace, a_lengths, b_lengths), atol=1e-12
  )
  np.testing.assert_allclose(
    np.bincount(b, carried, a.max() + 1),
    np.bincount(a, trace, a.max() + 1),
    atol=1e-6,
  )


@given(two_tokenizations(), st.integers(0, 2**32 - 1))
def test_means_lie_between_the_values_under_them(lengths, seed):
  trace = np.random.default_rng(seed).normal(size=len(lengths[0]))
  carried = align.carry_intensive(trace, *lengths)
  np.testing.assert_allclose(
    carried, references.intensive(trace, *lengths), atol=1e-12
  )
  under = [[] for _ in lengths[1]]
  for j, k, _ in references.overlaps(*lengths):
    under[k].append(trace[j])
  for value, values in zip(carried, under, strict=True):
    if values:
      assert min(values) - 1e-12 <= value <= max(values) + 1e-12


@given(two_tokenizations(), st.floats(-1e6, 1e6))
def test_a_constant_stays_what_it_is(lengths, value):
  trace = np.full(len(lengths[0]), value)
  np.testing.assert_allclose(
    align.carry_intensive(trace, *lengths), value, rtol=1e-12
  )


@given(two_tokenizations(), st.integers(0, 2**32 - 1))
def test_no_masked_byte_is_trained_on_and_no_other_token_is_lost(lengths, seed):
  mask = np.random.default_rng(seed).random(len(lengths[0])) < 0.7
  carried = align.carry_mask(mask, *lengths)
  assert carried.dtype == bool
  np.testing.assert_array_equal(carried, references.mask(mask, *lengths))
  may_U, trained_U = (
    np.repeat(of, n) for of, n in zip((mask, carried), lengths, strict=True)
  )
  assert not (trained_U & ~may_U).any()
  np.testing.assert_array_equal(
    align.carry_mask(np.ones_like(mask), *lengths), True
  )


@given(two_tokenizations())
def test_inputs_are_not_written_to(lengths):
  values = np.arange(len(lengths[0]), dtype=np.float64)
  mask = values > 1
  for array in (values, mask, *lengths):
    array.flags.writeable = False
  align.chunks(*lengths)
  align.carry_extensive(values, *lengths)
  align.carry_intensive(values, *lengths)
  align.carry_mask(mask, *lengths)
