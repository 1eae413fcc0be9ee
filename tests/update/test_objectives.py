import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from mrl_jax import config as config_lib
from mrl_jax.models import logps
from mrl_jax.update import objectives

# Two rows of three tokens; the last token of the second is padding.
LEARNER = jnp.log(jnp.array([[0.5, 0.4, 0.25], [0.5, 0.9, 1.0]]))
SAMPLED = jnp.log(jnp.array([[0.25, 0.5, 0.5], [1.0, 0.5, 1.0]]))
ROWS = objectives.PackedRows(
  tokens_BS=None,
  row_BS=jnp.array([[1, 1, 1], [1, 1, 0]]),
  old_logp_BS=SAMPLED,
  advantage_BS=jnp.array([[2.0] * 3, [-1.0, -1.0, 0.0]]),
  weight_BS=jnp.array([[0.2, 0.2, 0.2], [0.2, 0.2, 0.0]]),
  mask_BS=jnp.array([[True, True, True], [True, True, False]]),
  chunk_BS=jnp.array([[0, 1, 1], [0, 1, 0]]),
  mini_batch_B1=jnp.array([[2.0], [2.0]]),
  reference_logp_BS=SAMPLED,
)


def settings(**changes):
  method = base.get_config().method
  method.update_from_flattened_dict(
    {'prp.max_ratio': 1.5, 'dual_clip': 3.0, **changes}
  )
  return method


def peer(function, settings):
  """An objective on peers' rows, as `algorithms` makes it of its table."""
  return objectives.Objective(functools.partial(function, settings))


def evaluate(objective, rows=ROWS, entropy_BS=None):
  return objective.function(logps.Scores(LEARNER, entropy_BS), rows)


def check(objective, expected_BS, expected_sums):
  objective_BS, sums = evaluate(objective)
  mask_BS = ROWS.weight_BS > 0
  np.testing.assert_allclose(objective_BS * mask_BS, expected_BS, rtol=1e-6)
  assert sums.keys() == expected_sums.keys()
  for name, value in expected_sums.items():
    np.testing.assert_allclose(sums[name], value, rtol=1e-6, err_msg=name)


def counts(*ratios):
  """How many logs of ratios are between which edges."""
  edges = [-np.inf, *config_lib.LOG_RATIO_EDGES, np.inf]
  return np.histogram(np.log(ratios), edges)[0]


def test_own_rows_have_ratios_by_token():
  # 2, .8, .5 with A = 2 and .5, 1.8 with A = -1, in bounds .8 and 1.28.
  check(
    objectives.own(settings(), 'token'),
    [[2.56, 1.6, 1.0], [-0.8, -1.8, 0.0]],
    {
      'tokens': 5,
      'ratio': 2 + 0.8 + 0.5 + 0.5 + 1.8,
      'ratio_square': 4 + 0.64 + 0.25 + 0.25 + 3.24,
      'log_ratio': np.log(2 * 0.8 * 0.5 * 0.5 * 1.8),
      'log_ratio_counts': counts(2, 0.8, 0.5, 0.5, 1.8),
      'max_ratio': 2.0,
      'clipped': 2,  # 2 from above, and .5 from below where A < 0.
    },
  )


@pytest.mark.parametrize('ratio', ['token', 'sequence'])
def test_first_ratios_to_the_trainer_are_exactly_one(ratio):
  objective = objectives.own(settings(), ratio, by_trainer=True)
  first = dataclasses.replace(ROWS, mini_batch_B1=jnp.zeros((2, 1)))
  objective_BS, sums = evaluate(objective, first)
  np.testing.assert_array_equal(objective_BS, [[2.0] * 3, [-1.0, -1.0, 0.0]])
  assert (sums['ratio'], sums['max_ratio'], sums['clipped']) == (5, 1, 0)
  # The sampler's log-probabilities in the rows tell how the two differ.
  sampler_ratios = 2 + 0.8 + 0.5 + 0.5 + 1.8
  np.testing.assert_allclose(sums['ratio_to_sampler'], sampler_ratios)
  # Those of later mini-batches are the trainer's already.
  later_BS, _ = evaluate(objective)
  expected_BS, _ = evaluate(objectives.own(settings(), ratio))
  np.testing.assert_array_equal(later_BS, expected_BS)


