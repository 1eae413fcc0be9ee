import jax
import numpy as np

from mrl_jax.losses import luffy
from tests.losses import references

shaped = jax.jit(luffy.shaped)


def value_and_gradient(logp_BT):
  return references.weighted(
    lambda logp_BT: luffy.shaped(logp_BT, np.ones((1, 1)), 0.1),
    logp_BT,
    np.ones((1, 1), np.float32),
  )


def test_numbers_worked_by_hand():
  # .1/.2, .4/.5 and .9/1.0, times A.
  advantage_B1 = np.array([[1.0], [-2.0]])
  value_BT = shaped(np.log([[0.1, 0.4, 0.9]] * 2), advantage_B1, 0.1)
  expected = advantage_B1 * np.array([[0.5, 0.8, 0.9]])
  np.testing.assert_allclose(value_BT, expected, rtol=1e-6)


def test_value_and_gradient_are_those_of_the_reference():
  logp_BT, _, mask_BT, advantage_B1 = references.rows(5, spread=1.0)
  references.assert_agree(
    references.weighted(
      lambda logp_BT: luffy.shaped(logp_BT, advantage_B1, 0.1),
      logp_BT,
      references.over_length(mask_BT),
    ),
    references.by_row(
      references.luffy, logp_BT, mask_BT, advantage_B1[:, 0], gamma=0.1
    ),
  )


def test_the_gradient_is_largest_at_probability_gamma():
  # gamma x / (x + gamma)^2: .1/1.21, .01/.04 and .001/.0121.
  _, gradient_BT = value_and_gradient(np.log([[1.0, 0.1, 0.01]]))
  expected = [[0.1 / 1.21, 0.25, 0.001 / 0.0121]]
  np.testing.assert_allclose(gradient_BT, expected, rtol=1e-5)


def test_a_token_that_the_learner_never_samples_stays_finite():
  value_B, gradient_BT = value_and_gradient(np.full((1, 1), -1e4))
  assert value_B[0] == gradient_BT[0, 0] == 0.0
