import numpy as np
import pytest

from mrl_jax.sharing import carry
from mrl_jax.sharing import hacpo
from tests import examples

SENDER = examples.tokenizer('byte_level')
RECEIVER = examples.tokenizer('sentencepiece')
SENT = examples.rollout(b'= 10 = 13', encoder=SENDER, policy='b')


def carried(**changes):
  settings = examples.run_config().method
  settings.hacpo.update(changes)
  learner = examples.learner(RECEIVER, ratios={'a': 1.0, 'b': 0.5})
  return hacpo.carry([carry.Selected(0, SENT, -0.75)], learner, settings)


def test_every_token_is_compared_with_the_peers_mean_over_its_own_tokens():
  (row,) = carried().rows
  assert len(row.ids) != len(SENT.ids)
  np.testing.assert_allclose(row.old_logp, SENT.policy_logp.mean(), rtol=1e-6)
  assert row.old_logp.shape == row.ids.shape


def test_a_peer_twice_as_able_counts_twice():
  # The learner's capability is half the peer's: w(j, k) = 2.
  found = carried()
  assert found.rows[0].advantage == -1.5
  assert found.metrics == {'capability': {'b': 2.0}}
  assert carried(capability_weight=False).rows[0].advantage == -0.75


def test_what_thl_lost_is_told():
  assert carried().residuals['b'].rollouts == 1
  assert carried().rows[0].weight == pytest.approx(1.0)


def test_a_peer_whose_capability_nobody_knows_is_left_out_and_counted():
  learner = examples.learner(RECEIVER, ratios={'a': 1.0})
  selected = [carry.Selected(0, SENT, 1.0)]
  settings = examples.run_config().method
  assert not hacpo.carry(selected, learner, settings).rows
  assert learner.refused == {'unknown_capability': 1}
