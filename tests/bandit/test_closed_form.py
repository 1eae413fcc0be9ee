"""Exact moments against numbers by hand, known formulas, and the product."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax.bandit import closed_form
from mrl_jax.bandit import methods
from mrl_jax.bandit import problem as problem_lib
from mrl_jax.bandit import simulate
from mrl_jax.losses import grpo as grpo_loss
from mrl_jax.losses import gspo as gspo_loss
from mrl_jax.losses import hacpo as hacpo_loss
from mrl_jax.losses import prp as prp_loss
from mrl_jax.sharing import capability
from mrl_jax.sharing import carry
from mrl_jax.sharing import graft
from mrl_jax.sharing import grpo
from mrl_jax.sharing import xgrpo
from tests import examples

# Two actions, of which the first is right; p = 1/4, q = 1/2. With d = (1, -1),
# s(right) = 3/4 d and s(wrong) = -1/4 d; pi / mu is 1/2 and 3/2.
SMALL = {'pi_K': [0.25, 0.75], 'mu_K': [0.5, 0.5], 'reward_K': [1, 0]}
D_K = np.array([1.0, -1.0])


def small(group, peers):
  return problem_lib.Problem(**SMALL, group=group, peers=peers)


@pytest.mark.parametrize(
  ('sizes', 'method', 'mean', 'second', 'no_signal'),
  [
    # k = 1 of 2, with 3/8: g = 1/2 (1/2 3/4 + 1/2 1/4) d = 1/4 d.
    ((2, 0), ('grpo', {'std': False}), 3 / 32, 3 / 64, 5 / 8),
    # The deviation is 1/2: twice the gradient.
    ((2, 0), ('grpo', {}), 3 / 16, 3 / 16, 5 / 8),
    # Right, the peer wrong (1/8): 1/2 3/4 d; the reverse (3/8): 1/2 1/4 d.
    ((1, 1), ('xgrpo', {'std': False}), 3 / 32, 3 / 64, 1 / 2),
    ((1, 1), ('xgrpo', {}), 3 / 16, 3 / 16, 1 / 2),
    # 1/2 (3/8 + 1/2 3/2 1/4) = 9/32 with 1/8; 1/2 (1/8 + 1/2 1/2 3/4) = 5/32
    # with 3/8.
    ((1, 1), ('prp', {}), 3 / 32, 39 / 1024, 1 / 2),
    # The ratio 3/2 becomes 1, and 9/32 becomes 1/4.
    ((1, 1), ('prp', {'max_ratio': 1}), 23 / 256, 139 / 4096, 1 / 2),
    # Ratios 1: 1/4 either way.
    ((1, 1), ('prp', {'denominators': 'recompute'}), 1 / 8, 1 / 16, 1 / 2),
    # The ratio 1/2 becomes 1, and 5/32 becomes 1/4.
    (
      (1, 1),
      ('prp', {'error_K': np.array([math.log(2), 0])}),
      33 / 256,
      2 * (1 / 8 * 81 / 1024 + 3 / 8 / 16),
      1 / 2,
    ),
    # The clip passes by a success below it, and stops a failure: with 1 + 0.6
    # as the bound, 9/32 becomes 3/16.
    (
      (1, 1),
      ('prp', {'clip': (-0.6, 0.28)}),
      1 / 8 * 3 / 16 + 3 / 8 * 5 / 32,
      2 * (1 / 8 * 9 / 256 + 3 / 8 * 25 / 1024),
      1 / 2,
    ),
    # A rescue, 3/4 1/2, has lambda 3/4 d.
    ((1, 1), ('sgt', {'weight': 1}), 9 / 32, 27 / 64, 5 / 8),
    # The mean of two such: half the variance.
    (
      (1, 1),
      ('sgt', {'weight': 1, 'batch': 2}),
      9 / 32,
      27 / 128 + 81 / 1024,
      25 / 64,
    ),
    # 3/4 d where one of two is rescued, 1 - (5/8)^2.
    (
      (1, 1),
      ('sgt', {'weight': 1, 'batch': 2, 'normaliser': 'rescue'}),
      3 / 4 * 39 / 64,
      9 / 8 * 39 / 64,
      25 / 64,
    ),
    # Both ratios are outside [0.8, 1]. w = 1/2: b is 1/2, and 1/4 where only
    # the peer is right: 1/2 1/2 3/4 with 1/8, 1/2 1/4 1/4 with 3/8.
    (
      (1, 1),
      ('hacpo', {'std': False, 'ratio': 0.5}),
      1 / 8 * 3 / 16 + 3 / 8 / 32,
      2 * (1 / 8 * 9 / 256 + 3 / 8 / 1024),
      1 / 2,
    ),
    # The peer's success weighs (1/2)^2 / w = 1/2: 1/2 (1/16 + 3/4 1/2 3/4).
    (
      (1, 1),
      ('hacpo', {'std': False, 'ratio': 0.5, 'low': 0.5}),
      1 / 8 * 3 / 16 + 3 / 8 * 11 / 64,
      2 * (1 / 8 * 9 / 256 + 3 / 8 * 121 / 4096),
      1 / 2,
    ),
    # In units of sqrt(1/2), the unbiased deviation of 0 and 1.
    (
      (1, 1),
      ('hacpo', {'ratio': 0.5}),
      math.sqrt(2) * (1 / 8 * 3 / 16 + 3 / 8 / 32),
      4 * (1 / 8 * 9 / 256 + 3 / 8 / 1024),
      1 / 2,
    ),
    # Own failure, l = 1 of 2, with 3/8; A = -1, 1. The success is dropped.
    ((1, 2), ('graft', {}), 3 / 8 / 8, 2 * 3 / 8 / 64, 5 / 8),
    ((1, 2), ('graft', {'normaliser': 'admitted'}), 3 / 32, 3 / 64, 5 / 8),
    # With it: 1/2 (1/2 3/4 + 1/4) d.
    (
      (1, 2),
      ('graft', {'floor': 0.4}),
      3 / 8 * 5 / 16,
      2 * 3 / 8 * 25 / 256,
      5 / 8,
    ),
    # Unweighted: 1/2 (3/4 + 1/4) d; of the success alone, 1/2 3/4 d.
    (
      (1, 2),
      ('graft', {'gate': False, 'weighted': False}),
      3 / 16,
      2 * 3 / 8 / 4,
      5 / 8,
    ),
    (
      (1, 2),
      ('graft', {'gate': False, 'weighted': False, 'success_only': True}),
      9 / 64,
      2 * 3 / 8 * 9 / 64,
      5 / 8,
    ),
  ],
)
def test_two_actions_by_hand(sizes, method, mean, second, no_signal):
  name, settings = method
  found = methods.method(name, **settings).closed_form(small(*sizes))
  np.testing.assert_allclose(found.mean_K, mean * D_K, rtol=1e-5)
  assert found.second == pytest.approx(second, rel=1e-5)
  assert found.no_signal == pytest.approx(no_signal)
  assert found.noise == pytest.approx(second - 2 * mean**2, rel=1e-4, abs=1e-9)
  np.testing.assert_allclose(found.bias_K, (mean - 3 / 16) * D_K, atol=1e-5)
  assert found.support == pytest.approx(1.5 * mean, rel=1e-5)


def problems(count=40, seed=0, **settings):
  rng = np.random.default_rng(seed)
  return [problem_lib.random(rng, **settings) for _ in range(count)]


def test_without_std_all_but_one_in_n_of_the_gradient_is_left():
  for problem in problems():
    for found, count in (
      (closed_form.grpo(problem, std=False), problem.group),
      (closed_form.xgrpo(problem, std=False), problem.pooled),
      (closed_form.prp(problem), problem.pooled),
    ):
      expected_K = (1 - 1 / count) * problem.grad_J_K
      np.testing.assert_allclose(found.mean_K, expected_K, atol=1e-12)
      bias_K = -problem.grad_J_K / count
      np.testing.assert_allclose(found.bias_K, bias_K, atol=1e-12)


def test_what_only_the_learner_does_is_lost_of_the_peers_part():
  problem = problem_lib.Problem(
    pi_K=[0.3, 0.3, 0.4],
    mu_K=[0.6, 0.4, 0],
    reward_K=[1, 0, 0],
    group=2,
    peers=2,
  )
  # All that is rewarded is sampled, and yet: the baseline of a failure that is
  # never seen is missing.
  found = closed_form.prp(problem)
  lost_K = problem.grad_J_K * 3 / 4 - found.mean_K
  assert np.linalg.norm(lost_K) > 0.01
  baseline = (2 * problem.p + problem.q) / 4  # Of the other three.
  expected_K = -problem.pi_K[2] * baseline * problem.score_KK[2] / 2
  np.testing.assert_allclose(lost_K, expected_K, atol=1e-12)


def test_with_std_grpo_is_the_sum_over_counts():
  for problem in problems():
    G, p = problem.group, problem.p
    weight = sum(
      math.comb(G, k) * p**k * (1 - p) ** (G - k) * math.sqrt(k * (G - k)) / G
      for k in range(G + 1)
    )
    found = closed_form.grpo(problem)
    difference_K = problem.u_S_K - problem.u_F_K
    np.testing.assert_allclose(found.mean_K, weight * difference_K, atol=1e-5)
    assert found.no_signal == pytest.approx(p**G + (1 - p) ** G)


def test_recomputed_denominators_have_the_field_of_the_peer():
  for problem in problems():
    found = closed_form.prp(problem, own=False, denominators='recompute')
    # E (r - b) s of a sample that is itself a share 1/N of b.
    N = problem.pooled
    others = (problem.group * problem.p + (problem.peers - 1) * problem.q) / N
    advantage_K = problem.reward_K * (1 - 1 / N) - others
    expected_K = (problem.mu_K * advantage_K) @ problem.score_KK
    share = problem.peers / N
    np.testing.assert_allclose(found.mean_K, share * expected_K, atol=1e-12)


def test_the_second_moment_without_std_is_that_of_a_constant_baseline():
  # XGRPO as H grows: b is q, and E|g|^2 = E|(r - q) s|^2 / G
  # + (1 - 1/G) |grad J|^2: the excess over b = p is not only
  # (q - p)^2 E|s|^2 / G, but also 2 (p - q) E[(r - p) |s|^2] / G.
  problem = dataclasses.replace(problems(1)[0], peers=1000)
  square_K = (problem.score_KK**2).sum(1)
  by_sample = problem.pi_K @ ((problem.reward_K - problem.q) ** 2 * square_K)
  G, grad_K = problem.group, problem.grad_J_K
  expected = by_sample / G + (1 - 1 / G) * grad_K @ grad_K
  found = closed_form.xgrpo(problem, std=False)
  assert found.second == pytest.approx(expected, rel=5e-3)


def test_xgrpo_keeps_the_direction_and_changes_how_much():
  for problem in problems(100):
    difference_K = problem.u_S_K - problem.u_F_K
    for std in (True, False):
      sizes = []
      for q in (0.01, 0.5, 0.99):
        found = closed_form.xgrpo(problem.with_rates(q=q), std=std)
        size = found.mean_K @ difference_K / (difference_K @ difference_K)
        np.testing.assert_allclose(
          found.mean_K, size * difference_K, atol=1e-12
        )
        sizes.append(size)
      assert min(sizes) > 0
      # Without std the peer does not matter to the mean.
      # Nor with it in a group of two or three, where every deviation that
      # is not 0 is the same.
      if std and problem.pooled > 3:
        assert np.ptp(sizes) > 1e-4
      else:
        assert np.ptp(sizes) < 1e-12


def test_every_second_moment_of_prp_rises_with_chi2():
  problem = problems(1, seed=3)[0]
  far_K = np.roll(problem.pi_K, 1) ** 2
  far_K /= far_K.sum()
  rows = []
  for t in np.linspace(0, 1, 11):
    mu_K = (1 - t) * problem.pi_K + t * far_K
    at = dataclasses.replace(problem, mu_K=mu_K)
    rows.append((at.chi2, closed_form.prp(at, own=False).second))
  chi2, second = np.transpose(rows)
  assert chi2[-1] > 1
  assert (np.diff(chi2) > 0).all()
  assert (np.diff(second) > 0).all()


def texts(lengths, group=2, peers=2):
  token = ([0.5, 0.5], [0.8, 0.2])
  for T in lengths:
    pi_TV, mu_TV = (np.tile(policy, (T, 1)) for policy in token)
    yield problem_lib.text(pi_TV, mu_TV, [1, 0], group=group, peers=peers)


def test_the_second_moment_of_prp_is_exponential_in_length_and_no_other():
  rate = 0.25 / 0.8 + 0.25 / 0.2
  short, long = texts((3, 9))
  assert 1 + long.chi2 == pytest.approx(rate**9)
  # Beside the mean, which does not grow, all of it is the ratio's.
  growth = [closed_form.prp(at, own=False).second for at in texts((7, 8, 9))]
  for shorter, longer in itertools.pairwise(growth):
    assert longer / shorter == pytest.approx(rate, rel=0.02)
  for name, method in methods.METHODS.items():
    ratio = method.closed_form(long).second / method.closed_form(short).second
    assert ratio > 10 if name == 'PRP, plain ratio' else ratio < 3, name


def test_bounds_hold():
  far = next(texts((9,)))  # A ratio with a large second moment.
  for problem in [*problems(100, floor=0.05), far]:
    exact = closed_form.prp(problem, own=False)
    assert exact.second <= closed_form.prp_second_moment_bound(problem)
    transfer = closed_form.sgt(
      dataclasses.replace(problem, group=1), weight=0.5
    )
    bound = closed_form.sgt_second_moment_bound(transfer.problem, 0.5)
    assert transfer.second <= bound
    for std in (False, True):
      ratio = closed_form.prp(problem, std=std)
      peer = closed_form.prp(problem, own=False, std=std)
      bound = closed_form.prp_second_moment_bound(problem, std=std)
      assert peer.second <= bound
      for C in (0.5, 1, 2):
        cut = closed_form.prp(problem, std=std, max_ratio=C)
        bound = closed_form.truncation_bias_bound(problem, C, std=std)
        lost = np.linalg.norm(cut.mean_K - ratio.mean_K)
        assert lost <= bound + 1e-12
        assert cut.no_signal == pytest.approx(ratio.no_signal)


def test_the_truncation_bound_is_reached_where_one_action_is_cut():
  problem = small(3, 2)
  for std in (False, True):
    ratio = closed_form.prp(problem, std=std)
    cut = closed_form.prp(problem, std=std, max_ratio=1.2)
    lost = np.linalg.norm(ratio.mean_K - cut.mean_K)
    bound = closed_form.truncation_bias_bound(problem, 1.2, std=std)
    assert lost == pytest.approx(bound, rel=1e-9)
  assert closed_form.truncation_bias_bound(problem, 1.5) == 0


def test_the_truncation_bound_counts_what_the_peer_never_does():
  problem = problem_lib.Problem(
    pi_K=[0.3, 0.3, 0.4],
    mu_K=[0.6, 0.4, 0],
    reward_K=[1, 0, 0],
    group=2,
    peers=2,
  )
  lost_K = problem.grad_J_K * 3 / 4 - closed_form.prp(problem).mean_K
  bound = closed_form.truncation_bias_bound(problem, 10.0)
  assert 0 < np.linalg.norm(lost_K) <= bound + 1e-12


def test_the_bound_of_thl_errors_holds_and_is_of_their_order():
  rng, tightest = np.random.default_rng(1), 0.0
  for problem in problems(40):
    for E in (0.01, 0.3, 1.0):
      # Worst are errors of one sign by reward; signs that are drawn too.
      for error_K in (
        np.full_like(problem.pi_K, E),
        E * (2 * problem.reward_K - 1),
        rng.uniform(-E, E, len(problem.pi_K)),
      ):
        for std in (False, True):
          ratio = closed_form.prp(problem, std=std)
          found = closed_form.prp(problem, std=std, error_K=error_K)
          off = np.linalg.norm(found.mean_K - ratio.mean_K)
          bound = closed_form.thl_error_bound(problem, E, std=std)
          assert off <= bound + 1e-12
          tightest = max(tightest, off / bound)
  assert tightest > 0.9


# As p -> 0, these lose what they have of u_S in proportion to p.
VANISH = (
  'GRPO',
  'GRPO without std',
  'XGRPO',
  'XGRPO without std',
  'PRP, plain ratio',
)


@pytest.mark.parametrize('name', VANISH)
def test_support_vanishes_with_p(name):
  for problem in problems(20):
    rates = [
      methods.METHODS[name].closed_form(problem.with_rates(p=p)).support / p
      for p in (1e-3, 1e-5, 1e-7)
    ]
    assert rates[2] == pytest.approx(rates[1], rel=1e-2, abs=1e-7)
    assert abs(rates[2]) < 20


@pytest.mark.parametrize('name', ['SGT', 'PRP, recomputed'])
def test_support_stays_without_a_ratio(name):
  for problem in problems(20):
    # The same failures, so that only successes tell the two apart.
    problem = dataclasses.replace(
      problem,
      mu_K=problem.q * problem.mu_S_K + (1 - problem.q) * problem.pi_F_K,
    )
    rates = [
      methods.METHODS[name].closed_form(problem.with_rates(p=p)).support
      for p in (1e-4, 1e-7)
    ]
    assert rates[1] == pytest.approx(rates[0], rel=1e-2)
    assert rates[1] > 1e-3


def test_the_support_of_sgt_is_that_of_the_peers_successes():
  for problem in problems(20):
    problem = problem.with_rates(p=1e-9)
    peer = 1 - (1 - problem.q) ** problem.peers
    expected = 0.3 * peer * problem.u_S_K @ problem.mu_S_K
    expected -= 0.3 * peer * problem.u_S_K @ problem.pi_K
    found = closed_form.sgt(problem, weight=0.3)
    assert found.support == pytest.approx(expected, rel=1e-6)


def rescued(p, length):
  """A peer that succeeds at 3/4, and otherwise fails as the learner does."""
  problem = problem_lib.Problem(
    pi_K=[0.2, 0.3, 0.5],
    mu_K=[0.75, 0.125, 0.125],
    reward_K=[1, 0, 0],
    group=4,
    peers=4,
  )
  problem = dataclasses.replace(
    problem, mu_K=0.75 * problem.mu_S_K + 0.25 * problem.pi_F_K
  ).with_rates(p=p)
  return problem, {'length': length}


def test_graft_and_hacpo_have_support_while_s_lets_a_success_in():
  # s of a success is (p / q)^(1/L): with L tokens, it is let in down to
  # p = q 0.8^L, and not below.
  for function in (closed_form.graft, closed_form.hacpo):
    found = {
      (p, length): function(problem, **settings).support
      for p in (1e-3, 1e-6, 1e-9)
      for length in (30, 100)
      for problem, settings in [rescued(p, length)]
    }
    assert 1e-3 > 0.75 * 0.8**30 > 1e-6
    assert 1e-9 > 0.75 * 0.8**100
    assert found[1e-3, 100] > 0.05
    assert found[1e-9, 100] > 0.05
    assert found[1e-3, 30] > 0.05
    for p in (1e-6, 1e-9):
      assert abs(found[p, 30]) < 10 * p


def test_truncation_gives_support_to_what_should_have_none():
  # A failure that the peer hardly makes is pushed down too little: that is a
  # bias which does not vanish with p, of either sign.
  problem = problem_lib.Problem(
    pi_K=[0.2, 0.2, 0.6],
    mu_K=[0.3, 0.6, 0.1],
    reward_K=[1, 0, 0],
    group=4,
    peers=4,
  ).with_rates(p=1e-9)
  assert abs(closed_form.prp(problem).support) < 1e-8
  assert abs(closed_form.prp(problem, max_ratio=2.0).support) > 1e-3


def test_an_identical_peer_is_more_samples():
  for problem in problems():
    problem = dataclasses.replace(problem, mu_K=problem.pi_K)
    twice = dataclasses.replace(problem, group=problem.pooled, peers=0)
    for std in (True, False):
      pooled = closed_form.grpo(twice, std=std)
      for settings in ({}, {'max_ratio': 2.0}, {'denominators': 'recompute'}):
        found = closed_form.prp(problem, std=std, **settings)
        assert_same(found, pooled)
    found = closed_form.hacpo(problem)
    plain = closed_form.hacpo(
      problem, clip=False, alpha=0, ratio=1.0, capability_baseline=False
    )
    assert_same(found, plain)
    chance = closed_form.graft(problem).mean_K @ problem.u_S_K
    assert np.isfinite(chance)
    assert chance >= closed_form.grpo(problem).support


def assert_same(one, other):
  np.testing.assert_allclose(one.mean_K, other.mean_K, atol=1e-12)
  np.testing.assert_allclose(one.covariance_KK, other.covariance_KK, atol=1e-12)
  assert one.no_signal == pytest.approx(other.no_signal)


def test_without_a_peer_all_are_grpo():
  for problem in problems(10):
    problem = dataclasses.replace(problem, peers=0)
    for std in (True, False):
      base = closed_form.grpo(problem, std=std)
      for function in ('xgrpo', 'prp', 'sgt', 'graft'):
        assert_same(
          methods.method(function, std=std).closed_form(problem), base
        )
    plain = closed_form.grpo(problem, std=False)
    assert_same(closed_form.hacpo(problem, std=False), plain)


def test_without_a_weight_sgt_is_the_mean_of_batches_of_grpo():
  for problem in problems(10):
    base = closed_form.grpo(problem)
    for normaliser in ('batch', 'rescue'):
      found = closed_form.sgt(
        problem, weight=0.0, batch=3, normaliser=normaliser
      )
      np.testing.assert_allclose(found.mean_K, base.mean_K, atol=1e-12)
      assert found.noise == pytest.approx(base.noise / 3)
      assert found.no_signal == pytest.approx(base.no_signal**3)


def test_a_single_sample_learns_only_from_a_peer():
  problem = dataclasses.replace(problems(1)[0], group=1, peers=3)
  assert closed_form.grpo(problem).second == 0
  assert closed_form.grpo(problem).no_signal == pytest.approx(1)
  for name in ('xgrpo', 'prp', 'hacpo', 'sgt'):
    assert methods.method(name).closed_form(problem).second > 0, name


@pytest.mark.parametrize('name', methods.METHODS)
@pytest.mark.parametrize('p', [0.0, 1e-9, 1 - 1e-9, 1.0])
def test_limits_are_finite_and_reached(name, p):
  method = methods.METHODS[name].closed_form
  for problem in problems(5):
    at = problem.with_rates(p=p)
    near = problem.with_rates(p=abs(p - 1e-7))
    for q in (None, 0.0, 1.0):
      found, beside = (method(x.with_rates(q=q)) for x in (at, near))
      for value in (found.mean_K, found.second, found.no_signal, found.support):
        assert np.isfinite(value).all()
      if 'tokens' not in name:  # With gates that some p between may pass.
        np.testing.assert_allclose(found.mean_K, beside.mean_K, atol=1e-4)
        assert found.second == pytest.approx(beside.second, abs=1e-4)


def test_a_learner_that_always_succeeds_stays():
  for problem in problems(5):
    found = {
      name: method.closed_form(problem.with_rates(p=1.0, q=1.0))
      for name, method in methods.METHODS.items()
    }
    for name in found:
      assert found[name].second < 1e-12, name
      assert found[name].no_signal == pytest.approx(1), name


class Sample:
  """One group of each, sample by sample, as the product has it."""

  def __init__(self, problem, rng):
    self.problem = problem
    self.own_G = rng.choice(len(problem.pi_K), problem.group, p=problem.pi_K)
    self.peer_H = rng.choice(len(problem.pi_K), problem.peers, p=problem.mu_K)
    own_1G, peer_1H = (
      problem.reward_K[x][None] for x in (self.own_G, self.peer_H)
    )
    self.rewards = own_1G, peer_1H
    self.moments = grpo.moments(own_1G), {'peer': grpo.moments(peer_1H)}

  def advantages(self, baseline, scale):
    return [
      grpo.advantages(rewards, baseline, scale=scale)[0]
      for rewards in self.rewards
    ]

  def draw(self):
    own_1K, peer_1K = (
      np.bincount(x, minlength=len(self.problem.pi_K))[None]
      for x in (self.own_G, self.peer_H)
    )
    pi_1K = self.problem.pi_K[None]
    return simulate.Draw(self.problem, pi_1K, own_1K, peer_1K, np.zeros((1, 1)))


def product_gradient(problem, objective, length=1):
  """Of an objective of log-probabilities [B, T], summed over rows."""

  def value(theta_K):
    logp_K = jax.nn.log_softmax(theta_K)

    def tokens(actions_B):
      return jnp.tile(logp_K[actions_B][:, None] / length, (1, length))

    return objective(tokens)

  return np.array(jax.grad(value)(jnp.log(problem.pi_K)))


def assert_the_product_gives(sample, simulator, objective, length=1):
  drawn = sample.draw()
  found_1K = simulate.gradient(simulator(drawn), drawn.pi_MK)
  expected_K = product_gradient(sample.problem, objective, length)
  np.testing.assert_allclose(found_1K[0], expected_K, rtol=2e-4, atol=1e-5)


def column(values):
  return jnp.asarray(values, jnp.float32)[:, None]


@pytest.mark.parametrize('seed', range(3))
def test_the_product_has_these_gradients(seed):
  rng = np.random.default_rng(seed)
  sample = Sample(problem_lib.random(rng), rng)
  problem = sample.problem
  own_G, peer_H = sample.own_G, sample.peer_H
  N = problem.pooled
  pooled = xgrpo.pooled(*sample.moments, None, {})

  def own_objective(tokens, advantage_G, rows):
    logp_BT = tokens(own_G)
    ratio_BT = jnp.exp(logp_BT - jax.lax.stop_gradient(logp_BT))
    value_BT = grpo_loss.clipped_surrogate(
      ratio_BT, column(advantage_G), 0.2, 0.28
    )
    return value_BT.sum() / rows

  for scale in ('std', 'none'):
    std = scale == 'std'
    own = grpo.own(*sample.moments, None, {})
    for baseline, name in ((own, 'grpo'), (pooled, 'xgrpo')):
      advantage_G, _ = sample.advantages(baseline, scale)
      assert_the_product_gives(
        sample,
        methods.method(name, std=std).simulator,
        lambda tokens, a_G=advantage_G: own_objective(tokens, a_G, len(a_G)),
      )

  own_G1, peer_H1 = sample.advantages(pooled, 'std')

  def prp_objective(tokens):
    rho_BT = prp_loss.chunk_ratio(
      tokens(peer_H),
      jnp.log(column(problem.mu_K[peer_H])),
      jnp.zeros((len(peer_H), 1), jnp.int32),
      methods.MAX_RATIO,
    )
    peer_BT = grpo_loss.clipped_surrogate(
      rho_BT, column(peer_H1), *methods.CLIP
    )
    return own_objective(tokens, own_G1, N) + peer_BT.sum() / N

  simulator = methods.METHODS['PRP'].simulator
  assert_the_product_gives(sample, simulator, prp_objective)


@pytest.mark.parametrize('seed', range(2))
@pytest.mark.parametrize('length', [1, 3])
def test_the_product_has_these_gradients_of_hacpo(seed, length):
  rng = np.random.default_rng(seed)
  sample = Sample(problem_lib.random(rng, most_group=3, most_peers=5), rng)
  problem, own_G, peer_H = sample.problem, sample.own_G, sample.peer_H
  ratio = 0.6
  baseline = capability.capability(*sample.moments, None, {'peer': ratio})
  own_A_G, peer_A_H = sample.advantages(baseline, 'unbiased_std')
  mu_BT = jnp.tile(jnp.log(column(problem.mu_K[peer_H])) / length, (1, length))

  def hacpo_objective(tokens):
    own_BT, peer_BT = tokens(own_G), tokens(peer_H)
    s_BT = gspo_loss.sequence_ratio(
      peer_BT, mu_BT, jnp.ones_like(peer_BT, bool), 10.0
    )
    low_B1 = hacpo_loss.lower_bound(0.5, 0.01, jnp.zeros((len(peer_H), 1)))
    peer_BT = hacpo_loss.stepwise_surrogate(
      s_BT, column(peer_A_H) / ratio, low_B1, 1.0, 2.0
    )
    own_BT = gspo_loss.sequence_ratio(
      own_BT, jax.lax.stop_gradient(own_BT), jnp.ones_like(own_BT, bool)
    )
    own_BT = grpo_loss.clipped_surrogate(own_BT, column(own_A_G), 3e-4, 4e-4)
    return (own_BT.sum() + peer_BT.sum()) / problem.pooled

  simulator = methods.method(
    'hacpo', ratio=ratio, length=length, low=0.5, alpha=2.0
  ).simulator
  assert_the_product_gives(sample, simulator, hacpo_objective, length)


@pytest.mark.parametrize('normaliser', ['group', 'admitted'])
@pytest.mark.parametrize('length', [1, 4])
def test_the_product_has_these_gradients_of_graft(length, normaliser):
  rng, admitted = np.random.default_rng(0), set()
  for _ in range(6):
    problem = problem_lib.random(rng, most_peers=5)
    sample = Sample(problem, rng)
    # An own group that fails.
    sample.own_G[:] = np.argmin(problem.reward_K)
    if np.ptp(problem.reward_K[sample.peer_H]) == 0:
      continue
    rows = grafted_rows(sample, length)
    admitted.add(len(rows) / problem.peers)
    expected_K = sum(
      weight * advantage * problem.score_KK[action]
      for action, weight, advantage in rows
    ) / (len(rows) or 1 if normaliser == 'admitted' else problem.peers)
    drawn = sample.draw()
    method = methods.method('graft', length=length, normaliser=normaliser)
    found_1K = simulate.gradient(method.simulator(drawn), drawn.pi_MK)
    np.testing.assert_allclose(
      found_1K[0], expected_K * np.ones(len(problem.pi_K)), atol=1e-6
    )
  assert len(admitted) > 2


def grafted_rows(sample, length):
  """What `sharing/graft.py` takes: actions, weights and advantages."""
  problem, settings = sample.problem, examples.run_config().method
  group = [
    examples.rollout(reward=problem.reward_K[a], logp=logp_T, sample=g)
    for g, a in enumerate(sample.peer_H)
    for logp_T in [np.full(5, np.log(problem.mu_K[a]) / length, np.float32)]
  ]
  selected = [
    carry.Selected(g, rollout, rollout.advantage)
    for g, rollout in enumerate(grpo.with_advantages(group))
  ]

  def score(rows, reference=False):
    del reference
    return [
      np.full(
        len(row.ids),
        np.log(problem.pi_K[sample.peer_H[row.prompt]]) / length,
        np.float32,
      )
      for row in rows
    ]

  learner = examples.learner(examples.tokenizer('byte_level'), score=score)
  return [
    (sample.peer_H[row.prompt], row.weight, row.advantage)
    for row in graft.carry(selected, learner, settings).rows
  ]
