import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax.losses import grpo
from tests.losses import references


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


@pytest.mark.parametrize(('sign', 'dual_clip'), [(1, 0.0), (-1, 0.0), (1, 2.0)])
def test_it_moves_as_the_reference_does(sign, dual_clip):
  logp_BT, old_BT, mask_BT, advantage_B1 = references.rows(7, spread=0.8)
  advantage_B1 = sign * advantage_B1
  found = references.weighted(
    lambda logp_BT: grpo.clipped_surrogate(
      jnp.exp(logp_BT - old_BT), advantage_B1, 0.2, 0.28, dual_clip
    ),
    logp_BT,
    references.over_length(mask_BT),
  )
  expected = references.by_row(
    lambda b, logp_T: references.grpo(
      logp_T,
      old_BT[b].astype(float),
      mask_BT[b],
      float(advantage_B1[b, 0]),
      0.2,
      0.28,
      dual_clip,
    ),
    logp_BT,
  )
  references.assert_agree(found, expected)
  clipped_BT = grpo.is_clipped(
    np.exp(logp_BT - old_BT), advantage_B1, 0.2, 0.28
  )
  stopped_BT = expected[1] == 0
  if not dual_clip:
    np.testing.assert_array_equal(stopped_BT[mask_BT], clipped_BT[mask_BT])
  for of_a_sign_BT in (
    mask_BT & (advantage_B1 > 0),
    mask_BT & (advantage_B1 < 0),
  ):
    assert stopped_BT[of_a_sign_BT].any()
    assert not stopped_BT[of_a_sign_BT].all()
