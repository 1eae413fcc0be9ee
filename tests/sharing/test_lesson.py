import numpy as np

from mrl_jax.sharing import lesson
from tests import examples


def test_own_rollouts_keep_their_sampled_ids_and_logps():
  rollout = examples.rollout(b'= 1')
  row = lesson.own_row(2, rollout, 0.5)
  assert (row.prompt, row.advantage) == (2, 0.5)
  np.testing.assert_array_equal(row.ids, rollout.ids)
  np.testing.assert_array_equal(row.old_logp, rollout.policy_logp)
  np.testing.assert_array_equal(row.chunk, np.arange(len(rollout.ids)))
