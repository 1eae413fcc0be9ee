import math

import numpy as np
import pytest

from mrl_jax.architecture import Rope
from mrl_jax.models import rope

# Eight dimensions: frequencies 1, 1/10, 1/100 and 1/1000.
BASE = 10_000.0
PLAIN = np.array([1, 0.1, 0.01, 0.001])


def test_frequencies_worked_by_hand():
  np.testing.assert_allclose(rope.frequencies(Rope(), 8), PLAIN, rtol=1e-6)
  linear = Rope(scaling='linear', factor=4.0)
  np.testing.assert_allclose(rope.frequencies(linear, 8), PLAIN / 4, rtol=1e-6)


def test_llama3_keeps_what_turns_often():
  # In 200 pi positions the frequencies turn 100, 10, 1 and 0.1 times.
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
    rope.frequencies(scaled, 8), PLAIN * [1, 1, share, 1 / 8], rtol=1e-5
  )


def test_yarn_ramps_over_dimensions():
  # 10 turns are made by pair 1, 0.1 by pair 3; pair 2 is half way.
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
    rope.frequencies(scaled, 8), PLAIN * [1, 1, half, 1 / 8], rtol=1e-5
  )
  sin_B1TI, cos_B1TI = rope.rotary(np.array([[0, 7]]), 8, scaled)
  np.testing.assert_allclose(cos_B1TI[0, 0, 0], 1.5)
  np.testing.assert_allclose(sin_B1TI**2 + cos_B1TI**2, 1.5**2, rtol=1e-5)


@pytest.mark.parametrize('scaling', ['none', 'linear', 'llama3', 'yarn'])
def test_no_frequency_rises(scaling):
  scaled = Rope(scaling=scaling, factor=4.0, original_length=512)
  found = np.asarray(rope.frequencies(scaled, 64))
  plain = np.asarray(rope.frequencies(Rope(), 64))
  assert (found <= plain * (1 + 1e-6)).all()
  assert (np.diff(found) < 0).all()
