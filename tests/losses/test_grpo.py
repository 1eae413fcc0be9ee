import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax.losses import grpo
from tests.losses import references

surrogate = jax.jit(grpo.clipped_surrogate, static_argnums=4)


def test_numbers_worked_by_hand():
  ratio, advantage, expected = np.array(
    [
      (1.1, 2.0, 2.2),  # Inside the bounds: rho A.
      (1.5, 2.0, 2.56),  # Gains stop at 1 + eps_high = 1.28.
      (0.5, 2.0, 1.0),  # A loss is not clipped: min(1.0, 1.6).
      (0.9, -2.0, -1.8),
      (0.5, -2.0, -1.6),  # Gains stop at 1 - eps_low = 0.8.
      (1.5, -2.0, -3.0),  # A loss is not clipped: min(-3.0, -2.56).
      (1.5, 0.0, 0.0),
    ]
  ).T
  found_BT = surrogate(ratio[:, None], advantage[:, None], 0.2, 0.28)
  np.testing.assert_allclose(found_BT[:, 0], expected, rtol=1e-6)


def test_the_dual_clip_bounds_the_loss_of_a_bad_response():
  ratio_BT = np.array([[9.0, 2.5], [9.0, 1.0]])
  advantage_B1 = np.array([[-2.0], [2.0]])
  found = surrogate(ratio_BT, advantage_B1, 0.2, 0.28, 3.0)
  np.testing.assert_allclose(found, [[-6.0, -5.0], [2.56, 2.0]], rtol=1e-6)


def test_the_gradient_is_ratio_times_advantage_and_zero_where_clipped():
  logp_BT = np.log([[1.1, 1.5, 0.5]] * 2)
  advantage_B1 = np.array([[2.0], [-2.0]])
  _, gradient_BT = references.weighted(
    lambda x: grpo.clipped_surrogate(jnp.exp(x), advantage_B1, 0.2, 0.28),
    logp_BT,
    np.ones((2, 3)),
  )
  expected = [[2.2, 0.0, 1.0], [-2.2, -3.0, 0.0]]
  np.testing.assert_allclose(gradient_BT, expected, rtol=1e-6)


def test_an_advantage_of_zero_has_no_gradient_to_clip():
  ratio_BT = np.array([[0.1, 1.0, 9.0]])
  advantage_B1 = np.zeros((1, 1))
  assert not grpo.is_clipped(ratio_BT, advantage_B1, 0.2, 0.28, 3.0).any()


@pytest.mark.parametrize('dual_clip', [0.0, 2.0])
def test_value_and_gradient_are_those_of_the_reference(dual_clip):
  logp_BT, old_BT, mask_BT, advantage_B1 = references.rows(7, spread=0.8)
  found = references.weighted(
    lambda logp_BT: grpo.clipped_surrogate(
      jnp.exp(logp_BT - old_BT), advantage_B1, 0.2, 0.28, dual_clip
    ),
    logp_BT,
    references.over_length(mask_BT),
  )
  expected = references.by_row(
    references.grpo,
    *(logp_BT, old_BT, mask_BT, advantage_B1[:, 0]),
    **{'low': 0.2, 'high': 0.28, 'dual_clip': dual_clip},
  )
  references.assert_agree(found, expected)
  ratio_BT = np.exp(logp_BT - old_BT)
  clipped_BT = np.asarray(
    grpo.is_clipped(ratio_BT, advantage_B1, 0.2, 0.28, dual_clip)
  )
  stopped_BT = expected[1] == 0
  np.testing.assert_array_equal(stopped_BT[mask_BT], clipped_BT[mask_BT])
  for sign in (1, -1):
    rows_BT = mask_BT & (sign * advantage_B1 > 0)
    assert stopped_BT[rows_BT].any()
    assert not stopped_BT[rows_BT].all()
