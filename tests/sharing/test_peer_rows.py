import numpy as np

from mrl_jax.sharing import peer_rows
from mrl_jax.thl import transfer
from tests import examples

SENDER = examples.tokenizer('byte_level')
RECEIVER = examples.tokenizer('sentencepiece')


def test_rows_are_in_the_receivers_tokens():
  sent = examples.replace(
    examples.rollout(b'= 10 = 13', encoder=SENDER, policy='b'), advantage=-0.5
  )
  context = examples.context(RECEIVER)
  groups = [examples.peer_group(sent, prompt=3)]
  ((row, rollout),) = peer_rows.pairs(groups, context)
  assert rollout is sent
  assert (row.prompt, row.advantage) == (3, -0.5)
  assert RECEIVER.decode(row.ids) == b'= 10 = 13'
  assert row.ids[-1] == RECEIVER.eos_id
  np.testing.assert_allclose(row.old_logp.sum(), sent.sampling_logp.sum())
  assert context.log.residuals['b'].rollouts == 1
  (same,) = peer_rows.rows(groups, context)
  np.testing.assert_array_equal(same.ids, row.ids)


def test_refused_rollouts_are_counted_for_their_sender():
  limits = transfer.Limits(max_tokens=4)
  context = examples.context(RECEIVER, limits=limits)
  rollouts = [
    examples.rollout(payload, encoder=SENDER, policy=policy)
    for payload, policy in ((b'= 1', 'b'), (b'= 1 2 3 4 5', 'b'), (b'= 2', 'c'))
  ]
  groups = [
    examples.peer_group(*rollouts[:2]),
    examples.peer_group(*rollouts[2:]),
  ]
  pairs = peer_rows.pairs(groups, context)
  assert [rollout.payload for _, rollout in pairs] == [b'= 1', b'= 2']
  assert context.log.residuals['b'].refused == {'too_long': 1}
  assert context.log.residuals['c'].refused == {}
