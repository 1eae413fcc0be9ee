"""Samples agree with the closed forms, and learning follows both."""

import dataclasses

import numpy as np
import pytest

from mrl_jax import checks
from mrl_jax.bandit import methods
from mrl_jax.bandit import problem as problem_lib
from mrl_jax.bandit import simulate
from tests.bandit import problems

# The table, and the settings that it leaves at their defaults.
VARIANTS = {
  **methods.METHODS,
  'PRP, recomputed, std': methods.method(
    'prp', std=True, denominators='recompute'
  ),
  'PRP, cut and clipped': methods.method('prp', max_ratio=1.5, clip=(0.1, 0.1)),
  'PRP, with THL error': methods.method('prp', error_K=0.3),
  'SGT, strong': methods.method('sgt', weight=1.0, std=False),
  'SGT, by batch': methods.method('sgt', weight=1.0, batch=4),
  'SGT, strong, by rescued': methods.method(
    'sgt', weight=1.0, batch=4, normaliser='rescue', std=False
  ),
  'HACPO, able': methods.method('hacpo', ratio=2.5, std=False, low=0.5),
  'HACPO, bare': methods.method(
    'hacpo',
    ratio=0.4,
    clip=False,
    alpha=0.0,
    capability_baseline=False,
    capability_weight=False,
  ),
  'HACPO, 2 tokens': methods.method('hacpo', length=2.0, alpha=3.0, ratio=0.4),
  'GRAFT, admitted': methods.method('graft', normaliser='admitted', floor=0.5),
  'GRAFT, all': methods.method('graft', gate=False, std=False),
  'GRAFT, successes': methods.method('graft', success_only=True, length=5.0),
  'GRAFT, unweighted': methods.method('graft', weighted=False, length=2.0),
}


def deviations(drawn, method):
  """By how many standard errors each quantity of a sample is off."""
  problem = drawn.problem
  exact = method.closed_form(problem)
  found = simulate.of_draw(drawn, method.simulator)
  assert found.updates == len(drawn.own_MK) // method.batch
  directions = {
    'u_S': problem.u_S_K,
    'peer': problem.mu_S_K - problem.mu_F_K,
    'first': np.eye(len(problem.pi_K))[0],
  }
  off = {}
  for name, direction_K in directions.items():
    variance = direction_K @ exact.covariance_KK @ direction_K / found.updates
    off[name] = (
      direction_K @ (found.mean_K - exact.mean_K),
      np.sqrt(max(variance, 0)),
    )
  chance = exact.no_signal
  # An error of samples knows nothing of what happens once in all of them.
  off['second'] = (
    found.second - exact.second,
    found.second_error + 1 / found.updates,
  )
  off['no signal'] = (
    found.no_signal - chance,
    np.sqrt(chance * (1 - chance) / found.updates) + 1 / found.updates,
  )
  return {
    name: (difference / error if error > 1e-9 else difference * 1e9)
    for name, (difference, error) in off.items()
  }


def test_closed_forms_agree_with_samples_of_200_problems():
  # No quantity is off by 4 standard errors in a draw, or in the mean of all. A
  # correct one is, once in 16,000 draws; with this seed, none is.
  rng, draws = np.random.default_rng(0), 200
  off = {name: [] for name in VARIANTS}
  for _ in range(draws):
    problem = problem_lib.random(rng)
    drawn = simulate.draw(problem, 4000, rng)
    for name, method in VARIANTS.items():
      off[name].append([*deviations(drawn, method).values()])
  for name in VARIANTS:
    off_DQ = np.array(off[name])
    assert abs(off_DQ).max() < 4, name
    common_Q = off_DQ.mean(0) * np.sqrt(draws)
    assert abs(common_Q).max() < 4, name
    # Errors that are too large would hide what is off.
    assert (off_DQ[:, 0] ** 2).mean() > 0.5 or name.startswith('GRPO'), name


