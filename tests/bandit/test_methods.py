"""The table of methods: settings, limits, and what vanishes as p -> 0."""

import numpy as np
import pytest

from mrl_jax.bandit import closed_form
from mrl_jax.bandit import estimators
from mrl_jax.bandit import methods
from tests import examples
from tests.bandit import problems

each = pytest.mark.parametrize('name', methods.METHODS)


def support(name, problem):
  return closed_form.moments(problem, methods.METHODS[name]).support


def test_the_settings_are_those_of_a_run():
  config = examples.run_config().method
  assert (config.clip_low, config.clip_high) == methods.CLIP
  assert config.prp.max_ratio == methods.MAX_RATIO
  assert methods.METHODS['SGT'] == estimators.Sgt(
    weight=config.sgt.weight, normaliser=config.sgt.normaliser
  )
  low, alpha = 1 - config.hacpo.delta, config.hacpo.alpha
  assert methods.METHODS['HACPO'] == estimators.Hacpo(low=low, alpha=alpha)
  graft = {
    name: config.graft[name] for name in ('floor', 'weighted', 'success_only')
  }
  assert methods.METHODS['GRAFT'] == estimators.Graft(**graft)


@pytest.mark.parametrize('std', [True, False])
def test_compared_methods_have_the_given_settings(std):
  found = methods.compared(std=std, length=40.0, transfer=0.3, capability=0.5)
  assert [*found.items()] == [
    ('GRPO', estimators.Grpo(std=std)),
    ('XGRPO', estimators.Xgrpo(std=std)),
    ('PRP, plain ratio', estimators.Prp(std=std)),
    ('PRP, truncated', estimators.Prp(std=std, max_ratio=2.0)),
    ('PRP, recomputed', estimators.Prp(std=std, denominators='recompute')),
    ('SGT', estimators.Sgt(std=std, weight=0.3)),
    ('HACPO', estimators.Hacpo(std=std, length=40.0, ratio=0.5)),
    ('GRAFT', estimators.Graft(std=std, length=40.0)),
  ]


@pytest.mark.parametrize(
  'name',
  [
    'GRPO',
    'GRPO without std',
    'XGRPO',
    'XGRPO without std',
    'PRP, plain ratio',
  ],
)
def test_support_vanishes_in_proportion_to_p(name):
  for problem in problems.several(10):
    rates = [support(name, problem.replace(p=p)) / p for p in (1e-5, 1e-7)]
    assert rates[1] == pytest.approx(rates[0], rel=1e-2, abs=1e-7)
    assert abs(rates[1]) < 20


@pytest.mark.parametrize('name', ['SGT', 'PRP, recomputed'])
def test_support_stays_without_a_ratio(name):
  for problem in map(problems.same_failures, problems.several(10)):
    at_small, at_smaller = (
      support(name, problem.replace(p=p)) for p in (1e-4, 1e-7)
    )
    assert at_smaller == pytest.approx(at_small, rel=1e-2)
    assert at_smaller > 1e-3


@each
def test_moments_are_finite_and_continuous_at_extreme_rates(name):
  for problem in problems.several(3):
    for p in (0.0, 1e-9, 1.0):
      for q in (None, 0.0, 1.0):
        found, near = (
          closed_form.moments(problem.replace(p=at, q=q), methods.METHODS[name])
          for at in (p, abs(p - 1e-7))
        )
        assert np.isfinite(found.mean_K).all()
        assert np.isfinite(found.covariance_KK).all()
        if 'tokens' not in name:  # A gate may be passed between the two.
          np.testing.assert_allclose(found.mean_K, near.mean_K, atol=1e-4)
          assert found.second == pytest.approx(near.second, abs=1e-4)


@each
def test_where_both_always_succeed_there_is_no_gradient(name):
  for problem in problems.several(3):
    found = closed_form.moments(
      problem.replace(p=1.0, q=1.0), methods.METHODS[name]
    )
    assert found.second < 1e-12
