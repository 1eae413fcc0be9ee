"""The numbers of the figures, and what the notebook says about them."""

import itertools

import numpy as np
import pytest

from mrl_jax.bandit import closed_form
from mrl_jax.bandit import estimators
from mrl_jax.bandit import methods
from mrl_jax.bandit import problem as problem_lib
from mrl_jax.bandit import simulate
from mrl_jax.bandit import sweeps

# The notebook's.
COMPARED = methods.compared(length=40)
HARD = sweeps.prompt(0.005, 0.6, own_samples=4, peer_samples=4)
EVEN, APART = HARD.replace(p=0.3, q=0.3), HARD.replace(p=0.3)


def test_the_prompt_has_the_given_rates_and_sizes():
  assert HARD.p == pytest.approx(0.005)
  assert HARD.q == pytest.approx(0.6)
  assert (HARD.own_samples, HARD.peer_samples) == (4, 4)
  assert np.isfinite(HARD.chi2)


@pytest.mark.parametrize(
  ('name', 'values'),
  [('p', [0.01, 0.3]), ('q', [0.2, 0.9]), ('own_samples', [1, 3])],
)
def test_one_property_of_the_problem_varies(name, values):
  sweep = sweeps.vary(HARD, COMPARED, **{name: values})
  np.testing.assert_array_equal(sweep.x_X, values)
  assert [*sweep.moments] == [*COMPARED]
  for attribute in ('support', 'noise', 'second'):
    for method, found_X in sweep.curves(attribute).items():
      expected_X = [
        getattr(closed_form.moments(at, COMPARED[method]), attribute)
        for at in (HARD.replace(**{name: value}) for value in values)
      ]
      np.testing.assert_array_equal(found_X, expected_X)


def test_simulated_moments_are_near_the_exact_ones():
  groups = 10_000
  rng = np.random.default_rng(0)
  sweep = sweeps.simulated(HARD, COMPARED, rng, groups)
  np.testing.assert_allclose(sweep.x_X, [HARD.p])
  for name, (found,) in sweep.moments.items():
    exact = closed_form.moments(HARD, COMPARED[name])
    variance = HARD.u_S_K @ exact.covariance_KK @ HARD.u_S_K
    error = np.sqrt(variance / groups)
    assert abs(found.support - exact.support) < 4 * error, name
    assert found.noise == pytest.approx(exact.noise, rel=0.2), name
    assert found.second == pytest.approx(exact.second, rel=0.2), name


def test_support_near_p_0_comes_from_sgt_recomputed_prp_and_open_gates():
  p_X = [1e-2, 1e-3, 2e-4]
  sweep = sweeps.vary(HARD, COMPARED, p=p_X)
  for name, support_X in sweep.curves('support').items():
    if name in ('GRPO', 'XGRPO', 'PRP, plain ratio'):
      rate_X = support_X / p_X
      np.testing.assert_allclose(rate_X, rate_X[-1], rtol=0.1)
      assert support_X[0] < 0.02
    elif name == 'PRP, truncated':
      assert support_X[-1] < 0  # A bias in the wrong direction.
    else:
      assert (support_X > 0.07).all(), name


def test_below_its_gate_a_method_lowers_p():
  at = HARD.q * 0.8**40 / 10
  support = sweeps.vary(HARD, COMPARED, p=[at]).curves('support')
  for name in ('HACPO', 'GRAFT'):
    assert support[name] < 0
  assert support['SGT'] > 0.07


def test_a_peer_that_never_fails_gives_graft_nothing():
  sweep = sweeps.vary(HARD, COMPARED, q=[0.5, 0.999])
  half, always = sweep.curves('support')['GRAFT']
  assert half > 10 * always
  assert np.diff(sweep.curves('support')['SGT']) > 0
  assert sweep.curves('noise')['PRP, plain ratio'][1] > 1


def test_only_the_second_moment_of_plain_prp_rises_with_divergence():
  tilt_X = np.linspace(0.5, 7, 9)
  compared = methods.compared(length=40, std=False)
  sweep = sweeps.by_divergence(EVEN, tilt_X, compared, std=False)
  assert (np.diff(sweep.x_X) > 0).all()
  assert sweep.x_X[-1] > 1000
  for name, second_X in sweep.curves('second').items():
    if name == 'PRP, plain ratio':
      assert (np.diff(second_X) > 0).all()
      assert second_X[-1] > 50 * second_X[0]
    else:
      assert second_X.max() < 2 * second_X[0], name
  for tilt, chi2, bound in zip(tilt_X, sweep.x_X, sweep.bound_X, strict=True):
    at = sweeps.tilted(EVEN, tilt)
    assert chi2 == at.chi2
    assert bound == closed_form.prp_second_moment_bound(at)
  with_std = sweeps.by_divergence(EVEN, [7], compared).bound_X
  assert with_std == closed_form.prp_second_moment_bound(at, std=True)


