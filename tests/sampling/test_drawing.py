"""Tokens are drawn from the density that a config names."""

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import numpy as np
import pytest

from mrl_jax.sampling import drawing

Density = drawing.Density
LOGITS = np.array([2.0, -1.0, 0.5, 1.5, -3.0, 0.5], np.float32)
filtered = jax.jit(drawing.filtered, static_argnums=1)
draw = jax.jit(drawing.draw, static_argnums=2)


def softmax(logits):
  weight = np.exp(np.asarray(logits, np.float64))
  return weight / weight.sum(-1, keepdims=True)


def kept(logits=LOGITS, **settings):
  return np.isfinite(filtered(logits[None], Density(**settings))[0]).tolist()


def test_filters_worked_by_hand():
  # From the most likely: tokens 0, 3, 2 and 5, 1, 4, with the probabilities .42,
  # .26, .095, .095, .021, .003, rounded.
  assert kept(top_k=2) == [1, 0, 0, 1, 0, 0]
  assert kept(top_k=3) == [1, 0, 1, 1, 0, 1]  # Two tokens are third.
  assert kept(top_k=9) == [1] * 6
  np.testing.assert_allclose(
    softmax(LOGITS), [0.46, 0.023, 0.103, 0.279, 0.0031, 0.103], atol=0.03
  )
  p = np.sort(softmax(LOGITS))[::-1].cumsum()
  assert kept(top_p=p[0] - 0.01) == [1, 0, 0, 0, 0, 0]
  assert kept(top_p=p[0] + 0.01) == [1, 0, 0, 1, 0, 0]
  assert kept(top_p=p[1] + 0.01) == [1, 0, 1, 1, 0, 1]
  assert kept(top_p=p[4] + 1e-4) == [1] * 6
  # e^-.5 = .61, e^-1.5 = .22.
  assert kept(min_p=0.62) == [1, 0, 0, 0, 0, 0]
  assert kept(min_p=0.6) == [1, 0, 0, 1, 0, 0]
  assert kept(min_p=0.22) == [1, 0, 1, 1, 0, 1]
  # Of the two that are left, the first has .62.
  assert kept(top_k=2, top_p=0.6) == [1, 0, 0, 0, 0, 0]


@settings(deadline=None)
@given(
  st.integers(1, 400),
  st.integers(0, 2**32 - 1),
  st.sampled_from([{}, {'temperature': 0.7}, {'top_k': 3}, {'min_p': 0.2}]),
)
def test_a_token_is_where_the_cumulative_probability_passes_the_number(
  size, seed, changes
):
  size = {1: 1, 2: 127, 3: 128, 4: 129}.get(size % 7, 300)  # Few programs.
  rng, density = np.random.default_rng(seed), Density(**changes)
  logits_BV = (3 * rng.standard_normal((4, size))).astype(np.float32)
  logits_BV[0, : size // 2] = -np.inf  # Tokens that are never drawn.
  uniform_B = rng.random(4).astype(np.float32)
  uniform_B[1], uniform_B[2] = 0.0, np.nextafter(np.float32(1), np.float32(0))
  token_B, sampling_B, policy_B = draw(logits_BV, uniform_B, density)
  density_BV = softmax(filtered(logits_BV / density.temperature, density))
  policy_BV = softmax(logits_BV)
  for b, token in enumerate(np.asarray(token_B)):
    assert density_BV[b, token] > 0
    above = density_BV[b].cumsum()
    assert above[token] >= uniform_B[b] - 1e-5
    assert above[token] - density_BV[b, token] <= uniform_B[b] + 1e-5
    assert sampling_B[b] == pytest.approx(
      np.log(density_BV[b, token]), abs=1e-4
    )
    assert policy_B[b] == pytest.approx(np.log(policy_BV[b, token]), abs=1e-4)


def test_the_most_likely_token_at_temperature_0():
  logits_BV = np.stack([LOGITS, LOGITS[::-1]])
  token_B, sampling_B, policy_B = draw(
    logits_BV, np.full(2, 0.9, np.float32), Density(temperature=0.0)
  )
  assert token_B.tolist() == [0, 5]
  assert not sampling_B.any()
  np.testing.assert_allclose(policy_B, np.log(softmax(LOGITS)[0]), atol=1e-5)


def test_shares_of_draws_are_those_of_the_density():
  density = Density(temperature=0.8, top_p=0.95)
  count = 20_000
  uniform_B = jax.random.uniform(jax.random.key(0), (count,))
  logits_BV = np.broadcast_to(LOGITS, (count, 6))
  token_B, *_ = draw(logits_BV, uniform_B, density)
  p_V = softmax(filtered(LOGITS[None] / 0.8, density)[0])
  share_V = np.bincount(token_B, minlength=6) / count
  error_V = np.abs(share_V - p_V) / np.sqrt(p_V * (1 - p_V) / count + 1e-12)
  assert error_V.max() < 4.5
