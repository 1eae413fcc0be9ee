import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax.losses import grpo


def surrogate(ratio, advantage, **kwargs):
  settings = {'clip_low': 0.2, 'clip_high': 0.28, **kwargs}
  return float(
    grpo.clipped_surrogate(
      jnp.array([[ratio]]), jnp.array([[advantage]]), **settings
    )[0, 0]
  )


@pytest.mark.parametrize(
  ('ratio', 'advantage', 'expected'),
  [
    (1.1, 2.0, 2.2),  # Inside the bounds: rho A.
    (1.5, 2.0, 2.56),  # Gains stop at 1 + eps_high = 1.28.
    (0.5, 2.0, 1.0),  # A loss is not clipped: min(1.0, 1.6).
    (0.9, -2.0, -1.8),
    (0.5, -2.0, -1.6),  # Gains stop at 1 - eps_low = 0.8.
    (1.5, -2.0, -3.0),  # A loss is not clipped: min(-3.0, -2.56).
    (1.5, 0.0, 0.0),
  ],
)
def test_numbers_worked_by_hand(ratio, advantage, expected):
  assert surrogate(ratio, advantage) == pytest.approx(expected, rel=1e-6)


def test_dual_clip_bounds_the_loss_of_a_bad_response():
  assert surrogate(9.0, -2.0) == pytest.approx(-18.0)
  assert surrogate(9.0, -2.0, dual_clip=3.0) == pytest.approx(-6.0)
  assert surrogate(2.5, -2.0, dual_clip=3.0) == pytest.approx(-5.0)
  assert surrogate(9.0, 2.0, dual_clip=3.0) == pytest.approx(2.56)


def test_gradient_is_ratio_times_advantage_inside_and_zero_where_clipped():
  logp_BT = jnp.log(jnp.array([[1.1, 1.5, 0.5]]))

  def total(logp_BT, advantage):
    return grpo.clipped_surrogate(
      jnp.exp(logp_BT), jnp.array([[advantage]]), 0.2, 0.28
    ).sum()

  up = jax.grad(total)(logp_BT, 2.0)
  down = jax.grad(total)(logp_BT, -2.0)
  np.testing.assert_allclose(up, [[2.2, 0.0, 1.0]], rtol=1e-6)
  np.testing.assert_allclose(down, [[-2.2, -3.0, 0.0]], rtol=1e-6)


def test_is_clipped_says_where_the_gradient_stops():
  ratio_BT = jnp.array([[1.25, 1.3, 0.75]])  # The bounds are .8 and 1.28.
  for advantage, expected in ((2.0, [0, 1, 0]), (-2.0, [0, 0, 1])):
    clipped = grpo.is_clipped(ratio_BT, jnp.array([[advantage]]), 0.2, 0.28)
    np.testing.assert_array_equal(clipped[0], np.array(expected, bool))
