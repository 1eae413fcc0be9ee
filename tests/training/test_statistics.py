import numpy as np
import pytest

from mrl_jax import workdir
from mrl_jax.sharing import rows as rows_lib
from mrl_jax.thl import transfer
from mrl_jax.training import statistics
from tests import examples

GROUPS = [
  [
    examples.rollout(),
    examples.rollout(b'= 12\n', 0.0, sample=1, finish='stop_string'),
  ],
  examples.group([0.0, 0.0], prompt='p1', finish='length'),
]
OWN = [
  rows_lib.own_row(p, rollout, rollout.reward)
  for p, group in enumerate(GROUPS)
  for rollout in group
]
IDLE = {'grad_norm': 1.0}  # An update without rows.


def update(part, **sums):
  sums = {
    'tokens': 4.0, 'ratio': 8.0, 'ratio_square': 20.0, 'clipped': 1.0,
    'log_ratio': -2.0, 'max_ratio': 3.0, 'loss': -0.5,
    'log_ratio_counts': counts(0, 20, 20, 40), **sums,
  }  # fmt: skip
  sums = {f'{part}/{name}': np.float32(v) for name, v in sums.items()}
  return {**sums, **IDLE}


def counts(*bins):
  """A histogram of tokens whose log ratios are in these bins."""
  return np.bincount(bins, minlength=41).astype(np.float32)


def row(*updates, context=None, own=OWN) -> workdir.RoundMetrics:
  context = context or examples.context(groups=GROUPS)
  batch = rows_lib.Batch(own=own, order=(0, 1))
  return statistics.round_metrics('a', 3, GROUPS, context, batch, updates)


def test_means_over_the_round():
  found = row({'grad_norm': 1.0}, {'grad_norm': 2.0})
  assert (found.round, found.policy) == (3, 'a')
  assert found.reward == 0.25
  assert found.accuracy == 0.25
  assert found.response_length == (5 + 5 + 4 + 4) / 4
  assert found.stopped == 0.5
  assert found.all_fail_groups == 0.5
  assert found.zero_signal_groups == 0.5
  assert found.rollouts == 4
  # The log-probabilities of n tokens are -1/8 ... -n/8.
  assert found.entropy == pytest.approx((15 + 15 + 10 + 10) / 18 / 8)
  assert found.rows_with_signal == 0.25
  assert found.grad_norm == 1.5
  assert found.own == found.peer == found.mismatch == workdir.Ratios()


def test_refills_count_as_rollouts_only():
  refilled = [*GROUPS, examples.group([1.0, 1.0], prompt='p2')]
  found = row(IDLE, context=examples.context(groups=refilled))
  assert (found.rollouts, found.reward) == (6, 0.25)


def test_peers_records_and_what_befell_them():
  stats = [
    examples.stats([1.0, 0.0], policy='b', prompt=prompt)
    for prompt in ('p0', 'p1', 'elsewhere')
  ]
  context = examples.context(groups=GROUPS, received=stats)
  residual = context.log.residuals['b']
  residual.add(
    transfer.Residual(
      rollouts=3,
      refused={'empty': 1, 'too_long': 1},
      sender_tokens=7,
      receiver_tokens=8,
      chunks={'1:1': 5, '1:n': 1},
    )
  )
  context.log.refused.update(verdict=2, reward=0)
  context.log.metrics['compatibility'] = 0.5
  context.log.judged = 4
  found = row(IDLE, context=context)
  assert (found.peer_records, found.peer_records_unused) == (2, 1)
  assert (found.peer_rows, found.peer_rows_refused) == (0, 2)
  assert found.residuals == {'b': residual}
  assert found.refused == {'verdict': 2}
  assert found.peer_responses_judged == 4
  assert found.method == {'compatibility': 0.5}
  # Only the group of the second prompt failed as a whole, and b solved it.
  assert found.rescue_rate == 1.0
  assert found.rescued_by == {'b': 1.0}


def test_ratios_are_means_over_the_tokens_of_all_updates():
  found = row(
    update('own'), {**update('own', tokens=12.0, ratio=8.0), **update('peer')}
  )
  assert found.own.ratio == 1.0
  assert found.own.ratio_second_moment == 40 / 16
  assert found.own.clip_fraction == 2 / 16
  assert found.own.loss == -0.5
  assert found.own.max_ratio == 3.0
  assert found.peer.ess_fraction == pytest.approx(8**2 / (20 * 4))
  histogram = found.own.log_ratio_counts
  assert (histogram[0], histogram[20], histogram[40]) == (2, 4, 2)
  assert sum(histogram) == 8
  assert sum(found.peer.log_ratio_counts) == 4


def test_ratios_that_all_vanish_are_no_division_by_zero():
  found = row(update('peer', ratio=0.0, ratio_square=0.0))
  assert found.peer.ess_fraction == 0.0


def test_parts_without_ratios_have_the_other_means():
  sums = {'peer/tokens': 4.0, 'peer/logp': -2.0, 'peer/loss': 0.1}
  assert row({**sums, **IDLE}).peer == workdir.Ratios(loss=0.1, logp=-0.5)


def test_the_first_update_tells_how_sampler_and_trainer_differ():
  found = row(update('own'), update('own', log_ratio=9.0, max_ratio=9.0))
  assert found.mismatch == workdir.Ratios(
    kl=0.5, max_ratio=3.0, ess_fraction=pytest.approx(8**2 / (20 * 4))
  )


def test_the_mismatch_is_of_tokens_where_ratios_are_of_responses():
  tokens = {'log_ratio_of_tokens': -4.0, 'max_ratio_of_tokens': 5.0,
            'ratio_of_tokens': 4.0, 'ratio_square_of_tokens': 5.0}  # fmt: skip
  assert row(update('own', **tokens)).mismatch == workdir.Ratios(
    kl=1.0, max_ratio=5.0, ess_fraction=pytest.approx(16 / 20)
  )


def test_a_correction_of_own_rows_reports_the_mismatch_itself():
  context = examples.context(groups=GROUPS)
  context.log.mismatch = {'kl': 0.25}
  found = row(update('own'), context=context)
  assert found.mismatch == workdir.Ratios(kl=0.25)


def test_a_round_without_own_rows_has_no_share_of_signal():
  assert row(IDLE, own=[]).rows_with_signal == 0.0