def test_the_covariance_is_that_of_samples():
  rng = np.random.default_rng(0)
  problem = problem_lib.random(rng)
  drawn = simulate.draw(problem, 40_000, rng)
  for name, method in VARIANTS.items():
    exact = method.closed_form(problem)
    found = simulate.of_draw(drawn, method.simulator)
    scale = exact.noise * np.sqrt(method.batch) + 1e-12
    off_KK = found.covariance_KK - exact.covariance_KK
    assert abs(off_KK).max() < 0.03 * scale, name


def test_thl_errors_that_differ_by_action():
  rng = np.random.default_rng(0)
  for _ in range(10):
    problem = problem_lib.random(rng)
    error_K = rng.uniform(-0.5, 0.5, len(problem.pi_K))
    method = methods.method('prp', error_K=error_K)
    drawn = simulate.draw(problem, 10_000, rng)
    assert max(map(abs, deviations(drawn, method).values())) < 4


def test_samples_have_the_sizes_and_the_rates_that_are_asked():
  rng = np.random.default_rng(0)
  problem = problem_lib.random(rng)
  pi_MK = np.repeat(rng.dirichlet(np.ones(len(problem.pi_K)), 2), 20_000, 0)
  drawn = simulate.draw(problem, 40_000, rng, pi_MK)
  assert (drawn.own_MK.sum(1) == problem.group).all()
  assert (drawn.peer_MK.sum(1) == problem.peers).all()
  for half in (slice(0, 20_000), slice(20_000, None)):
    mean_K = drawn.own_MK[half].mean(0) / problem.group
    np.testing.assert_allclose(mean_K, pi_MK[half][0], atol=0.02)
  mean_K = drawn.peer_MK.mean(0) / problem.peers
  np.testing.assert_allclose(mean_K, problem.mu_K, atol=0.02)


def test_chunks_are_the_same_samples_together():
  problem = problems.EVEN
  method = methods.METHODS['SGT, by rescued']
  drawn = simulate.draw(problem, 400, np.random.default_rng(0))
  whole = simulate.of_draw(drawn, method.simulator)
  once, parts = (
    simulate.estimate(
      problem, method.simulator, 400, np.random.default_rng(0), chunk=chunk
    )
    for chunk in (400, 100)
  )
  np.testing.assert_array_equal(once.mean_K, whole.mean_K)
  assert parts.updates == whole.updates == 100
  # The standard error of the mean is that of one sample in repeated samples.
  several = [
    simulate.estimate(
      problem, method.simulator, 400, np.random.default_rng(seed), chunk=100
    )
    for seed in range(200)
  ]
  means = [found.mean_K[0] for found in several]
  error = np.mean([found.error(np.eye(4)[0]) for found in several])
  assert np.std(means) == pytest.approx(error, rel=0.2)
  spread = np.std([found.second for found in several])
  error = np.mean([found.second_error for found in several])
  assert spread == pytest.approx(error, rel=0.2)


def test_one_success_is_drawn_as_often_as_it_was_sampled():
  problem = problems.problem([0.1, 0.1, 0.8], [0.3, 0.3, 0.4], [1, 1, 0], 1, 4)
  groups = 10_000
  drawn = simulate.Draw(
    problem,
    problem.pi_K[None],
    np.tile([0, 0, 1], (groups, 1)),
    np.tile([1, 3, 0], (groups, 1)),
    np.random.default_rng(0).random((groups, 1)),
  )
  x_MK = simulate.sgt(drawn, weight=1.0)
  assert (x_MK.sum(1) == 1).all()
  np.testing.assert_allclose(x_MK.mean(0), [0.25, 0.75, 0], atol=0.02)


@pytest.mark.parametrize('name', methods.METHODS)
def test_a_small_step_follows_the_closed_form(name):
  method, rate, seeds = methods.METHODS[name], 1e-3, 4000
  curves = simulate.learn(
    problems.EVEN,
    method,
    np.random.default_rng(0),
    steps=1,
    rate=rate,
    seeds=seeds,
  )
  exact = method.closed_form(problems.EVEN)
  rise = problems.EVEN.p * exact.support
  expected = np.diff(curves.expected_T)[0] / rate
  assert expected == pytest.approx(rise, abs=2e-3)
  assert curves.sampled_ST.shape == (seeds, 2)
  assert curves.spread_T[0] < 1e-12
  sampled = np.diff(curves.mean_T)[0] / rate
  error = curves.spread_T[1] / rate / np.sqrt(seeds)
  grad_K = problems.EVEN.grad_J_K
  variance = grad_K @ exact.covariance_KK @ grad_K
  assert error == pytest.approx(np.sqrt(variance / seeds), rel=0.1)
  assert abs(sampled - rise) < 4 * error + 2e-3


