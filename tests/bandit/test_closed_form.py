"""Exact moments against numbers by hand, known formulas and bounds."""

import itertools
import math

import numpy as np
import pytest

from mrl_jax.bandit import closed_form
from mrl_jax.bandit import estimators
from mrl_jax.bandit import methods
from tests.bandit import problems

moments = closed_form.moments
GRPO, PRP = estimators.Grpo(), estimators.Prp()


class PeerTerm(estimators.Prp):
  """PRP without the term of the own samples."""

  def coefficients(self, counts):
    own_Z2, peer_Z2 = super().coefficients(counts)
    return np.zeros_like(own_Z2), peer_Z2


def norm(x_K):
  return np.linalg.norm(x_K)


@pytest.mark.parametrize(
  ('sizes', 'estimator', 'mean', 'second'),
  [
    # k = 1 of 2, with 3/8: g = 1/2 (1/2 3/4 + 1/2 1/4) d = 1/4 d.
    ((2, 0), estimators.Grpo(std=False), 3 / 32, 3 / 64),
    # The deviation is 1/2: twice the gradient.
    ((2, 0), GRPO, 3 / 16, 3 / 16),
    # Right, the peer wrong (1/8): 1/2 3/4 d; the reverse (3/8): 1/2 1/4 d.
    ((1, 1), estimators.Xgrpo(std=False), 3 / 32, 3 / 64),
    ((1, 1), estimators.Xgrpo(), 3 / 16, 3 / 16),
    # 1/2 (3/8 + 1/2 3/2 1/4) = 9/32 with 1/8; 1/2 (1/8 + 1/2 1/2 3/4) = 5/32
    # with 3/8.
    ((1, 1), PRP, 3 / 32, 39 / 1024),
    # Ratios 1: 1/4 either way.
    ((1, 1), estimators.Prp(denominators='recompute'), 1 / 8, 1 / 16),
    # A rescue, 3/4 1/2, has lambda 3/4 d.
    ((1, 1), estimators.Sgt(weight=1), 9 / 32, 27 / 64),
    # The mean of two such: half the variance.
    (
      (1, 1),
      estimators.Sgt(weight=1, batch=2),
      9 / 32,
      27 / 128 + 81 / 1024,
    ),
    # 3/4 d where one of two is rescued, 1 - (5/8)^2.
    (
      (1, 1),
      estimators.Sgt(weight=1, batch=2, normaliser='rescue'),
      3 / 4 * 39 / 64,
      9 / 8 * 39 / 64,
    ),
    # w = 1/2: b is 1/2, and 1/4 where only the peer is right. The peer's
    # success weighs (1/2)^2 / w = 1/2, its failure (3/2 is above 1) nothing:
    # 1/2 1/2 3/4 d with 1/8, 1/2 (1/4 1/4 + 3/4 1/2 3/4) d with 3/8.
    (
      (1, 1),
      estimators.Hacpo(std=False, ratio=0.5, low=0.5),
      1 / 8 * 3 / 16 + 3 / 8 * 11 / 64,
      2 * (1 / 8 * 9 / 256 + 3 / 8 * 121 / 4096),
    ),
    # Own failure and l = 1 of 2, with 3/8: A = -1 and 1. The success, s = 1/2,
    # is dropped.
    ((1, 2), estimators.Graft(), 3 / 8 / 8, 2 * 3 / 8 / 64),
    # With it: 1/2 (1/2 3/4 + 1/4) d.
    ((1, 2), estimators.Graft(floor=0.4), 3 / 8 * 5 / 16, 2 * 3 / 8 * 25 / 256),
  ],
)
def test_two_actions_by_hand(sizes, estimator, mean, second):
  found = moments(problems.small(*sizes), estimator)
  np.testing.assert_allclose(found.mean_K, mean * problems.D_K, rtol=1e-5)
  assert found.second == pytest.approx(second, rel=1e-5)
  assert found.noise == pytest.approx(second - 2 * mean**2, rel=1e-4, abs=1e-9)
  # grad J is 3/16 d, and u_S 3/4 d.
  assert found.support == pytest.approx(1.5 * mean, rel=1e-5)
  assert found.context_weight == pytest.approx(mean * 16 / 3, rel=1e-5)


