"""The numbers of the figures, and on them what the notebook says."""

import dataclasses
import itertools

import numpy as np
import pytest

from mrl_jax import checks
from mrl_jax.bandit import closed_form
from mrl_jax.bandit import methods
from mrl_jax.bandit import problem as problem_lib
from mrl_jax.bandit import sweeps

# The notebook's.
COMPARED = methods.compared(length=40)
HARD = sweeps.prompt(0.005, 0.6, group=4, peers=4)
VANISH = ('GRPO', 'XGRPO', 'PRP, plain ratio')


def test_the_prompt_has_the_rates_and_sizes_that_are_asked():
  assert HARD.p == pytest.approx(0.005)
  assert HARD.q == pytest.approx(0.6)
  assert (HARD.group, HARD.peers) == (4, 4)
  assert np.isfinite(HARD.chi2)
  for name, rates in (('p', (0, 0.5)), ('q', (0.5, 1))):
    with pytest.raises(checks.InputError, match=f'{name} = '):
      sweeps.prompt(*rates, group=1, peers=1)


@pytest.mark.parametrize(
  ('function', 'x_X', 'changed'),
  [
    (sweeps.by_learner, [0.01, 0.3], lambda x: HARD.with_rates(p=x)),
    (sweeps.by_peer, [0.2, 0.9], lambda x: HARD.with_rates(q=x)),
    (sweeps.by_group, [1, 3], lambda x: dataclasses.replace(HARD, group=x)),
    (sweeps.by_peers, [0, 3], lambda x: dataclasses.replace(HARD, peers=x)),
  ],
)
def test_one_thing_varies(function, x_X, changed):
  found = function(HARD, x_X, COMPARED)
  np.testing.assert_array_equal(found.x_X, x_X)
  assert [*found.lines] == [*COMPARED]
  for name, method in COMPARED.items():
    exact = [method.closed_form(changed(x)) for x in x_X]
    line = found.lines[name]
    np.testing.assert_array_equal(line.support_X, [m.support for m in exact])
    np.testing.assert_array_equal(line.noise_X, [m.noise for m in exact])
    np.testing.assert_array_equal(line.second_X, [m.second for m in exact])


def test_samples_are_where_the_closed_forms_are():
  groups = 40_000
  found = sweeps.simulated(HARD, COMPARED, np.random.default_rng(0), groups)
  exact = sweeps.by_learner(HARD, [HARD.p], COMPARED)
  np.testing.assert_allclose(found.x_X, exact.x_X)
  for name, method in COMPARED.items():
    moments, line = method.closed_form(HARD), found.lines[name]
    variance = HARD.u_S_K @ moments.covariance_KK @ HARD.u_S_K
    off = line.support_X - exact.lines[name].support_X
    assert abs(off) < 4 * np.sqrt(variance / groups), name
    for noisy in ('noise_X', 'second_X'):
      near = pytest.approx(getattr(exact.lines[name], noisy), rel=0.1)
      assert getattr(line, noisy) == near, name


def test_sgt_recomputed_prp_and_open_gates_alone_move_what_is_near_0():
  p_X = [1e-2, 1e-3, 2e-4]
  found = sweeps.by_learner(HARD, p_X, COMPARED)
  for name, line in found.lines.items():
    if name in VANISH:
      np.testing.assert_allclose(
        line.support_X / p_X, line.support_X[-1] / p_X[-1], rtol=0.1
      )
      assert line.support_X[0] < 0.02
    elif name == 'PRP, truncated':
      assert line.support_X[-1] < 0  # A bias, and to the wrong side.
    else:
      assert (line.support_X > 0.07).all(), name


def test_below_its_gate_a_method_lowers_p():
  at = HARD.q * 0.8**40 / 10
  found = sweeps.by_learner(HARD, [at], COMPARED)
  for name in ('HACPO', 'GRAFT'):
    assert found.lines[name].support_X[0] < 0
  assert found.lines['SGT'].support_X[0] > 0.07


def test_a_peer_that_never_fails_gives_graft_nothing():
  found = sweeps.by_peer(HARD, [0.5, 0.999], COMPARED)
  half, all_right = found.lines['GRAFT'].support_X
  assert half > 10 * all_right
  assert np.diff(found.lines['SGT'].support_X) > 0
  assert found.lines['PRP, plain ratio'].noise_X[1] > 1


def test_prps_second_moment_rises_with_divergence_and_no_other():
  even = HARD.with_rates(p=0.3, q=0.3)
  tilt_X = np.linspace(0.5, 7, 9)
  compared = methods.compared(length=40, std=False)
  found = sweeps.by_divergence(even, tilt_X, compared, std=False)
  assert (np.diff(found.x_X) > 0).all()
  assert found.x_X[-1] > 1000
  for name, line in found.lines.items():
    if name == 'PRP, plain ratio':
      assert (np.diff(line.second_X) > 0).all()
      assert line.second_X[-1] > 50 * line.second_X[0]
    else:
      assert line.second_X.max() < 2 * line.second_X[0], name
  for tilt, bound in zip(tilt_X, found.bound_X, strict=True):
    at = sweeps.tilted(even, tilt)
    assert closed_form.prp(at, own=False).second <= bound
    assert bound == closed_form.prp_second_moment_bound(at)
  with_std = sweeps.by_divergence(even, [1], compared)
  far = sweeps.tilted(even, 1)
  expected = closed_form.prp_second_moment_bound(far, std=True)
  assert with_std.bound_X == [expected]


