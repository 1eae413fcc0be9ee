import numpy as np
import pytest

from mrl_jax.bandit import weights

# The ratio is 1/2, 2 and 1; the peer never does the last.
PI_K = np.array([0.125, 0.5, 0.25, 0.125])
MU_K = np.array([0.25, 0.25, 0.25, 0.25]) * [1, 1, 1, 0]


def assert_weights(found_K, expected_K):
  np.testing.assert_allclose(found_K, expected_K, rtol=1e-12)


@pytest.mark.parametrize(
  ('settings', 'success', 'failure'),
  [
    ({}, [0.5, 2, 1, 0], [0.5, 2, 1, 0]),
    ({'max_ratio': 1.5}, [0.5, 1.5, 1, 0], [0.5, 1.5, 1, 0]),
    ({'denominators': 'recompute'}, [1, 1, 1, 0], [1, 1, 1, 0]),
    # A success above 1.28 has its reward already, as a failure below 0.8.
    ({'clip': (0.2, 0.28)}, [0.5, 0, 1, 0], [0, 2, 1, 0]),
    # Truncation comes first: what is truncated to within the clip stays.
    (
      {'clip': (0.2, 0.28), 'max_ratio': 1.25},
      [0.5, 1.25, 1, 0],
      [0, 1.25, 1, 0],
    ),
    ({'error_K': np.log(2)}, [1, 4, 2, 0], [1, 4, 2, 0]),
    # An error is truncated with the ratio.
    (
      {'error_K': np.log([4, 1, 2, 9]), 'max_ratio': 1.75},
      [1.75, 1.75, 1.75, 0],
      [1.75, 1.75, 1.75, 0],
    ),
  ],
)
def test_prp_by_hand(settings, success, failure):
  found = weights.prp(PI_K, MU_K, **settings)
  assert_weights(found.success_K, success)
  assert_weights(found.failure_K, failure)


def test_a_mean_ratio_is_that_of_a_token():
  assert_weights(weights.mean_ratio(PI_K, MU_K, 1), [0.5, 2, 1, 0])
  assert_weights(weights.mean_ratio(PI_K, MU_K, 2), [0.5**0.5, 2**0.5, 1, 0])
  one_K = weights.mean_ratio(np.array([1e-9, 1.0]), np.array([1.0, 1e-9]), 1)
  assert_weights(one_K, np.exp([-10, 10]))
  # What the learner never does is as unlikely as can be told.
  none_K = weights.mean_ratio(np.array([0.0, 1.0]), np.array([0.5, 0.5]), 100)
  assert_weights(none_K, [np.exp(-10), 2**0.01])


def test_capability_is_a_ratio_within_bounds():
  p, q = np.array([0.3, 0.001, 0.9, 0, 0]), np.array([0.6, 0.6, 0.01, 0, 0.5])
  assert_weights(weights.capability_ratio(p, q), [0.5, 0.1, 10, 1, 0.1])


@pytest.mark.parametrize(
  ('settings', 'expected'),
  [
    # Only what lies in [0.8, 1].
    ({}, [0, 0, 1, 0]),
    ({'low': 0.5}, [0.25, 0, 1, 0]),
    ({'low': 0.5, 'alpha': 0}, [0.5, 0, 1, 0]),
    ({'clip': False}, [0.25, 4, 1, 0]),
    ({'clip': False, 'alpha': 2.0}, [0.125, 8, 1, 0]),
    ({'length': 4, 'alpha': 3}, [0.5, 0, 1, 0]),
  ],
)
def test_hacpo_by_hand(settings, expected):
  assert_weights(weights.hacpo(PI_K, MU_K, **settings), expected)


@pytest.mark.parametrize(
  ('settings', 'expected'),
  [
    ({}, [0, 1, 1, 0]),
    # It is let in above the floor, not at it.
    ({'floor': 0.5}, [0, 1, 1, 0]),
    ({'floor': 0.49}, [0.5, 1, 1, 0]),
    ({'floor': 0.49, 'weighted': False}, [1, 1, 1, 0]),
    ({'gate': False}, [0.5, 1, 1, 0]),
    ({'gate': False, 'weighted': False}, [1, 1, 1, 0]),
    ({'length': 4}, [0.5**0.25, 1, 1, 0]),
  ],
)
def test_graft_by_hand(settings, expected):
  assert_weights(weights.graft(PI_K, MU_K, **settings), expected)


def test_a_learner_of_each_row():
  rows_MK = np.stack([PI_K, PI_K[::-1]])
  for function in (weights.hacpo, weights.graft):
    found_MK = function(rows_MK, MU_K, length=3.0)
    for pi_K, found_K in zip(rows_MK, found_MK, strict=True):
      np.testing.assert_array_equal(found_K, function(pi_K, MU_K, length=3.0))
  found = weights.prp(rows_MK, MU_K, max_ratio=1.5, clip=(0.2, 0.28))
  for i, pi_K in enumerate(rows_MK):
    alone = weights.prp(pi_K, MU_K, max_ratio=1.5, clip=(0.2, 0.28))
    np.testing.assert_array_equal(found.success_K[i], alone.success_K)
    np.testing.assert_array_equal(found.failure_K[i], alone.failure_K)
