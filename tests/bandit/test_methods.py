"""The table: its limits, and that a run of the product has its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax import checks
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
from tests.bandit import problems


def test_the_settings_are_those_of_a_run():
  config = examples.run_config().method
  assert (config.clip_low, config.clip_high) == methods.CLIP
  assert config.prp.max_ratio == methods.MAX_RATIO
  given = {
    'sgt': {'weight': config.sgt.weight, 'normaliser': config.sgt.normaliser},
    'hacpo': {'low': 1 - config.hacpo.delta, 'alpha': config.hacpo.alpha},
    'graft': {
      'floor': config.graft.floor,
      'weighted': config.graft.weighted,
      'success_only': config.graft.success_only,
    },
  }
  for name, settings in given.items():
    exact = methods.method(name, **settings).closed_form
    for problem in problems.several(5):
      by_default = methods.METHODS[name.upper()].closed_form(problem)
      np.testing.assert_array_equal(exact(problem).mean_K, by_default.mean_K)


def test_an_unknown_method_is_refused_with_those_that_are_known():
  with pytest.raises(checks.InputError, match='Did you mean'):
    methods.method('xgrp')


def test_what_is_compared_has_the_settings_that_are_asked():
  problem = problems.EVEN.with_rates(p=0.01)
  given = {'length': 40.0, 'transfer': 0.3, 'capability': 0.5}
  for std in (True, False):
    compared = methods.compared(std=std, **given)
    expected = {
      'GRPO': closed_form.grpo(problem, std=std),
      'XGRPO': closed_form.xgrpo(problem, std=std),
      'PRP, plain ratio': closed_form.prp(problem, std=std),
      'PRP, truncated': closed_form.prp(problem, std=std, max_ratio=2.0),
      'PRP, recomputed': closed_form.prp(
        problem, std=std, denominators='recompute'
      ),
      'SGT': closed_form.sgt(problem, std=std, weight=0.3),
      'HACPO': closed_form.hacpo(problem, std=std, length=40.0, ratio=0.5),
      'GRAFT': closed_form.graft(problem, std=std, length=40.0),
    }
    assert [*compared] == [*expected]
    for name, method in compared.items():
      found_K = method.closed_form(problem).mean_K
      np.testing.assert_array_equal(found_K, expected[name].mean_K)


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
  for problem in problems.several(20):
    rates = [
      methods.METHODS[name].closed_form(problem.with_rates(p=p)).support / p
      for p in (1e-3, 1e-5, 1e-7)
    ]
    assert rates[2] == pytest.approx(rates[1], rel=1e-2, abs=1e-7)
    assert abs(rates[2]) < 20


@pytest.mark.parametrize('name', ['SGT', 'PRP, recomputed'])
def test_support_stays_without_a_ratio(name):
  for problem in problems.several(20):
    problem = problems.same_failures(problem)
    rates = [
      methods.METHODS[name].closed_form(problem.with_rates(p=p)).support
      for p in (1e-4, 1e-7)
    ]
    assert rates[1] == pytest.approx(rates[0], rel=1e-2)
    assert rates[1] > 1e-3


@pytest.mark.parametrize('name', methods.METHODS)
@pytest.mark.parametrize('p', [0.0, 1e-9, 1 - 1e-9, 1.0])
def test_limits_are_finite_and_reached(name, p):
  method = methods.METHODS[name].closed_form
  for problem in problems.several(5):
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
  for problem in problems.several(5):
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


def sample_of(seed):
  """Of sizes that are the same for all seeds: jax compiles once for each."""
  rng = np.random.default_rng(seed)
  policies = rng.dirichlet(np.ones(5), 2)
  return Sample(problems.problem(*policies, [1, 0, 1, 0, 0], 3, 5), rng)


def product_gradient(problem, objective, length=1):
  """Of an objective of log-probabilities [B, T], summed over rows."""

  def value(theta_K):
    logp_K = jax.nn.log_softmax(theta_K)

    def tokens(actions_B):
      return jnp.tile(logp_K[actions_B][:, None] / length, (1, length))

    return objective(tokens)

  return np.array(jax.jit(jax.grad(value))(jnp.log(problem.pi_K)))


def assert_the_product_gives(sample, simulator, objective, length=1):
  drawn = sample.draw()
  found_1K = simulate.gradient(simulator(drawn), drawn.pi_MK)
  expected_K = product_gradient(sample.problem, objective, length)
  np.testing.assert_allclose(found_1K[0], expected_K, rtol=2e-4, atol=1e-5)


def column(values):
  return jnp.asarray(values, jnp.float32)[:, None]


@pytest.mark.parametrize('seed', range(3))
def test_the_product_has_these_gradients(seed):
  sample = sample_of(seed)
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
  sample = sample_of(seed)
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