def test_every_learner_samples_and_learns_by_itself():
  seen = []

  def simulator(drawn):
    seen.append(drawn)
    return np.arange(3.0)[:, None] * [1.0, 0, 0, 0]

  method = methods.Method(
    closed_form=methods.METHODS['GRPO'].closed_form,
    simulator=simulator,
    batch=2,
  )
  curves = simulate.learn(
    problems.EVEN, method, np.random.default_rng(0), steps=2, rate=0.5, seeds=3
  )
  first, second = seen
  np.testing.assert_allclose(first.pi_MK, np.tile(problems.EVEN.pi_K, (6, 1)))
  theta_SK = np.log(problems.EVEN.pi_K) + 0.5 * np.outer(
    range(3), problems.EVEN.score_KK[0]
  )
  pi_SK = np.exp(theta_SK) / np.exp(theta_SK).sum(1, keepdims=True)
  np.testing.assert_allclose(second.pi_MK, np.repeat(pi_SK, 2, 0))
  np.testing.assert_allclose(
    curves.sampled_ST[:, 1], pi_SK @ problems.EVEN.reward_K
  )
  np.testing.assert_allclose(curves.mean_T[1], curves.sampled_ST[:, 1].mean())
  np.testing.assert_allclose(curves.spread_T[1], curves.sampled_ST[:, 1].std())


def test_expected_ascent_is_that_of_the_closed_form_at_every_step():
  method = methods.METHODS['SGT']
  curves = simulate.learn(
    problems.HARD, method, np.random.default_rng(0), steps=20, rate=1.0, seeds=1
  )
  problem = problems.HARD
  for p in curves.expected_T:
    assert problem.p == pytest.approx(p)
    theta_K = np.log(problem.pi_K) + method.closed_form(problem).mean_K
    pi_K = np.exp(theta_K) / np.exp(theta_K).sum()
    problem = dataclasses.replace(problem, pi_K=pi_K)


def test_only_what_a_peer_demonstrates_rescues_a_learner_that_fails():
  found = {
    name: simulate.learn(
      problems.HARD,
      methods.method(name, **settings),
      np.random.default_rng(0),
      steps=60,
      rate=0.5,
      seeds=200,
    )
    for name, settings in {
      'grpo': {},
      'xgrpo': {},
      'prp': {},
      'sgt': {'weight': 1.0},
    }.items()
  }
  sgt = found.pop('sgt')
  for name in found:
    assert found[name].expected_T[-1] < 0.05, name
    assert np.median(found[name].sampled_ST[:, -1]) < 0.05, name
  assert sgt.expected_T[-1] > 0.9
  assert sgt.sampled_ST[:, -1].min() > 0.5


def test_learning_is_reproducible_and_ends_at_success():
  def learn(seed, name):
    return simulate.learn(
      problems.EVEN,
      methods.METHODS[name],
      np.random.default_rng(seed),
      steps=100,
      rate=0.5,
      seeds=20,
    )

  for name in ('GRPO', 'SGT, by rescued'):
    one, same, other = learn(0, name), learn(0, name), learn(1, name)
    np.testing.assert_array_equal(one.sampled_ST, same.sampled_ST)
    assert (one.sampled_ST != other.sampled_ST).any()
    assert one.expected_T[-1] > 0.9
    assert one.mean_T[-1] > 0.85


def test_a_batch_that_does_not_divide_is_refused():
  with pytest.raises(checks.InputError, match='multiple'):
    simulate.estimate(
      problems.EVEN,
      methods.METHODS['SGT, by rescued'].simulator,
      10,
      np.random.default_rng(0),
    )