def test_first_ratios_have_the_gradient_of_the_policy():
  objective = objectives.own(settings(), 'token', by_trainer=True)
  first = dataclasses.replace(ROWS, mini_batch_B1=jnp.zeros((2, 1)))
  gradient_BS = jax.grad(
    lambda x: objective.function(logps.Scores(x), first)[0].sum()
  )(LEARNER)
  np.testing.assert_array_equal(gradient_BS, [[2.0] * 3, [-1.0, -1.0, 0.0]])


def test_peer_rows_have_ratios_by_chunk_and_truncated():
  # 2 is cut at 1.5; (.8 * .5) twice; .5; 1.8 is cut at 1.5.
  check(
    peer(objectives.peer_ratio, settings()),
    [[2.56, 0.8, 0.8], [-0.8, -1.5, 0.0]],
    {
      'tokens': 5,
      'ratio': 1.5 + 0.4 + 0.4 + 0.5 + 1.5,
      'ratio_square': 2.25 + 0.16 + 0.16 + 0.25 + 2.25,
      'log_ratio': np.log(1.5 * 0.4 * 0.4 * 0.5 * 1.5),
      'log_ratio_counts': counts(1.5, 0.4, 0.4, 0.5, 1.5),
      'max_ratio': 1.5,
      'clipped': 2,
      'truncated': 2,
    },
  )


def test_the_dual_clip_is_a_setting():
  objective = objectives.own(settings(dual_clip=1.2), 'token')
  objective_BS, _ = evaluate(objective)
  np.testing.assert_allclose(objective_BS[1, 1], -1.2, rtol=1e-6)


def test_supervised_training_maximises_the_log_likelihood():
  objective_BS, _ = evaluate(objectives.LOG_LIKELIHOOD)
  np.testing.assert_array_equal(objective_BS, LEARNER)


# The ratios of whole responses: (2 * .8 * .5)^(1/3) and (.5 * 1.8)^(1/2).
SEQUENCE = (0.8 ** (1 / 3), 0.9**0.5)


def test_own_rows_may_have_ratios_of_whole_responses():
  first, second = SEQUENCE
  check(
    objectives.own(settings(clip_low=0.2), 'sequence'),
    [[2 * first] * 3, [-second, -second, 0.0]],
    {
      'tokens': 5,
      'ratio': 3 * first + 2 * second,
      'ratio_square': 3 * first**2 + 2 * second**2,
      'log_ratio': np.log(0.8 * 0.9),
      'log_ratio_counts': counts(*[first] * 3, *[second] * 2),
      'max_ratio': second,
      'clipped': 0,
      # Of tokens, which tell how sampler and trainer differ.
      'ratio_of_tokens': 2 + 0.8 + 0.5 + 0.5 + 1.8,
      'ratio_square_of_tokens': 4 + 0.64 + 0.25 + 0.25 + 3.24,
      'log_ratio_of_tokens': np.log(2 * 0.8 * 0.5 * 0.5 * 1.8),
      'max_ratio_of_tokens': 2.0,
    },
  )


def test_a_token_without_weight_is_still_in_its_responses_ratio():
  rows = dataclasses.replace(ROWS, weight_BS=0 * ROWS.weight_BS)
  for objective in (
    objectives.own(settings(), 'sequence'),
    peer(objectives.stepwise, settings()),
  ):
    np.testing.assert_array_equal(
      evaluate(objective, rows)[0], evaluate(objective)[0]
    )


def test_hacpos_ratios_are_bounded():
  far = dataclasses.replace(ROWS, old_logp_BS=ROWS.old_logp_BS - 100)
  off = settings(**{'hacpo.clip': False, 'hacpo.alpha': 0.0})
  objective_BS, _ = evaluate(peer(objectives.stepwise, off), far)
  np.testing.assert_allclose(objective_BS[0], 2 * np.exp(10), rtol=1e-5)


