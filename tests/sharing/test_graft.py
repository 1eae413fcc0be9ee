import numpy as np
import pytest

from mrl_jax.sharing import carry
from mrl_jax.sharing import graft
from tests import examples

ENCODER = examples.tokenizer('byte_level')
OTHER = examples.tokenizer('sentencepiece')


def selected(*means, reward=1.0, encoder=ENCODER):
  """Rollouts of a peer, whose tokens are all as likely as exp(mean)."""
  found = []
  for g, mean in enumerate(means):
    sent = examples.rollout(
      b'= 1%d' % g, reward, encoder=encoder, policy='b', sample=g
    )
    logp = np.full(len(sent.ids), mean, np.float32)
    sent = examples.rollout(
      b'= 1%d' % g, reward, encoder=encoder, policy='b', sample=g, logp=logp
    )
    found.append(carry.Selected(g, sent, 0.5 + g))
  return found


def take(selected, learner=None, **changes):
  settings = examples.run_config().method
  settings.graft.update(changes)
  # The learner finds every token as likely as exp(-1).
  learner = learner or examples.learner(ENCODER)
  return graft.carry(selected, learner, settings), learner


def test_numbers_worked_by_hand():
  # exp(-1 + .5) = .61 is out, exp(-1 + .9) = .90 and exp(-1 + 2) = 2.7 are in.
  found, learner = take(selected(-0.5, -0.9, -2.0))
  assert [row.prompt for row in found.rows] == [1, 2]
  assert [row.advantage for row in found.rows] == [1.5, 2.5]  # The source's.
  assert found.rows[0].weight == pytest.approx(np.exp(-0.1), rel=1e-6)
  assert found.rows[1].weight == 1.0
  assert found.metrics == {
    'compatibility': pytest.approx(np.exp(-0.1)),
    'admitted': pytest.approx(2 / 3),
  }
  assert learner.refused == {'incompatible': 1}


def test_ratios_begin_at_the_learners_own_probabilities():
  found, _ = take(selected(-0.9))
  np.testing.assert_array_equal(found.rows[0].old_logp, -1.0)


def test_each_mean_is_over_the_policys_own_tokens():
  long, learner = selected(-1.0), examples.learner(OTHER)
  found, _ = take(long, learner)
  assert len(found.rows[0].ids) != len(long[0].rollout.ids)
  assert found.metrics['compatibility'] == pytest.approx(1.0)


def test_the_gate_is_strict_and_a_setting():
  found, _ = take(selected(-0.9), floor=float(np.exp(-1 - -0.9)) + 1e-6)
  assert not found.rows
  assert len(take(selected(-0.1), floor=0.0)[0].rows) == 1


def test_controls():
  offered = selected(-0.5, -0.9, -0.6, -0.4, -0.3)
  everything, _ = take(offered, admission='all')
  assert len(everything.rows) == 5
  assert everything.rows[0].weight == pytest.approx(np.exp(-0.5))
  assert {row.weight for row in take(offered, weighted=False)[0].rows} == {1.0}
  seen = set()
  for seed in range(30):
    learner = examples.learner(ENCODER, rng=np.random.default_rng(seed))
    (row,) = take(offered, learner, admission='random')[0].rows
    seen.add(row.prompt)
  assert seen == set(range(5))  # As many as pass the gate, whichever.


def test_a_peer_that_claims_no_probability_at_all_is_bounded():
  found, _ = take(selected(-1e4))
  assert found.rows[0].weight == 1.0
  assert found.metrics['compatibility'] == pytest.approx(np.exp(10))


def test_failures_may_be_left_out():
  offered = selected(-0.9) + selected(-0.9, reward=0.0)
  assert len(take(offered)[0].rows) == 2
  assert len(take(offered, success_only=True)[0].rows) == 1


def test_nothing_offered_is_nothing_taken():
  found, _ = take([])
  assert not found.rows
  assert found.metrics == {}


@pytest.mark.parametrize(
  ('where', 'expected'),
  [
    ('last', [0, 2, 4, 1, 3]),
    ('first', [1, 3, 0, 2, 4]),
    ('uniform', [0, 1, 2, 3, 4]),
  ],
)
def test_grafted_prompts_come_last_or_where_asked(where, expected):
  assert graft.order(range(5), {3, 1}, where) == expected
