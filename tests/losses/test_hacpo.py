import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax.losses import gspo
from mrl_jax.losses import hacpo
from tests.losses import references

surrogate = jax.jit(hacpo.stepwise_surrogate)


@pytest.mark.parametrize(
  ('ratio', 'advantage', 'alpha', 'expected'),
  [
    (0.9, 2.0, 0.0, 1.8),  # s A.
    (0.9, 2.0, 1.0, 1.62),  # .9 * .9 * 2.
    (0.9, -2.0, 3.0, -1.3122),  # .9^4 * -2.
    (0.5, 2.0, 1.0, 1.28),  # lo = .8: .8 * .8 * 2, and no minimum with 1.0.
    (0.5, -2.0, 2.0, -1.024),  # .8^3 * -2.
    (1.5, 2.0, 3.0, 2.0),  # hi = 1.
    (1.5, -2.0, 3.0, -2.0),  # And no minimum with -3.0.
  ],
)
def test_numbers_worked_by_hand(ratio, advantage, alpha, expected):
  ratio_11, advantage_11 = np.array([[ratio]]), np.array([[advantage]])
  value_11 = surrogate(ratio_11, advantage_11, np.array([[0.8]]), 1.0, alpha)
  assert float(value_11[0, 0]) == pytest.approx(expected, rel=1e-6)


def test_the_gradient_is_weighted_inside_the_bounds_and_zero_outside():
  # Below lo, lo, inside, hi, above hi. In log pi: s * s^alpha * A.
  logp_BT = np.log([[0.5, 0.75, 0.9, 1.0, 1.5]] * 2)
  advantage_B1, low_B1 = np.array([[2.0], [-2.0]]), np.full((2, 1), 0.75)
  _, gradient_BT = references.weighted(
    lambda logp_BT: hacpo.stepwise_surrogate(
      jnp.exp(logp_BT), advantage_B1, low_B1, 1.0, 2.0
    ),
    logp_BT,
    np.ones((2, 5)),
  )
  expected = advantage_B1 * np.array([[0.0, 0.75**3, 0.9**3, 1.0, 0.0]])
  np.testing.assert_allclose(gradient_BT, expected, rtol=1e-6)


@pytest.mark.parametrize('alpha', [0.0, 3.0])
def test_value_and_gradient_are_those_of_the_sequences(alpha):
  logp_BT, _, mask_BT, advantage_B1 = references.rows(4, spread=1.0)
  rng = np.random.default_rng(0)
  mini_batch_B = np.arange(16) % 11
  low_B1 = hacpo.lower_bound(0.2, 0.025, mini_batch_B[:, None])
  # The sources' log-probabilities of their own tokens, whose number is not the
  # learner's; their means are within a factor of about 1.5 of the learner's.
  source_logps = []
  for b in range(16):
    mean = references.mean_kept(logp_BT[b].astype(float), mask_BT[b])
    logps = rng.standard_normal(rng.integers(1, 9))
    source_logps.append(
      logps - logps.mean() + mean + rng.choice([-0.3, -0.05, 0.02, 0.1, 0.4])
    )
  source_B1 = np.array([[s.mean()] for s in source_logps], np.float32)

  def objective(logp_BT):
    ratio_BT = gspo.sequence_ratio(
      logp_BT, source_B1.repeat(6, 1), mask_BT, np.ones((16, 6), int), 10.0
    )
    return hacpo.stepwise_surrogate(ratio_BT, advantage_B1, low_B1, 1.0, alpha)

  ratio_B = [
    references.hacpo_ratio(logp_BT[b].astype(float), mask_BT[b], s)
    for b, s in enumerate(source_logps)
  ]
  low_B = [references.hacpo_low(0.2, 0.025, m) for m in mini_batch_B]

  def reference(logp_T, b):
    if not mask_BT[b].any():
      return 0.0
    ratio = references.hacpo_ratio(logp_T, mask_BT[b], source_logps[b])
    advantage = float(advantage_B1[b, 0])
    return references.hacpo(ratio, ratio_B[b], advantage, low_B[b], 1.0, alpha)

  references.assert_agree(
    references.weighted(objective, logp_BT, references.over_length(mask_BT)),
    references.by_row(reference, logp_BT, np.arange(16)),
  )
  below_B, above_B = np.less(ratio_B, low_B), np.greater(ratio_B, 1.0)
  for sign in (1, -1):
    rows_B = mask_BT.any(1) & (sign * advantage_B1[:, 0] > 0)
    for kind_B in (below_B, above_B, ~below_B & ~above_B):
      assert (rows_B & kind_B).any()


def test_without_weight_and_bounds_it_is_the_ratio_times_the_advantage():
  value_B, gradient_BT = references.weighted(
    lambda ratio_BT: hacpo.stepwise_surrogate(
      ratio_BT, np.array([[-3.0]]), np.array([[-np.inf]]), np.inf, 0.0
    ),
    np.array([[0.01, 1.0, 7.0]]),
    np.ones((1, 3)),
  )
  assert value_B[0] == pytest.approx(-24.03, rel=1e-6)
  np.testing.assert_array_equal(gradient_BT, -3.0)


def test_the_lower_bound_rises_with_every_mini_batch_up_to_1():
  low_B1 = jax.jit(hacpo.lower_bound)(0.2, 0.05, np.arange(7)[:, None])
  np.testing.assert_allclose(
    low_B1[:, 0], [0.8, 0.85, 0.9, 0.95, 1.0, 1.0, 1.0], rtol=1e-6
  )
