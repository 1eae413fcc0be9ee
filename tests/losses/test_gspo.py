import functools

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from mrl_jax.losses import grpo
from mrl_jax.losses import gspo
from tests.losses import references


@functools.partial(jax.jit, static_argnums=4)
def sequence_ratio(logp_BT, old_BT, mask_BT, row_BT=None, most=None):
  """With one response a row, unless `row_BT` has others."""
  if row_BT is None:
    row_BT = jnp.zeros(mask_BT.shape, jnp.int32)
  return gspo.sequence_ratio(logp_BT, old_BT, mask_BT, row_BT, most)


def test_numbers_worked_by_hand():
  # The geometric mean of the ratios 2 and 8 is sqrt(16) = 4; the third token
  # is masked. The second row has the ratio 3/4 only.
  logp_BT = jnp.log(jnp.array([[0.5, 0.8, 0.9], [0.1, 0.75, 0.2]]))
  old_BT = jnp.log(jnp.array([[0.25, 0.1, 0.1], [0.7, 1.0, 0.9]]))
  mask_BT = jnp.array([[True, True, False], [False, True, False]])
  ratio_BT = sequence_ratio(logp_BT, old_BT, mask_BT)
  np.testing.assert_allclose(ratio_BT, [[4.0] * 3, [0.75] * 3], rtol=1e-6)


def test_responses_of_a_packed_row_have_a_ratio_each():
  # The same ratios, of a mean over two tokens and of one, and of no token.
  logp_BT = jnp.log(jnp.array([[0.5, 0.8, 0.9, 0.1, 0.75, 0.2, 0.3]]))
  old_BT = jnp.log(jnp.array([[0.25, 0.1, 0.1, 0.7, 1.0, 0.9, 0.1]]))
  mask_BT = jnp.array([[1, 1, 0, 0, 1, 0, 0]], bool)
  row_BT = jnp.array([[1, 1, 1, 2, 2, 2, 0]])
  ratio_BT = sequence_ratio(logp_BT, old_BT, mask_BT, row_BT)
  expected = [[4.0] * 3 + [0.75] * 3 + [1.0]]
  np.testing.assert_allclose(ratio_BT, expected, rtol=1e-6)
  bounded_BT = sequence_ratio(logp_BT, old_BT, mask_BT, row_BT, 0.5)
  low, high = 0.75, np.exp(0.5)
  np.testing.assert_allclose(
    bounded_BT, [[high] * 3 + [low] * 3 + [1.0]], rtol=1e-6
  )


def test_the_ratio_of_an_empty_mask_is_1_with_a_finite_gradient():
  old_BT, mask_BT = np.full((1, 3), -9.0), np.zeros((1, 3), bool)
  value_B, gradient_BT = references.weighted(
    lambda logp_BT: sequence_ratio(logp_BT, old_BT, mask_BT),
    np.full((1, 3), -1.0),
    np.ones((1, 3)),
  )
  np.testing.assert_array_equal(value_B, 3.0)
  np.testing.assert_array_equal(gradient_BT, 1.0)


def test_the_bound_is_on_both_sides_and_stops_no_gradient():
  # log s is (5 + 1)/2 = 3, (-5 - 1)/2 = -3 and (3 - 1)/2 = 1, bounded by 2.
  logp_BT = np.array([[-1.0, -2.0], [-6.0, -3.0], [-1.0, -3.0]])
  old_BT = np.array([[-6.0, -3.0], [-1.0, -2.0], [-4.0, -2.0]])
  value_B, gradient_BT = references.weighted(
    lambda logp_BT: sequence_ratio(logp_BT, old_BT, old_BT < 0, None, 2.0),
    logp_BT,
    np.ones((3, 2)),
  )
  expected = np.exp([[2.0], [-2.0], [1.0]]).repeat(2, 1)
  np.testing.assert_allclose(value_B, expected.sum(1), rtol=1e-6)
  np.testing.assert_allclose(gradient_BT, expected, rtol=1e-6)


def test_it_is_the_ratio_of_the_sequences():
  logp_BT, old_BT, mask_BT, _ = references.rows(0, spread=1.0)
  ratio_BT = sequence_ratio(logp_BT, old_BT, mask_BT)
  for b in range(16):
    expected = references.gspo_ratio(
      logp_BT[b].astype(float), old_BT[b].astype(float), mask_BT[b]
    )
    np.testing.assert_allclose(ratio_BT[b], expected, rtol=1e-5)


def test_the_surrogate_is_that_of_the_sequences():
  logp_BT, old_BT, mask_BT, advantage_B1 = references.rows(1, spread=0.8)

  def objective(logp_BT):
    ratio_BT = sequence_ratio(logp_BT, old_BT, mask_BT)
    return grpo.clipped_surrogate(ratio_BT, advantage_B1, 0.2, 0.28)

  found = references.weighted(
    objective, logp_BT, references.over_length(mask_BT)
  )
  expected = references.by_row(
    references.gspo,
    *(logp_BT, old_BT, mask_BT, advantage_B1[:, 0]),
    **{'low': 0.2, 'high': 0.28},
  )
  references.assert_agree(found, expected)
  # The clip stops some responses of either sign, and lets some of either move.
  stopped_B = (expected[1] == 0).all(1)
  for sign in (1, -1):
    rows_B = (sign * advantage_B1[:, 0] > 0) & mask_BT.any(1)
    assert stopped_B[rows_B].any()
    assert not stopped_B[rows_B].all()


def test_of_one_token_it_is_the_ratio_of_the_token():
  logp_BT, old_BT, *_ = references.rows(2, spread=1.0)
  mask_BT = np.arange(6)[None, :] == np.arange(16)[:, None] % 6
  ratio_BT = sequence_ratio(logp_BT, old_BT, mask_BT)
  np.testing.assert_allclose(
    ratio_BT[mask_BT], np.exp(logp_BT - old_BT)[mask_BT], rtol=1e-6
  )


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_nothing_outside_the_mask_matters(seed):
  logp_BT, old_BT, mask_BT, _ = references.rows(3, spread=1.0)
  noise_2BT = -np.random.default_rng(seed).exponential(10.0, (2, 16, 6))
  other_BT, other_old_BT = noise_2BT.astype(np.float32)
  np.testing.assert_array_equal(
    sequence_ratio(
      np.where(mask_BT, logp_BT, other_BT),
      np.where(mask_BT, old_BT, other_old_BT),
      mask_BT,
    ),
    sequence_ratio(logp_BT, old_BT, mask_BT),
  )