def test_without_std_one_nth_of_the_gradient_is_lost():
  for problem in problems.several():
    for estimator, size in (
      (estimators.Grpo(std=False), problem.own_samples),
      (estimators.Xgrpo(std=False), problem.samples),
      (PRP, problem.samples),
    ):
      mean_K = moments(problem, estimator).mean_K
      expected_K = (1 - 1 / size) * problem.grad_J_K
      np.testing.assert_allclose(mean_K, expected_K, atol=1e-12)


def test_prp_loses_actions_that_the_peer_never_takes():
  problem = problems.UNSEEN
  # All successes are sampled. What is lost is the push away from a failure
  # that the peer never shows, by the baseline of the other three samples.
  lost_K = problem.grad_J_K * 3 / 4 - moments(problem, PRP).mean_K
  baseline = (2 * problem.p + problem.q) / 4
  expected_K = -problem.pi_K[2] * baseline * problem.score_KK[2] / 2
  np.testing.assert_allclose(lost_K, expected_K, atol=1e-12)
  bound = closed_form.truncation_bias_bound(problem, 10.0)
  assert 0.01 < norm(lost_K) <= bound + 1e-12


def test_grpo_with_std_is_a_sum_over_counts():
  for problem in problems.several():
    G, p = problem.own_samples, problem.p
    weight = sum(
      math.comb(G, k) * p**k * (1 - p) ** (G - k) * math.sqrt(k * (G - k)) / G
      for k in range(G + 1)
    )
    found = moments(problem, GRPO)
    difference_K = problem.u_S_K - problems.failure_direction(problem)
    np.testing.assert_allclose(found.mean_K, weight * difference_K, atol=1e-5)


def test_recomputed_denominators_follow_the_peer():
  recomputed = PeerTerm(denominators='recompute')
  for problem in problems.several():
    found = moments(problem, recomputed)
    # E (r - b) s of a sample that is itself a share 1/N of b.
    N, H = problem.samples, problem.peer_samples
    others = (problem.own_samples * problem.p + (H - 1) * problem.q) / N
    advantage_K = problem.reward_K * (1 - 1 / N) - others
    expected_K = H / N * (problem.mu_K * advantage_K) @ problem.score_KK
    np.testing.assert_allclose(found.mean_K, expected_K, atol=1e-12)


def test_xgrpo_without_std_has_the_second_moment_of_a_constant_baseline():
  # As H grows, b becomes q, and E|g|^2 = E|(r - q) s|^2 / G
  # + (1 - 1/G) |grad J|^2. The excess over b = p is not only
  # (q - p)^2 E|s|^2 / G, but also 2 (p - q) E[(r - p) |s|^2] / G.
  problem = problems.several(1)[0].replace(peer_samples=1000)
  square_K = (problem.score_KK**2).sum(1)
  by_sample = problem.pi_K @ ((problem.reward_K - problem.q) ** 2 * square_K)
  G, grad_K = problem.own_samples, problem.grad_J_K
  expected = by_sample / G + (1 - 1 / G) * grad_K @ grad_K
  found = moments(problem, estimators.Xgrpo(std=False))
  assert found.second == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize('std', [True, False])
def test_xgrpo_keeps_the_direction_and_changes_the_weight(std):
  for problem in problems.several(30):
    weights = []
    for q in (0.01, 0.5, 0.99):
      found = moments(problem.replace(q=q), estimators.Xgrpo(std=std))
      weights.append(found.context_weight)
      parallel_K = weights[-1] * problem.grad_J_K
      np.testing.assert_allclose(found.mean_K, parallel_K, atol=1e-12)
    assert min(weights) > 0
    # Without std the peer does not matter to the mean; nor with it if N <= 3,
    # where all deviations that are not 0 are equal.
    if std and problem.samples > 3:
      assert np.ptp(weights) > 1e-4
    else:
      assert np.ptp(weights) < 1e-12


