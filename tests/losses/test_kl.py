from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax.losses import kl
from tests.losses import references

FORMS = pytest.mark.parametrize('form', kl.FORMS)
estimate = jax.jit(kl.estimate, static_argnums=2)


@pytest.mark.parametrize(
  ('form', 'expected'),
  [
    # d = log 2 and -log 2, since pi is twice and half pi_ref.
    ('k1', [0.693147, -0.693147]),
    ('k2', [0.240227, 0.240227]),  # (log 2)^2 / 2.
    ('k3', [0.193147, 0.306853]),  # 1/2 - 1 + log 2 and 2 - 1 - log 2.
  ],
)
def test_numbers_worked_by_hand(form, expected):
  logp_BT, reference_BT = np.log([[0.5, 0.25]]), np.log([[0.25, 0.5]])
  value_BT = estimate(logp_BT, reference_BT, form)
  np.testing.assert_allclose(value_BT[0], expected, rtol=1e-5)


@FORMS
def test_value_and_gradient_are_those_of_the_reference(form):
  logp_BT, reference_BT, mask_BT, _ = references.rows(6, spread=1.0)

  def mean(logp_T, reference_T, mask_T):
    value_T = [
      references.kl(logp, reference, form)
      for logp, reference in zip(logp_T, reference_T, strict=True)
    ]
    return references.mean_kept(value_T, mask_T)

  references.assert_agree(
    references.weighted(
      lambda logp_BT: kl.estimate(logp_BT, reference_BT, form),
      logp_BT,
      references.over_length(mask_BT),
    ),
    references.by_row(mean, logp_BT, reference_BT, mask_BT),
  )


@FORMS
def test_the_expected_estimate_and_its_expected_gradient(form):
  # The expectation is over all four tokens that the policy may draw.
  logits_V = np.array([0.3, -1.2, 0.8, 0.1])
  reference_V = np.log([0.4, 0.3, 0.2, 0.1])

  def log_softmax(logits_V):
    return logits_V - np.log(np.exp(logits_V).sum())

  def reverse(logits_V):
    logp_V = log_softmax(logits_V)
    return (np.exp(logp_V) * (logp_V - reference_V)).sum()

  def forward(logits_V):
    return (np.exp(reference_V) * (reference_V - log_softmax(logits_V))).sum()

  @jax.jit
  @jax.value_and_grad
  def mean(logits_V):
    logp_1V = jax.nn.log_softmax(logits_V)[None, :]
    p_1V = jax.lax.stop_gradient(jnp.exp(logp_1V))
    value_1V = kl.estimate(logp_1V, jnp.array(reference_V)[None, :], form)
    return (p_1V * value_1V).sum()

  value, gradient_V = mean(logits_V)
  expected_V = {
    'k1': np.zeros(4),
    'k2': references.gradient(reverse, logits_V),
    'k3': references.gradient(forward, logits_V),
  }[form]
  np.testing.assert_allclose(gradient_V, expected_V, atol=1e-6)
  if form != 'k2':
    assert float(value) == pytest.approx(reverse(logits_V), rel=1e-5)


@FORMS
def test_the_estimate_for_equal_policies_is_zero(form):
  logp_BT = -np.arange(4.0)[None, :]
  value_B, gradient_BT = references.weighted(
    lambda x_BT: kl.estimate(x_BT, logp_BT, form), logp_BT, np.ones((1, 4))
  )
  np.testing.assert_array_equal(value_B, 0.0)
  np.testing.assert_array_equal(gradient_BT, 1.0 if form == 'k1' else 0.0)


def test_no_gradient_reaches_the_reference():
  logp_BT = -np.arange(4.0)[None, :]
  _, gradient_BT = references.weighted(
    lambda x_BT: kl.estimate(logp_BT, x_BT, 'k1'), logp_BT, np.ones((1, 4))
  )
  np.testing.assert_array_equal(gradient_BT, 0.0)


def test_k3_keeps_the_digits_of_a_small_difference():
  # d = 2^-12 exactly. k3 = d^2/2 - d^3/6 + ... would be lost in 1 + k3.
  d = 2.0**-12
  value = estimate(np.array([[d - 1]]), np.array([[-1.0]]), 'k3')
  assert float(value[0, 0]) == pytest.approx(d**2 / 2 - d**3 / 6, rel=1e-2)


@settings(max_examples=20, deadline=None)
@given(
  st.floats(-10, 0, width=32),
  st.floats(-10, 0, width=32),
  st.sampled_from('23'),
)
def test_k2_and_k3_are_never_below_zero(logp, reference, number):
  value = estimate(np.array([[logp]]), np.array([[reference]]), 'k' + number)
  assert float(value[0, 0]) >= -1e-6 * abs(logp - reference)