def test_the_penalty_keeps_own_rows_near_the_reference():
  # k1 is the log-ratio of each token.
  objective = objectives.own(settings(kl_weight=0.5, kl_form='k1'), 'token')
  plain_BS, _ = evaluate(objectives.own(settings(), 'token'))
  objective_BS, sums = evaluate(objective)
  np.testing.assert_allclose(
    plain_BS - objective_BS, 0.5 * (LEARNER - SAMPLED), rtol=1e-5, atol=1e-7
  )
  np.testing.assert_allclose(sums['kl'], np.log(0.8 * 0.9), rtol=1e-5)


def test_entropy_is_a_bonus_of_own_rows_where_it_has_a_weight():
  entropy_BS = jnp.arange(6.0).reshape(2, 3)
  for ratio in ('token', 'sequence'):
    plain = objectives.own(settings(), ratio)
    bonus = objectives.own(settings(entropy_weight=0.25), ratio)
    assert (plain.reads_entropy, bonus.reads_entropy) == (False, True)
    np.testing.assert_allclose(
      evaluate(bonus, entropy_BS=entropy_BS)[0],
      evaluate(plain)[0] + 0.25 * entropy_BS,
      rtol=1e-6,
    )


def test_stepwise_rows_have_bounds_that_rise_with_the_mini_batch():
  # In the third mini-batch the bounds are .8 + 2 * .05 = .9 and 1; the ratios
  # are .928 and .949, and alpha = 1 squares them.
  first, second = SEQUENCE
  hacpo = {'hacpo.delta': 0.2, 'hacpo.delta_step': 0.05, 'hacpo.alpha': 1.0}
  objective_BS, sums = evaluate(peer(objectives.stepwise, settings(**hacpo)))
  np.testing.assert_allclose(objective_BS[0], 2 * first**2, rtol=1e-6)
  np.testing.assert_allclose(objective_BS[1, :2], -(second**2), rtol=1e-6)
  assert sums['clipped'] == 0
  hacpo['hacpo.delta_step'] = 0.07  # Now .94.
  objective_BS, sums = evaluate(peer(objectives.stepwise, settings(**hacpo)))
  np.testing.assert_allclose(objective_BS[0], 2 * 0.94**2, rtol=1e-6)
  assert sums['clipped'] == 3


def test_without_its_mechanisms_hacpo_on_peers_is_an_unclipped_gspo():
  off = settings(**{'hacpo.clip': False, 'hacpo.alpha': 0.0})
  wide = settings(clip_low=1.0, clip_high=1e9, dual_clip=0.0)
  found, expected = (
    evaluate(peer(objectives.stepwise, off)),
    evaluate(objectives.own(wide, 'sequence')),
  )
  np.testing.assert_array_equal(found[0], expected[0])
  for name, value in found[1].items():
    np.testing.assert_array_equal(value, expected[1][name])


def test_grafted_rows_are_as_own_ones_by_token():
  for x, y in zip(
    evaluate(peer(objectives.grafted, settings())),
    evaluate(objectives.own(settings(), 'token')),
    strict=True,
  ):
    jax.tree.map(np.testing.assert_array_equal, x, y)


def test_ratios_that_are_far_off_are_in_the_outermost_bins():
  far = jnp.array([[100.0, -100.0, 0.0], [0.0, 0.0, 0.0]])
  rows = dataclasses.replace(ROWS, old_logp_BS=LEARNER - far)
  _, sums = evaluate(objectives.own(settings(), 'token'), rows)
  expected = np.zeros(41)
  expected[[0, 20, 40]] = 1, 3, 1
  np.testing.assert_array_equal(sums['log_ratio_counts'], expected)


def test_luffy_and_sgt_read_the_learners_probabilities_only():
  shaped = peer(objectives.shaped, settings())
  check(
    shaped,
    [[2 * 5 / 6, 2 * 4 / 5, 2 * 0.25 / 0.35], [-5 / 6, -0.9, 0.0]],
    {'tokens': 5},
  )
  logp_BS, sums = evaluate(peer(objectives.log_likelihood, settings()))
  np.testing.assert_array_equal(logp_BS, LEARNER)
  np.testing.assert_allclose(sums['logp'], np.log(0.05 * 0.45), rtol=1e-6)
