"""Exact moments against numbers by hand, and known formulas."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from mrl_jax.bandit import closed_form
from mrl_jax.bandit import methods
from tests.bandit import problems


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
  found = methods.method(name, **settings).closed_form(problems.small(*sizes))
  np.testing.assert_allclose(found.mean_K, mean * problems.D_K, rtol=1e-5)
  assert found.second == pytest.approx(second, rel=1e-5)
  assert found.no_signal == pytest.approx(no_signal)
  assert found.noise == pytest.approx(second - 2 * mean**2, rel=1e-4, abs=1e-9)
  np.testing.assert_allclose(
    found.bias_K, (mean - 3 / 16) * problems.D_K, atol=1e-5
  )
  assert found.support == pytest.approx(1.5 * mean, rel=1e-5)


def test_without_std_all_but_one_in_n_of_the_gradient_is_left():
  for problem in problems.several():
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
  problem = problems.UNSEEN
  # All that is rewarded is sampled, and yet: the baseline of a failure that is
  # never seen is missing.
  found = closed_form.prp(problem)
  lost_K = problem.grad_J_K * 3 / 4 - found.mean_K
  assert np.linalg.norm(lost_K) > 0.01
  baseline = (2 * problem.p + problem.q) / 4  # Of the other three.
  expected_K = -problem.pi_K[2] * baseline * problem.score_KK[2] / 2
  np.testing.assert_allclose(lost_K, expected_K, atol=1e-12)


def test_with_std_grpo_is_the_sum_over_counts():
  for problem in problems.several():
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
  for problem in problems.several():
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
  problem = dataclasses.replace(problems.several(1)[0], peers=1000)
  square_K = (problem.score_KK**2).sum(1)
  by_sample = problem.pi_K @ ((problem.reward_K - problem.q) ** 2 * square_K)
  G, grad_K = problem.group, problem.grad_J_K
  expected = by_sample / G + (1 - 1 / G) * grad_K @ grad_K
  found = closed_form.xgrpo(problem, std=False)
  assert found.second == pytest.approx(expected, rel=5e-3)


def test_xgrpo_keeps_the_direction_and_changes_how_much():
  for problem in problems.several(100):
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
  problem = problems.several(1, seed=3)[0]
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


def test_the_second_moment_of_prp_is_exponential_in_length_and_no_other():
  rate = 0.25 / 0.8 + 0.25 / 0.2
  short, long = problems.text(3), problems.text(8)
  assert 1 + long.chi2 == pytest.approx(rate**8)
  # Beside the mean, which does not grow, all of it is the ratio's.
  growth = [
    closed_form.prp(at, own=False).second
    for at in map(problems.text, (6, 7, 8))
  ]
  for shorter, longer in itertools.pairwise(growth):
    assert longer / shorter == pytest.approx(rate, rel=0.02)
  for name, method in methods.METHODS.items():
    ratio = method.closed_form(long).second / method.closed_form(short).second
    assert ratio > 6 if name == 'PRP, plain ratio' else ratio < 3, name


def test_bounds_hold():
  far = problems.text(8)  # A ratio with a large second moment.
  for problem in [*problems.several(100, floor=0.05), far]:
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
  problem = problems.small(3, 2)
  for std in (False, True):
    ratio = closed_form.prp(problem, std=std)
    cut = closed_form.prp(problem, std=std, max_ratio=1.2)
    lost = np.linalg.norm(ratio.mean_K - cut.mean_K)
    bound = closed_form.truncation_bias_bound(problem, 1.2, std=std)
    assert lost == pytest.approx(bound, rel=1e-9)
  assert closed_form.truncation_bias_bound(problem, 1.5) == 0


def test_the_truncation_bound_counts_what_the_peer_never_does():
  problem = problems.UNSEEN
  lost_K = problem.grad_J_K * 3 / 4 - closed_form.prp(problem).mean_K
  bound = closed_form.truncation_bias_bound(problem, 10.0)
  assert 0 < np.linalg.norm(lost_K) <= bound + 1e-12


def test_the_bound_of_thl_errors_holds_and_is_of_their_order():
  rng, tightest = np.random.default_rng(1), 0.0
  for problem in problems.several(40):
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


def test_the_support_of_sgt_is_that_of_the_peers_successes():
  for problem in problems.several(20):
    problem = problem.with_rates(p=1e-9)
    peer = 1 - (1 - problem.q) ** problem.peers
    expected = 0.3 * peer * problem.u_S_K @ problem.mu_S_K
    expected -= 0.3 * peer * problem.u_S_K @ problem.pi_K
    found = closed_form.sgt(problem, weight=0.3)
    assert found.support == pytest.approx(expected, rel=1e-6)


def test_graft_and_hacpo_have_support_while_s_lets_a_success_in():
  # s of a success is (p / q)^(1/L): with L tokens, it is let in down to
  # p = q 0.8^L, and not below. A peer that succeeds at 3/4:
  problem = problems.same_failures(
    problems.problem([0.2, 0.3, 0.5], [0.75, 0.125, 0.125], [1, 0, 0], 4, 4)
  )
  for function in (closed_form.graft, closed_form.hacpo):
    found = {
      (p, length): function(problem.with_rates(p=p), length=length).support
      for p in (1e-3, 1e-6, 1e-9)
      for length in (30, 100)
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
  problem = problems.problem(
    [0.2, 0.2, 0.6], [0.3, 0.6, 0.1], [1, 0, 0], 4, 4
  ).with_rates(p=1e-9)
  assert abs(closed_form.prp(problem).support) < 1e-8
  assert abs(closed_form.prp(problem, max_ratio=2.0).support) > 1e-3


def test_an_identical_peer_is_more_samples():
  for problem in problems.several():
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
  for problem in problems.several(10):
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
  for problem in problems.several(10):
    base = closed_form.grpo(problem)
    for normaliser in ('batch', 'rescue'):
      found = closed_form.sgt(
        problem, weight=0.0, batch=3, normaliser=normaliser
      )
      np.testing.assert_allclose(found.mean_K, base.mean_K, atol=1e-12)
      assert found.noise == pytest.approx(base.noise / 3)
      assert found.no_signal == pytest.approx(base.no_signal**3)


def test_a_single_sample_learns_only_from_a_peer():
  problem = dataclasses.replace(problems.several(1)[0], group=1, peers=3)
  assert closed_form.grpo(problem).second == 0
  assert closed_form.grpo(problem).no_signal == pytest.approx(1)
  for name in ('xgrpo', 'prp', 'hacpo', 'sgt'):
    assert methods.method(name).closed_form(problem).second > 0, name
