from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax.losses import grpo
from mrl_jax.losses import gspo
from tests.losses import references

sequence_ratio = jax.jit(gspo.sequence_ratio, static_argnums=3)


def test_numbers_worked_by_hand():
  # Ratios 2 and 8 have the geometric mean sqrt(16) = 4; the third token does
  # not count. Of 3/4 alone in the second row, (3/4)^1.
  logp_BT = jnp.log(jnp.array([[0.5, 0.8, 0.9], [0.1, 0.75, 0.2]]))
  old_BT = jnp.log(jnp.array([[0.25, 0.1, 0.1], [0.7, 1.0, 0.9]]))
  mask_BT = jnp.array([[True, True, False], [False, True, False]])
  ratio_BT = sequence_ratio(logp_BT, old_BT, mask_BT)
  np.testing.assert_allclose(ratio_BT, [[4.0] * 3, [0.75] * 3], rtol=1e-6)


def test_without_a_token_it_is_1_with_a_finite_gradient():
  logp_BT, old_BT = jnp.full((1, 3), -1.0), jnp.full((1, 3), -9.0)
  none_BT = jnp.zeros((1, 3), bool)
  gradient = jax.jit(
    jax.grad(lambda x: gspo.sequence_ratio(x, old_BT, none_BT).sum())
  )
  np.testing.assert_array_equal(sequence_ratio(logp_BT, old_BT, none_BT), 1.0)
  np.testing.assert_array_equal(gradient(logp_BT), 1.0)


def test_the_bound_is_on_both_sides_and_stops_no_gradient():
  # log s: (5 + 1)/2 = 3, (-5 - 1)/2 = -3 and (3 - 1)/2 = 1, bounded by 2.
  logp_BT = jnp.array([[-1.0, -2.0], [-6.0, -3.0], [-1.0, -3.0]])
  old_BT = jnp.array([[-6.0, -3.0], [-1.0, -2.0], [-4.0, -2.0]])

  def total(logp_BT):
    ratio_BT = gspo.sequence_ratio(logp_BT, old_BT, old_BT < 0, 2.0)
    return ratio_BT.sum(), ratio_BT

  gradient_BT, ratio_BT = jax.jit(jax.grad(total, has_aux=True))(logp_BT)
  expected = np.exp([[2.0], [-2.0], [1.0]]).repeat(2, 1)
  np.testing.assert_allclose(ratio_BT, expected, rtol=1e-6)
  np.testing.assert_allclose(gradient_BT, expected, rtol=1e-6)


def test_it_is_the_ratio_of_the_sequences():
  logp_BT, old_BT, mask_BT, _ = references.rows(0, spread=1.0)
  ratio_BT = sequence_ratio(logp_BT, old_BT, mask_BT)
  for b in range(16):
    expected = references.gspo_ratio(
      logp_BT[b].astype(float), old_BT[b].astype(float), mask_BT[b]
    )
    np.testing.assert_allclose(ratio_BT[b], expected, rtol=1e-5)


@pytest.mark.parametrize('sign', [1, -1])
def test_the_surrogate_moves_as_that_of_the_sequences(sign):
  logp_BT, old_BT, mask_BT, advantage_B1 = references.rows(1, spread=0.8)
  advantage_B1 = sign * advantage_B1

  def objective(logp_BT):
    ratio_BT = gspo.sequence_ratio(logp_BT, old_BT, mask_BT)
    return grpo.clipped_surrogate(ratio_BT, advantage_B1, 0.2, 0.28)

  found = references.weighted(
    objective, logp_BT, references.over_length(mask_BT)
  )
  expected = references.by_row(
    lambda b, logp_T: references.gspo(
      logp_T,
      old_BT[b].astype(float),
      mask_BT[b],
      float(advantage_B1[b, 0]),
      0.2,
      0.28,
    ),
    logp_BT,
  )
  references.assert_agree(found, expected)
  # The clip stops some responses of either sign, and lets some of either move.
  stopped_B = (expected[1] == 0).all(1)
  for of_a_sign_B in (advantage_B1[:, 0] > 0, advantage_B1[:, 0] < 0):
    assert stopped_B[of_a_sign_B & mask_BT.any(1)].any()
    assert not stopped_B[of_a_sign_B].all()


def test_of_one_token_it_is_that_tokens_ratio():
  logp_BT, old_BT, *_ = references.rows(2, spread=1.0)
  one_BT = np.arange(6)[None, :] == np.arange(16)[:, None] % 6
  ratio_BT = sequence_ratio(logp_BT, old_BT, one_BT)
  np.testing.assert_allclose(
    ratio_BT[one_BT], np.exp(logp_BT - old_BT)[one_BT], rtol=1e-6
  )


@settings(max_examples=20, deadline=None)
@given(
  noise=st.lists(
    st.floats(-50, 0, width=32), min_size=2 * 16 * 6, max_size=2 * 16 * 6
  )
)
def test_nothing_outside_the_mask_matters(noise):
  logp_BT, old_BT, mask_BT, _ = references.rows(3, spread=1.0)
  other_BT, other_old_BT = np.array(noise, np.float32).reshape(2, 16, 6)
  np.testing.assert_array_equal(
    sequence_ratio(
      np.where(mask_BT, logp_BT, other_BT),
      np.where(mask_BT, old_BT, other_old_BT),
      mask_BT,
    ),
    sequence_ratio(logp_BT, old_BT, mask_BT),
  )
