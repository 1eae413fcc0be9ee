import functools
import math

import jax
import numpy as np
import pytest

from mrl_jax.architecture import Rope
from mrl_jax.models import rope

# Eight dimensions have the frequencies 1, 1/10, 1/100 and 1/1000.
PLAIN = np.array([1, 0.1, 0.01, 0.001])

frequencies = jax.jit(rope.frequencies, static_argnums=(0, 1))


def test_frequencies_worked_by_hand():
  np.testing.assert_allclose(frequencies(Rope(), 8), PLAIN, rtol=1e-6)
  linear = Rope(scaling='linear', factor=4.0)
  np.testing.assert_allclose(frequencies(linear, 8), PLAIN / 4, rtol=1e-6)


def test_llama3_keeps_high_frequencies():
  # In 200 pi positions the frequencies make 100, 10, 1 and 0.1 turns.
  scaled = Rope(
    scaling='llama3',
    factor=8.0,
    original_length=200 * math.pi,
    low=0.5,
    high=5.5,
  )
  # One turn is a tenth of the way from 0.5 to 5.5.
  share = 0.1 + 0.9 / 8
  np.testing.assert_allclose(
    frequencies(scaled, 8), PLAIN * [1, 1, share, 1 / 8], rtol=1e-5
  )


def test_yarn_has_a_ramp_over_pairs_of_dimensions():
  # Pair 1 makes 10 turns and pair 3 a tenth of one; pair 2 is half way.
  scaled = Rope(
    scaling='yarn',
    factor=8.0,
    original_length=200 * math.pi,
    low=0.1,
    high=10.0,
    truncate=False,
    amplitude=1.5,
  )
  half = 0.5 + 0.5 / 8
  np.testing.assert_allclose(
    frequencies(scaled, 8), PLAIN * [1, 1, half, 1 / 8], rtol=1e-5
  )
  rotary = jax.jit(functools.partial(rope.rotary, head_dim=8, rope=scaled))
  sin_B1TI, cos_B1TI = map(np.asarray, rotary(np.array([[0, 7]])))
  np.testing.assert_allclose(cos_B1TI[0, 0, 0], 1.5)
  np.testing.assert_allclose(sin_B1TI**2 + cos_B1TI**2, 1.5**2, rtol=1e-5)


@pytest.mark.parametrize('scaling', ['linear', 'llama3', 'yarn'])
def test_scaling_raises_no_frequency_and_keeps_their_order(scaling):
  scaled = Rope(scaling=scaling, factor=4.0, original_length=512)
  scaled_I = np.asarray(frequencies(scaled, 64))
  plain_I = np.asarray(frequencies(Rope(), 64))
  assert (scaled_I <= plain_I * (1 + 1e-6)).all()
  assert (np.diff(scaled_I) < 0).all()