def test_a_tilted_peer_succeeds_as_often():
  for tilt in (0.0, 1.0, 3.0):
    at = sweeps.tilted(HARD, tilt)
    assert at.q == pytest.approx(HARD.q)
    for reward in (0, 1):
      mu_K, pi_K = at.given(at.mu_K, reward), at.given(at.pi_K, reward)
      power_K = pi_K[pi_K > 0] ** (1 - tilt)
      np.testing.assert_allclose(mu_K[pi_K > 0], power_K / power_K.sum())
  assert sweeps.tilted(EVEN, 0.0).chi2 == pytest.approx(0)


def test_only_plain_prp_is_exponential_in_length():
  sweep = sweeps.by_length(
    range(2, 7), chi2=1.0, own_samples=4, peer_samples=4, std=False
  )
  np.testing.assert_array_equal(sweep.x_X, range(2, 7))
  for name, second_X in sweep.curves('second').items():
    if name == 'PRP, plain ratio':
      for shorter, longer in itertools.pairwise(second_X[-3:]):
        assert longer / shorter == pytest.approx(2, rel=0.03)
    else:
      assert second_X.max() < 2 * second_X[0], name


def test_ratios_per_token_know_the_length_of_the_text():
  sweep = sweeps.by_length(
    [3], chi2=0.5, own_samples=2, peer_samples=3, capability=0.7
  )
  m = (1 + np.sqrt(1 / 3)) / 2
  text = problem_lib.text(3, m, own_samples=2, peer_samples=3)
  assert 1 + text.chi2 == pytest.approx(1.5**3)
  for name, estimator in (
    ('HACPO', estimators.Hacpo(length=3, ratio=0.7)),
    ('GRAFT', estimators.Graft(length=3)),
  ):
    expected = closed_form.moments(text, estimator).second
    assert sweep.curves('second')[name] == pytest.approx([expected])


def test_context_weights_are_those_of_the_gradient():
  p_X, qs = [0.1, 0.9], [0.05, 0.5, 0.95]
  sweep = sweeps.context_weights(HARD, p_X, qs)
  assert [*sweep.moments] == ['GRPO', *(f'XGRPO, q = {q}' for q in qs)]
  weights = sweep.curves('context_weight')
  for q in qs:
    for x, p in enumerate(p_X):
      at = HARD.replace(p=p, q=q)
      for name, estimator in (
        ('GRPO', estimators.Grpo()),
        (f'XGRPO, q = {q}', estimators.Xgrpo()),
      ):
        mean_K = closed_form.moments(at, estimator).mean_K
        np.testing.assert_allclose(mean_K, weights[name][x] * at.grad_J_K)
  # Most where both do badly, or both well.
  _, *by_q = weights.values()
  assert (np.diff([weight_X[0] for weight_X in by_q]) < 0).all()
  assert (np.diff([weight_X[1] for weight_X in by_q]) > 0).all()
  plain = sweeps.context_weights(HARD, p_X, qs, std=False)
  grpo_X, *by_q = plain.curves('context_weight').values()
  np.testing.assert_allclose(grpo_X, 1 - 1 / 4)
  np.testing.assert_allclose(by_q, 1 - 1 / 8)


def test_truncation_trades_noise_for_bias():
  found = sweeps.by_truncation(APART, [0.3, 1.0, 2.0, 10.0])
  distance_X = found.distances()['truncated']
  assert (np.diff(distance_X) < 0).all()
  assert distance_X[-1] == pytest.approx(0, abs=1e-12)
  assert (distance_X <= found.bound_X + 1e-12).all()
  noise_X = found.curves('noise')['truncated']
  assert (np.diff(noise_X) > 0).all()
  noise = closed_form.moments(APART, estimators.Prp(max_ratio=2.0)).noise
  assert noise_X[2] == pytest.approx(noise)
  assert found.bound_X[2] == closed_form.truncation_bias_bound(APART, 2.0)


def test_errors_of_thl_stay_below_their_bound():
  error_X = np.array([0.0, 0.1, 1.0])
  found = sweeps.by_thl_error(APART, error_X, np.random.default_rng(0))
  distances = found.distances()
  for name, distance_X in distances.items():
    assert distance_X[0] == pytest.approx(0, abs=1e-12)
    assert (np.diff(distance_X) > 0).all()
    assert (distance_X <= found.bound_X + 1e-12).all(), name
  # An error of one sign is a factor of the peer's part, 1/2 (1 - 1/8) grad J.
  share = (1 - 1 / 8) / 2 * np.linalg.norm(APART.grad_J_K)
  expected_X = np.expm1(error_X) * share
  np.testing.assert_allclose(distances['all by E'], expected_X, atol=1e-12)
  expected_X = [closed_form.thl_error_bound(APART, E) for E in error_X]
  np.testing.assert_array_equal(found.bound_X, expected_X)


def test_methods_with_support_learn_first_and_noisy_ones_late():
  names = ('GRPO', 'XGRPO', 'SGT', 'GRAFT', 'PRP, truncated')
  curves = {
    name: simulate.learn(HARD, COMPARED[name], updates=70, rate=1.0, seeds=40)
    for name in names
  }
  last = {n: np.median(curves[n].sampled_ST[:, -1]) for n in names}
  assert min(last['SGT'], last['GRAFT']) > 0.9
  assert max(last['GRPO'], last['XGRPO']) < 0.05
  assert curves['PRP, truncated'].expected_T[-1] < HARD.p
