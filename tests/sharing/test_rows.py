import numpy as np

from mrl_jax.sharing import rows
from tests import examples


def test_own_rollouts_keep_their_sampled_ids_and_log_probabilities():
  rollout = examples.rollout(b'= 1')
  row = rows.own_row(2, rollout, 0.5)
  assert (row.prompt, row.advantage) == (2, 0.5)
  np.testing.assert_array_equal(row.ids, rollout.ids)
  np.testing.assert_array_equal(row.old_logp, rollout.sampling_logp)
  np.testing.assert_array_equal(row.chunk, np.arange(len(rollout.ids)))


def test_a_demonstration_is_trained_on_as_a_whole():
  row = rows.demonstration(1, np.array([5, 6], np.int32), weight=0.25)
  assert (row.prompt, row.advantage, row.weight) == (1, 1.0, 0.25)
  assert row.mask.all()
  assert row.mask.shape == row.old_logp.shape == row.chunk.shape == (2,)
