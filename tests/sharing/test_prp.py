import numpy as np

from mrl_jax.sharing import prp
from tests import examples

SENDER = examples.tokenizer('byte_level')
RECEIVER = examples.tokenizer('sentencepiece')
SENT = examples.rollout(b'= 10 = 13', encoder=SENDER, policy='b')


def row(**changes):
  changes = {f'prp.{key}': value for key, value in changes.items()}
  method = examples.settings('prp', **changes)
  context = examples.context(RECEIVER, method=method)
  (row,) = prp.rows([examples.peer_group(SENT)], context)
  return row


def test_chunks_are_those_that_both_vocabularies_share():
  assert row().chunk.max() + 1 < len(row().ids)


def test_ratios_may_be_per_token():
  by_token = row(level='token')
  np.testing.assert_array_equal(by_token.chunk, np.arange(len(by_token.ids)))
  np.testing.assert_array_equal(by_token.old_logp, row().old_logp)


def test_denominators_may_be_the_learners_own():
  np.testing.assert_allclose(row().old_logp.sum(), SENT.sampling_logp.sum())
  recomputed = row(denominators='recompute')
  np.testing.assert_array_equal(recomputed.old_logp, -1.0)  # The learner's.
  np.testing.assert_array_equal(recomputed.chunk, row().chunk)