def test_the_second_moment_of_prp_rises_with_chi2():
  problem = problems.several(1, seed=3)[0]
  far_K = np.roll(problem.pi_K, 1) ** 2
  far_K /= far_K.sum()
  varied = [
    problem.replace(mu_K=(1 - t) * problem.pi_K + t * far_K)
    for t in np.linspace(0, 1, 11)
  ]
  chi2 = [at.chi2 for at in varied]
  second = [moments(at, PeerTerm()).second for at in varied]
  assert chi2[-1] > 1
  assert (np.diff(chi2) > 0).all()
  assert (np.diff(second) > 0).all()


def test_only_the_second_moment_of_plain_prp_is_exponential_in_length():
  rate = 0.25 / 0.8 + 0.25 / 0.2
  short, long = problems.text(2), problems.text(6)
  assert 1 + long.chi2 == pytest.approx(rate**6)
  growth = [
    moments(problems.text(length), PeerTerm()).second for length in (4, 5, 6)
  ]
  for shorter, longer in itertools.pairwise(growth):
    assert longer / shorter == pytest.approx(rate, rel=0.03)
  for name, estimator in methods.METHODS.items():
    ratio = moments(long, estimator).second / moments(short, estimator).second
    assert ratio > 4 if name == 'PRP, plain ratio' else ratio < 2, name


def test_bounds_hold():
  far = problems.text(6)  # A ratio with a large second moment.
  for problem in [*problems.several(30, floor=0.05), far]:
    single = problem.replace(own_samples=1)  # No gradient but the transfer.
    transfer = moments(single, estimators.Sgt(weight=0.5))
    assert 0 < transfer.second <= 2 * 0.5**2 * single.rescue
    for std in (False, True):
      bound = closed_form.prp_second_moment_bound(problem, std=std)
      assert moments(problem, PeerTerm(std=std)).second <= bound
    plain = moments(problem, PRP)
    for C in (0.5, 1, 2):
      cut = moments(problem, estimators.Prp(max_ratio=C))
      bound = closed_form.truncation_bias_bound(problem, C)
      assert norm(cut.mean_K - plain.mean_K) <= bound + 1e-12


def test_the_prp_bound_by_hand():
  # (1/2)^2 5/4 |3/4 d|^2 A^2, with A = 1/2 and 1: 1 + chi2 is 1/8 + 9/8.
  problem = problems.small(1, 1)
  bound = closed_form.prp_second_moment_bound(problem)
  assert bound == pytest.approx(5 / 16 * 9 / 8 / 4)
  bound = closed_form.prp_second_moment_bound(problem, std=True)
  assert bound == pytest.approx(5 / 16 * 9 / 8)


def test_the_truncation_bound_is_reached_if_one_action_is_cut():
  problem = problems.small(3, 2)
  plain = moments(problem, PRP)
  cut = moments(problem, estimators.Prp(max_ratio=1.2))
  bound = closed_form.truncation_bias_bound(problem, 1.2)
  assert norm(plain.mean_K - cut.mean_K) == pytest.approx(bound, rel=1e-9)
  assert closed_form.truncation_bias_bound(problem, 1.5) == 0


def test_the_bound_of_thl_errors_holds_and_is_nearly_reached():
  rng, tightest = np.random.default_rng(1), 0.0
  for problem in problems.several(20):
    exact = moments(problem, PRP)
    for E in (0.01, 1.0):
      bound = closed_form.thl_error_bound(problem, E)
      for error_K in (
        np.full_like(problem.pi_K, E),
        E * (2 * problem.reward_K - 1),  # The worst.
        rng.uniform(-E, E, len(problem.pi_K)),
      ):
        wrong = moments(problem, estimators.Prp(error_K=error_K))
        off = norm(wrong.mean_K - exact.mean_K)
        assert off <= bound + 1e-12
        tightest = max(tightest, off / bound)
  assert tightest > 0.9


