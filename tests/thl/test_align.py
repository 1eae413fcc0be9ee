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


def test_a_token_without_bytes_joins_the_chunk_before_it():
  a, b = align.chunks(i32(1, 0, 1), i32(1, 1))
  np.testing.assert_array_equal(a, [0, 0, 1])
  np.testing.assert_array_equal(b, [0, 1])
  # At the start, of one side or of both, it joins the first chunk.
  for b_lengths in (i32(2), i32(0, 2)):
    a, b = align.chunks(i32(0, 2), b_lengths)
    assert not a.any()
    assert not b.any()


@pytest.mark.parametrize(
  'align_lengths',
  [
    align.chunks,
    lambda *lengths: align.project_extensive(np.zeros(1), *lengths),
    lambda *lengths: align.project_intensive(np.zeros(1), *lengths),
    lambda *lengths: align.project_mask(np.ones(1, bool), *lengths),
  ],
  ids=['chunks', 'extensive', 'intensive', 'mask'],
)
def test_different_numbers_of_bytes_cannot_be_aligned(align_lengths):
  with pytest.raises(ValueError, match='3 bytes cannot be aligned with 2'):
    align_lengths(i32(3), i32(2))


def test_an_extensive_trace_is_split_over_bytes():
  # A token of 3 bytes and -0.9 nats onto tokens of 1 and 2 bytes.
  projected = align.project_extensive(
    np.array([-0.9, -0.4]), i32(3, 1), i32(1, 2, 1)
  )
  np.testing.assert_allclose(projected, [-0.3, -0.6, -0.4])


def test_a_token_without_bytes_adds_its_value_to_its_neighbour():
  middle = align.project_extensive(
    np.array([-1.0, -2.0, -4.0]), i32(1, 0, 1), i32(1, 1)
  )
  np.testing.assert_allclose(middle, [-3.0, -4.0])
  first = align.project_extensive(np.array([-1.0, -2.0]), i32(0, 1), i32(1))
  np.testing.assert_allclose(first, [-3.0])
  last = align.project_extensive(np.array([-1.0, -2.0]), i32(1, 0), i32(1))
  np.testing.assert_allclose(last, [-3.0])


def test_an_intensive_trace_is_a_mean_over_bytes():
  # Tokens of 3 bytes at 1 and 1 byte at 5 onto tokens of 2 and 2 bytes.
  projected = align.project_intensive(
    np.array([1.0, 5.0]), i32(3, 1), i32(2, 2)
  )
  np.testing.assert_allclose(projected, [1.0, 3.0])


def test_a_token_without_bytes_has_no_weight_in_a_mean():
  projected = align.project_intensive(
    np.array([1.0, 100.0, 5.0]), i32(1, 0, 1), i32(1, 1)
  )
  np.testing.assert_allclose(projected, [1.0, 5.0])


def test_a_mask_is_the_minimum_over_overlapping_tokens():
  # ab|cd|ef, where cd is masked, onto a|bc|d|ef.
  projected = align.project_mask(
    np.array([True, False, True]), i32(2, 2, 2), i32(1, 2, 1, 2)
  )
  np.testing.assert_array_equal(projected, [True, False, False, True])


def test_a_masked_token_without_bytes_masks_the_token_with_its_value():
  middle = align.project_mask(
    np.array([True, False, True]), i32(1, 0, 1), i32(1, 1)
  )
  np.testing.assert_array_equal(middle, [False, True])
  first = align.project_mask(
    np.array([False, True, True]), i32(0, 1, 1), i32(1, 1)
  )
  np.testing.assert_array_equal(first, [False, True])


def test_a_receiver_token_without_bytes_follows_the_token_before_it():
  lengths = i32(1, 1), i32(0, 1, 0, 1, 0)
  values = align.project_intensive(np.array([2.0, 4.0]), *lengths)
  np.testing.assert_allclose(values, [2, 2, 2, 4, 4])
  mask = align.project_mask(np.array([True, False]), *lengths)
  np.testing.assert_array_equal(mask, [True, True, True, False, False])
  # An extensive value is not counted twice.
  sums = align.project_extensive(np.array([2.0, 4.0]), *lengths)
  np.testing.assert_allclose(sums, [0, 2, 0, 4, 0])


@pytest.mark.parametrize('tokens', [0, 2])
def test_without_bytes_projections_are_zero(tokens):
  lengths = np.zeros(3, np.int32), np.zeros(tokens, np.int32)
  for project in (align.project_extensive, align.project_intensive):
    np.testing.assert_array_equal(project(np.ones(3), *lengths), [0] * tokens)
  mask = align.project_mask(np.ones(3, bool), *lengths)
  np.testing.assert_array_equal(mask, [False] * tokens)


def test_without_tokens_projections_are_empty():
  for project, dtype in (
    (align.project_extensive, float),
    (align.project_intensive, float),
    (align.project_mask, bool),
  ):
    assert project(np.zeros(0, dtype), i32(), i32()).shape == (0,)


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
  projected = align.project_extensive(trace, a_lengths, b_lengths)
  np.testing.assert_allclose(
    projected, references.extensive(trace, a_lengths, b_lengths), atol=1e-12
  )
  np.testing.assert_allclose(
    np.bincount(b, projected, a.max() + 1),
    np.bincount(a, trace, a.max() + 1),
    atol=1e-6,
  )


@given(two_tokenizations(), st.integers(0, 2**32 - 1))
def test_means_lie_between_the_values_under_them(lengths, seed):
  trace = np.random.default_rng(seed).normal(size=len(lengths[0]))
  projected = align.project_intensive(trace, *lengths)
  np.testing.assert_allclose(
    projected, references.intensive(trace, *lengths), atol=1e-12
  )
  under = [[] for _ in lengths[1]]
  for j, k, _ in references.overlaps(*lengths):
    under[k].append(trace[j])
  for value, values in zip(projected, under, strict=True):
    if values:
      assert min(values) - 1e-12 <= value <= max(values) + 1e-12


@given(two_tokenizations(), st.floats(-1e6, 1e6))
def test_an_intensive_constant_is_unchanged(lengths, value):
  trace = np.full(len(lengths[0]), value)
  np.testing.assert_allclose(
    align.project_intensive(trace, *lengths), value, rtol=1e-12
  )


@given(two_tokenizations(), st.integers(0, 2**32 - 1))
def test_no_masked_byte_is_trained_on_and_a_full_mask_stays_full(lengths, seed):
  mask = np.random.default_rng(seed).random(len(lengths[0])) < 0.7
  projected = align.project_mask(mask, *lengths)
  assert projected.dtype == bool
  np.testing.assert_array_equal(projected, references.mask(mask, *lengths))
  may_U, trained_U = (
    np.repeat(of, n) for of, n in zip((mask, projected), lengths, strict=True)
  )
  assert not (trained_U & ~may_U).any()
  np.testing.assert_array_equal(
    align.project_mask(np.ones_like(mask), *lengths), True
  )


@given(two_tokenizations())
def test_inputs_are_not_changed(lengths):
  values = np.arange(len(lengths[0]), dtype=np.float64)
  mask = values > 1
  for array in (values, mask, *lengths):
    array.flags.writeable = False
  align.chunks(*lengths)
  align.project_extensive(values, *lengths)
  align.project_intensive(values, *lengths)
  align.project_mask(mask, *lengths)
