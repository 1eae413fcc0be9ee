import dataclasses

import numpy as np
import pytest

from mrl_jax.sharing import lesson as lesson_lib
from mrl_jax.thl import transfer
from mrl_jax.training import statistics
from tests import examples

GROUPS = [
  examples.group([1.0, 0.0]),
  examples.group([0.0, 0.0], prompt='p1', finish='length'),
]


def lesson(peer=()):
  own = [
    lesson_lib.own_row(p, rollout, rollout.reward)
    for p, group in enumerate(GROUPS)
    for rollout in group
  ]
  residual = transfer.Residual(
    rollouts=3,
    refused={'empty': 1, 'too_long': 1},
    sender_tokens=7,
    receiver_tokens=8,
    chunks={'1:1': 5, '1:n': 1},
  )
  return lesson_lib.Lesson(
    own=own,
    peer=peer,
    order=(0, 1),
    residuals={'b': residual},
    metrics={'rescue_rate': 0.5},
    peer_records=5,
    peer_records_unused=1,
  )


def update(part, **sums):
  sums = {
    'tokens': 4.0, 'ratio': 8.0, 'ratio_square': 20.0, 'clipped': 1.0,
    'log_ratio': -2.0, 'max_ratio': 3.0, 'loss': -0.5,
    'log_ratio_counts': counts(0, 20, 20, 40), **sums,
  }  # fmt: skip
  return {f'{part}/{name}': np.float32(v) for name, v in sums.items()}


def counts(*bins):
  """Tokens in these bins of their log-ratio."""
  return np.bincount(bins, minlength=41).astype(np.float32)


def of_round(updates, **given):
  fields = {
    'rollouts': 4,
    'exchanged': {},
    'exchange_seconds': {},
    'verified': {},
    'seconds': 1.0,
    **given,
  }
  taken = fields.pop('lesson', lesson())
  return statistics.of_round(GROUPS, taken, updates, **fields)


def test_means_over_the_round():
  updates = [{'grad_norm': 1.0}, {'grad_norm': 2.0}]
  row = of_round(updates, seconds=2.0)
  assert row['reward'] == 0.25
  assert row['accuracy'] == 0.25
  assert row['response_length'] == (5 + 5 + 4 + 4) / 4
  assert row['stopped'] == 0.5
  assert row['all_fail_groups'] == 0.5
  assert row['zero_signal_groups'] == 0.5
  assert row['rollouts'] == 4
  # The log-probabilities of n tokens are -1/8 ... -n/8.
  assert row['entropy'] == pytest.approx((15 + 15 + 10 + 10) / 18 / 8)
  assert row['rescue_rate'] == 0.5
  assert row['rows_with_signal'] == 0.25
  assert row['grad_norm'] == 1.5
  assert (row['peer_records'], row['peer_rows']) == (5, 0)
  assert row['peer_rows_refused'] == 2
  assert row['peer_records_unused'] == 1
  assert row['timing'] == {'seconds': 2.0, 'tokens_per_second': 9.0}
  assert 'own' not in row
  assert 'exchange' not in row


def test_what_the_exchange_did_is_part_of_the_round():
  exchanged = {'b': {'rollout': {'published': 3, 'used': 3}}}
  row = of_round(
    [{'grad_norm': 1.0}],
    exchanged=exchanged,
    exchange_seconds={'exchange': 0.5, 'waited/b': 0.25},
  )
  assert row['exchange'] == exchanged
  assert row['timing']['exchange'] == 0.5
  assert row['timing']['waited/b'] == 0.25


def test_what_thl_could_not_carry_is_part_of_the_round():
  row = of_round([{'grad_norm': 1.0}])
  residual = row['residuals']['b']
  assert residual['refused'] == {'empty': 1, 'too_long': 1}
  assert residual['segmentation_error'] == 1 - 6 / 8
  nothing = dataclasses.replace(lesson(), residuals={})
  assert 'residuals' not in of_round([{'grad_norm': 1.0}], lesson=nothing)


def test_what_the_verifier_counts_is_there_if_it_counts():
  updates = [{'grad_norm': 1.0}]
  assert 'verified' not in of_round(updates)
  assert of_round(updates, verified={'wrong': 3})['verified'] == {'wrong': 3}


def test_ratios_are_means_over_the_tokens_of_all_updates():
  updates = [
    {**update('own'), 'grad_norm': 1.0},
    {
      **update('own', tokens=12.0, ratio=8.0),
      **update('peer'),
      'grad_norm': 1.0,
    },
  ]
  row = of_round(updates)
  assert row['own']['ratio'] == 1.0
  assert row['own']['ratio_second_moment'] == 40 / 16
  assert row['own']['clip_fraction'] == 2 / 16
  assert row['own']['loss'] == -0.5
  assert row['own']['max_ratio'] == 3.0
  assert row['peer']['ess_fraction'] == pytest.approx(8**2 / (20 * 4))
  histogram = row['own']['log_ratio_counts']
  assert (histogram[0], histogram[20], histogram[40]) == (2, 4, 2)
  assert sum(histogram) == 8
  assert sum(row['peer']['log_ratio_counts']) == 4


def test_ratios_that_all_vanished_are_not_a_division_by_zero():
  updates = [{**update('peer', ratio=0.0, ratio_square=0.0), 'grad_norm': 1.0}]
  row = of_round(updates)
  assert row['peer']['ess_fraction'] == 0.0


def test_the_first_update_tells_how_sampler_and_trainer_differ():
  updates = [
    {**update('own'), 'grad_norm': 1.0},
    {**update('own', log_ratio=9.0, max_ratio=9.0), 'grad_norm': 1.0},
  ]
  assert of_round(updates)['mismatch'] == {
    'kl': 0.5,
    'max_ratio': 3.0,
    'ess_fraction': pytest.approx(8**2 / (20 * 4)),
  }
  assert 'mismatch' not in of_round([{'grad_norm': 1.0}])


def test_where_ratios_are_of_responses_the_mismatch_is_of_tokens():
  tokens = {'log_ratio_of_tokens': -4.0, 'max_ratio_of_tokens': 5.0,
            'ratio_of_tokens': 4.0, 'ratio_square_of_tokens': 5.0}  # fmt: skip
  row = of_round([{**update('own', **tokens), 'grad_norm': 1.0}])
  assert row['mismatch'] == {
    'kl': 1.0,
    'max_ratio': 5.0,
    'ess_fraction': pytest.approx(16 / 20),
  }


def test_a_round_without_own_rows_has_numbers_all_the_same():
  empty = dataclasses.replace(lesson(), own=[])
  row = of_round([{'grad_norm': 0.0}], lesson=empty)
  assert row['rows_with_signal'] == 0.0


def test_parts_without_ratios_say_what_they_have():
  sums = {'peer/tokens': 4.0, 'peer/logp': -2.0, 'peer/loss': 0.1}
  row = of_round([{**sums, 'grad_norm': 1.0}])
  assert row['peer'] == {'loss': 0.1, 'logp': -0.5}