def test_the_support_of_sgt_comes_from_the_peers_successes():
  for problem in problems.several():
    at = problem.replace(p=1e-9)
    demonstrated_K = at.given(at.mu_K, 1) @ at.score_KK
    chance = 1 - (1 - at.q) ** at.peer_samples
    found = moments(at, estimators.Sgt(weight=0.3))
    expected = 0.3 * chance * at.u_S_K @ demonstrated_K
    assert found.support == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize('method', [estimators.Graft, estimators.Hacpo])
def test_gates_decide_down_to_which_p_there_is_support(method):
  # s of a success is (p / q)^(1/L): with L tokens, it is let in down to
  # p = q 0.8^L, and not below. A peer that succeeds at 3/4:
  problem = problems.same_failures(
    problems.problem([0.2, 0.3, 0.5], [0.75, 0.125, 0.125], [1, 0, 0], 4, 4)
  )

  def support(p, length):
    return moments(problem.replace(p=p), method(length=length)).support

  assert 1e-3 > 0.75 * 0.8**30 > 1e-6
  assert 1e-9 > 0.75 * 0.8**100
  assert min(support(1e-3, 30), support(1e-3, 100), support(1e-9, 100)) > 0.05
  for p in (1e-6, 1e-9):
    assert abs(support(p, 30)) < 10 * p


def test_truncation_biases_support_where_the_learner_fails():
  # A failure that the peer seldom makes is pushed down too little: that is a
  # bias which does not vanish with p, of either sign.
  problem = problems.problem(
    [0.2, 0.2, 0.6], [0.3, 0.6, 0.1], [1, 0, 0], 4, 4
  ).replace(p=1e-9)
  assert abs(moments(problem, PRP).support) < 1e-8
  assert abs(moments(problem, estimators.Prp(max_ratio=2.0)).support) > 1e-3


def assert_same(one, other):
  np.testing.assert_allclose(one.mean_K, other.mean_K, atol=1e-12)
  np.testing.assert_allclose(one.covariance_KK, other.covariance_KK, atol=1e-12)


def test_an_identical_peer_gives_more_samples_of_the_same():
  for problem in problems.several(10):
    problem = problem.replace(mu_K=problem.pi_K)
    twice = problem.replace(own_samples=problem.samples, peer_samples=0)
    for std in (True, False):
      pooled = moments(twice, estimators.Grpo(std=std))
      for settings in ({}, {'max_ratio': 2.0}, {'denominators': 'recompute'}):
        assert_same(
          moments(problem, estimators.Prp(std=std, **settings)), pooled
        )
    plain = estimators.Hacpo(
      clip=False, alpha=0, ratio=1.0, capability_baseline=False
    )
    assert_same(moments(problem, estimators.Hacpo()), moments(problem, plain))
    grafted = moments(problem, estimators.Graft())
    assert grafted.support >= moments(problem, GRPO).support


def test_without_a_peer_all_methods_are_grpo():
  for problem in problems.several(10):
    problem = problem.replace(peer_samples=0)
    for std in (True, False):
      base = moments(problem, estimators.Grpo(std=std))
      for method in (
        estimators.Xgrpo,
        estimators.Prp,
        estimators.Sgt,
        estimators.Graft,
      ):
        assert_same(moments(problem, method(std=std)), base)
    # HACPO divides by another deviation, so it is GRPO without std only.
    assert_same(moments(problem, estimators.Hacpo(std=False)), base)


def test_without_a_weight_sgt_is_the_mean_of_batches_of_grpo():
  for problem in problems.several(10):
    base = moments(problem, GRPO)
    for normaliser in ('batch', 'rescue'):
      found = moments(
        problem, estimators.Sgt(weight=0.0, batch=3, normaliser=normaliser)
      )
      np.testing.assert_allclose(found.mean_K, base.mean_K, atol=1e-12)
      assert found.noise == pytest.approx(base.noise / 3)


def test_a_single_own_sample_learns_only_from_a_peer():
  problem = problems.several(1)[0].replace(own_samples=1, peer_samples=3)
  assert moments(problem, GRPO).second == 0
  for estimator in (
    estimators.Xgrpo(),
    PRP,
    estimators.Hacpo(),
    estimators.Sgt(),
  ):
    assert moments(problem, estimator).second > 0, estimator
