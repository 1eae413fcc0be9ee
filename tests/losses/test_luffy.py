import jax.numpy as jnp
import numpy as np

from mrl_jax.losses import luffy
from tests.losses import references


def test_numbers_worked_by_hand():
  # .1/.2, .4/.5 and .9/1.0, times A.
  logp_BT = jnp.log(jnp.array([[0.1, 0.4, 0.9]]))
  for advantage in (1.0, -2.0):
    value_BT = luffy.shaped(logp_BT, jnp.array([[advantage]]), 0.1)
    expected = advantage * np.array([[0.5, 0.8, 0.9]])
    np.testing.assert_allclose(value_BT, expected, rtol=1e-6)


def test_it_moves_as_the_reference_does():
  logp_BT, _, mask_BT, advantage_B1 = references.rows(5, spread=1.0)
  references.assert_agree(
    references.weighted(
      lambda logp_BT: luffy.shaped(logp_BT, advantage_B1, 0.1),
      logp_BT,
      references.over_length(mask_BT),
    ),
    references.by_row(
      lambda b, logp_T: references.luffy(
        logp_T, mask_BT[b], float(advantage_B1[b, 0]), 0.1
      ),
      logp_BT,
    ),
  )


def test_a_token_of_probability_gamma_moves_most():
  # gamma x / (x + gamma)^2: .1/1.21, .01/.04 and .001/.0121.
  logp_BT = jnp.log(jnp.array([[1.0, 0.1, 0.01]]))
  _, gradient_BT = references.weighted(
    lambda logp_BT: luffy.shaped(logp_BT, jnp.ones((1, 1)), 0.1),
    logp_BT,
    np.ones((1, 3), np.float32),
  )
  expected = [[0.1 / 1.21, 0.25, 0.001 / 0.0121]]
  np.testing.assert_allclose(gradient_BT, expected, rtol=1e-5)


def test_a_token_that_the_learner_never_says_stays_finite():
  logp_BT = jnp.full((1, 1), -1e4)
  value_B, gradient_BT = references.weighted(
    lambda logp_BT: luffy.shaped(logp_BT, jnp.ones((1, 1)), 0.1),
    logp_BT,
    np.ones((1, 1), np.float32),
  )
  assert value_B[0] == gradient_BT[0, 0] == 0.0
