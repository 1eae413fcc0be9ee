import numpy as np

from mrl_jax.sharing import carry
from mrl_jax.thl import transfer
from tests import examples


def test_rows_are_in_the_receivers_tokens():
  sender, receiver = (
    examples.tokenizer('byte_level'),
    examples.tokenizer('sentencepiece'),
  )
  sent = examples.rollout(b'= 10 = 13', encoder=sender, policy='b')
  pairs, carried = carry.rows(
    [carry.Selected(3, sent, -0.5)], examples.learner(receiver)
  )
  ((row, rollout),) = pairs
  assert rollout is sent
  assert list(carried.rows) == [row]
  assert row.prompt == 3
  assert row.advantage == -0.5
  assert receiver.decode(row.ids) == b'= 10 = 13'
  assert row.ids[-1] == receiver.eos_id
  np.testing.assert_allclose(row.old_logp.sum(), sent.policy_logp.sum())
  assert carried.residuals['b'].rollouts == 1


def test_what_is_refused_is_counted_for_its_sender():
  receiver = examples.tokenizer('sentencepiece')
  sender = examples.tokenizer('byte_level')
  selected = [
    carry.Selected(
      0, examples.rollout(payload, encoder=sender, policy=policy), 1.0
    )
    for payload, policy in ((b'= 1', 'b'), (b'= 1 2 3 4 5', 'b'), (b'= 2', 'c'))
  ]
  limits = transfer.Limits(max_tokens=4)
  pairs, carried = carry.rows(
    selected, examples.learner(receiver, limits=limits)
  )
  assert [rollout.payload for _, rollout in pairs] == [b'= 1', b'= 2']
  assert carried.residuals['b'].refused == {'too_long': 1}
  assert carried.residuals['c'].refused == {}
