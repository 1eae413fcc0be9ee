import numpy as np
import pytest

from mrl_jax.sharing import graft
from tests import examples

ENCODER = examples.tokenizer('byte_level')
OTHER = examples.tokenizer('sentencepiece')


def group(*means, reward=1.0):
  """One rollout a prompt; its tokens have these mean log-probabilities."""
  groups = []
  for p, mean in enumerate(means):
    fields = {'encoder': ENCODER, 'policy': 'b', 'sample': p}
    sent = examples.rollout(b'= 1%d' % p, reward, **fields)
    logp = np.full(len(sent.ids), mean, np.float32)
    sent = examples.replace(sent, sampling_logp=logp, advantage=0.5 + p)
    groups.append(examples.peer_group(sent, prompt=p))
  return groups


def rows(groups, encoder=ENCODER, rng=None, **changes):
  """The learner finds every token as likely as exp(-1)."""
  changes = {f'graft.{key}': value for key, value in changes.items()}
  context = examples.context(
    encoder,
    method=examples.settings('graft', **changes),
    rng=rng or np.random.default_rng(0),
  )
  return graft.rows(groups, context), context.log


def test_numbers_worked_by_hand():
  # exp(-1 + .5) = .61 is out, exp(-1 + .9) = .90 and exp(-1 + 2) = 2.7 are in.
  found, log = rows(group(-0.5, -0.9, -2.0))
  assert [row.prompt for row in found] == [1, 2]
  assert [row.advantage for row in found] == [1.5, 2.5]  # The source's.
  assert found[0].weight == pytest.approx(np.exp(-0.1), rel=1e-6)
  assert found[1].weight == 1.0
  assert log.metrics == {
    'compatibility': pytest.approx(np.exp(-0.1)),
    'admitted': pytest.approx(2 / 3),
  }
  assert log.refused == {'incompatible': 1}


def test_ratios_begin_at_the_learners_own_probabilities():
  ((row,), _) = rows(group(-0.9))
  np.testing.assert_array_equal(row.old_logp, -1.0)


def test_each_mean_is_over_the_policys_own_tokens():
  sent = group(-1.0)
  ((row,), log) = rows(sent, OTHER)
  assert len(row.ids) != len(sent[0].rollouts[0].ids)
  assert log.metrics['compatibility'] == pytest.approx(1.0)


def test_the_gate_is_strict_and_a_setting():
  found, _ = rows(group(-0.9), floor=float(np.exp(-1 - -0.9)) + 1e-6)
  assert not found
  assert len(rows(group(-0.1), floor=0.0)[0]) == 1


def test_controls_of_the_gate_and_the_weight():
  offered = group(-0.5, -0.9, -0.6, -0.4, -0.3)
  everything, _ = rows(offered, admission='all')
  assert len(everything) == 5
  assert everything[0].weight == pytest.approx(np.exp(-0.5))
  assert {row.weight for row in rows(offered, weighted=False)[0]} == {1.0}
  seen = set()
  for seed in range(30):
    rng = np.random.default_rng(seed)
    ((row,), _) = rows(offered, rng=rng, admission='random')
    seen.add(row.prompt)
  assert seen == set(range(5))  # As many as pass the gate, at random.


def test_a_peer_that_claims_no_probability_at_all_is_bounded():
  ((row,), log) = rows(group(-1e4))
  assert row.weight == 1.0
  assert log.metrics['compatibility'] == pytest.approx(np.exp(10))


def test_failures_may_be_left_out():
  offered = group(-0.9) + group(-0.9, reward=0.0)
  assert len(rows(offered)[0]) == 2
  assert len(rows(offered, success_only=True)[0]) == 1


def test_without_groups_there_are_neither_rows_nor_metrics():
  found, log = rows([])
  assert not found
  assert log.metrics == {}


@pytest.mark.parametrize(
  ('where', 'expected'),
  [
    ('last', [0, 2, 4, 1, 3]),
    ('first', [1, 3, 0, 2, 4]),
    ('uniform', [0, 1, 2, 3, 4]),
  ],
)
def test_grafted_prompts_are_trained_on_where_the_order_says(where, expected):
  assert graft.order(range(5), {3, 1}, where) == expected
