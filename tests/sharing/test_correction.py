import ml_collections
import numpy as np
import pytest

from mrl_jax.sharing import correction

TRAINER = np.log(np.array([0.5, 0.3, 0.9], np.float32))
SAMPLER = np.log(np.array([0.25, 0.6, 0.1], np.float32))  # Ratios 2, .5, 9.


def weights(**changes):
  settings = ml_collections.ConfigDict(
    {'level': 'token', 'kind': 'truncate', 'cap': 3.0, **changes}
  )
  return correction.weights(TRAINER, SAMPLER, settings)


@pytest.mark.parametrize(
  ('level', 'kind', 'cap', 'expected'),
  [
    ('token', 'truncate', 3.0, [2.0, 0.5, 3.0]),
    ('token', 'mask', 3.0, [2.0, 0.5, 0.0]),
    ('sequence', 'truncate', 20.0, [9.0] * 3),
    ('sequence', 'truncate', 3.0, [3.0] * 3),
    ('sequence', 'mask', 3.0, [0.0] * 3),
  ],
)
def test_numbers_worked_by_hand(level, kind, cap, expected):
  found = weights(level=level, kind=kind, cap=cap)
  np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_probabilities_that_are_worlds_apart_do_not_overflow():
  settings = ml_collections.ConfigDict(
    {'level': 'sequence', 'kind': 'truncate', 'cap': 2.0}
  )
  far = np.full(1000, -90.0, np.float32)
  with np.errstate(all='raise'):
    found = correction.weights(0 * far, far, settings)
  np.testing.assert_array_equal(found, 2.0)


def test_sampler_and_trainer_that_agree_have_weights_of_one():
  settings = ml_collections.ConfigDict(
    {'level': 'token', 'kind': 'mask', 'cap': 2.0}
  )
  np.testing.assert_array_equal(
    correction.weights(TRAINER, TRAINER, settings), 1.0
  )


def test_mismatch_by_hand():
  found = correction.mismatch(
    [TRAINER[:1], TRAINER[1:]], [SAMPLER[:1], SAMPLER[1:]]
  )
  assert found['kl'] == pytest.approx(-np.log(2 * 0.5 * 9) / 3)
  assert found['max_ratio'] == pytest.approx(9.0)
  assert found['ess_fraction'] == pytest.approx(11.5**2 / (4 + 0.25 + 81) / 3)
