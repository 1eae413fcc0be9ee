import numpy as np

from mrl_jax.sharing import prp
from mrl_jax.thl import transfer
from tests import examples


def test_rows_are_in_the_receivers_tokens():
  sender, receiver = (
    examples.tokenizer('byte_level'),
    examples.tokenizer('sentencepiece'),
  )
  sent = examples.rollout(b'= 10 = 13', encoder=sender, policy='b')
  rows, residuals = prp.carry(
    [(3, sent, -0.5)], receiver, transfer.Limits(max_tokens=20)
  )
  (row,) = rows
  assert row.prompt == 3
  assert row.advantage == -0.5
  assert receiver.decode(row.ids) == b'= 10 = 13'
  assert row.ids[-1] == receiver.eos_id
  np.testing.assert_allclose(row.old_logp.sum(), sent.policy_logp.sum())
  assert residuals['b'].rollouts == 1


def test_what_is_refused_is_counted_for_its_sender():
  receiver = examples.tokenizer('sentencepiece')
  sender = examples.tokenizer('byte_level')
  selected = [
    (0, examples.rollout(b'= 1', encoder=sender, policy='b'), 1.0),
    (0, examples.rollout(b'= 1 2 3 4 5', encoder=sender, policy='b'), 1.0),
    (0, examples.rollout(b'= 2', encoder=sender, policy='c'), 1.0),
  ]
  rows, residuals = prp.carry(selected, receiver, transfer.Limits(max_tokens=4))
  assert len(rows) == 2
  assert residuals['b'].refused == {'too_long': 1}
  assert residuals['c'].refused == {}