def test_a_tilted_peer_succeeds_as_often():
  for tilt in (0.0, 1.0, 3.0):
    at = sweeps.tilted(HARD, tilt)
    assert at.q == pytest.approx(HARD.q)
    for mu_K, pi_K in ((at.mu_S_K, at.pi_S_K), (at.mu_F_K, at.pi_F_K)):
      some_K = pi_K > 0
      power_K = pi_K[some_K] ** (1 - tilt)
      np.testing.assert_allclose(mu_K[some_K], power_K / power_K.sum())
  even = HARD.with_rates(p=0.3, q=0.3)
  assert sweeps.tilted(even, 0.0).chi2 == pytest.approx(0)


def test_prp_is_exponential_in_length_and_no_other():
  found = sweeps.by_length(range(2, 8), chi2=1.0, group=4, peers=4, std=False)
  np.testing.assert_array_equal(found.x_X, range(2, 8))
  for name, line in found.lines.items():
    if name == 'PRP, plain ratio':
      for shorter, longer in itertools.pairwise(line.second_X[-3:]):
        assert longer / shorter == pytest.approx(2, rel=0.03)
    else:
      assert line.second_X.max() < 2 * line.second_X[0], name


def test_ratios_a_token_are_of_the_texts_own_length():
  (T,) = lengths = [3]
  found = sweeps.by_length(lengths, chi2=0.5, group=2, peers=3, capability=0.7)
  m = (1 + np.sqrt(1 / 3)) / 2
  pi_TV, mu_TV = np.full((T, 2), 0.5), np.tile([m, 1 - m], (T, 1))
  text = problem_lib.text(pi_TV, mu_TV, [1, 0], group=2, peers=3)
  assert 1 + text.chi2 == pytest.approx(1.5**T)
  expected = closed_form.hacpo(text, length=T, ratio=0.7).second
  assert found.lines['HACPO'].second_X == pytest.approx([expected])
  expected = closed_form.graft(text, length=T).second
  assert found.lines['GRAFT'].second_X == pytest.approx([expected])


def test_xgrpo_keeps_the_direction_and_changes_the_weights():
  p_X, q_Y = np.array([0.1, 0.9]), [0.05, 0.5, 0.95]
  found = sweeps.context_weights(HARD, p_X, q_Y)
  for x, p in enumerate(p_X):
    at = HARD.with_rates(p=p)
    expected_K = found.grpo_X[x] * at.grad_J_K
    np.testing.assert_allclose(closed_form.grpo(at).mean_K, expected_K)
    for y, q in enumerate(q_Y):
      mean_K = closed_form.xgrpo(at.with_rates(q=q)).mean_K
      expected_K = found.xgrpo_YX[y, x] * at.grad_J_K
      np.testing.assert_allclose(mean_K, expected_K)
  # Most where both do badly, or both well.
  assert (np.diff(found.xgrpo_YX[:, 0]) < 0).all()
  assert (np.diff(found.xgrpo_YX[:, 1]) > 0).all()
  plain = sweeps.context_weights(HARD, p_X, q_Y, std=False)
  np.testing.assert_allclose(plain.grpo_X, 1 - 1 / 4)
  np.testing.assert_allclose(plain.xgrpo_YX, 1 - 1 / 8)


def test_truncation_trades_noise_for_bias():
  apart = HARD.with_rates(p=0.3)
  found = sweeps.by_truncation(apart, np.array([0.3, 1.0, 2.0, 10.0]))
  off_X = found.off['truncated']
  assert (np.diff(off_X) < 0).all()
  assert off_X[-1] == pytest.approx(0, abs=1e-12)
  assert (off_X <= found.bound_X + 1e-12).all()
  assert (np.diff(found.deviation_X) > 0).all()
  expected = closed_form.prp(apart, max_ratio=2.0).noise
  assert found.deviation_X[2] ** 2 == pytest.approx(expected)
  expected = closed_form.truncation_bias_bound(apart, 2.0)
  assert found.bound_X[2] == expected


def test_errors_of_thl_stay_below_their_bound():
  apart, error_X = HARD.with_rates(p=0.3), np.array([0.0, 0.1, 1.0])
  found = sweeps.by_thl_error(apart, error_X, np.random.default_rng(0))
  for name, off_X in found.off.items():
    assert off_X[0] == pytest.approx(0, abs=1e-12)
    assert (np.diff(off_X) > 0).all()
    assert (off_X <= found.bound_X + 1e-12).all(), name
  # An error of one sign is a factor of the peer's part, 1/2 (1 - 1/8) grad J.
  share = (1 - 1 / 8) / 2 * np.linalg.norm(apart.grad_J_K)
  expected_X = np.expm1(error_X) * share
  np.testing.assert_allclose(found.off['all by E'], expected_X, atol=1e-12)
  expected_X = [closed_form.thl_error_bound(apart, E) for E in error_X]
  np.testing.assert_array_equal(found.bound_X, expected_X)


def test_those_with_support_learn_first_and_the_noisy_late():
  few = {name: COMPARED[name] for name in ('GRPO', 'XGRPO', 'SGT', 'GRAFT')}
  few['PRP, truncated'] = COMPARED['PRP, truncated']
  found = sweeps.learning(HARD, few, steps=70, rate=1.0, seeds=40)
  for name in ('SGT', 'GRAFT'):
    assert np.median(found[name].sampled_ST[:, -1]) > 0.9
  for name in ('GRPO', 'XGRPO'):
    assert np.median(found[name].sampled_ST[:, -1]) < 0.05
  assert found['PRP, truncated'].expected_T[-1] < HARD.p
  again = sweeps.learning(
    HARD, {'SGT': COMPARED['SGT']}, steps=70, rate=1.0, seeds=40
  )
  np.testing.assert_array_equal(
    again['SGT'].sampled_ST, found['SGT'].sampled_ST
  )
