import jax.numpy as jnp
import numpy as np

from configs import base
from mrl_jax.training import objectives
from mrl_jax.training import update

# Two rows of three tokens; the last token of the second is padding.
LEARNER = jnp.log(jnp.array([[0.5, 0.4, 0.25], [0.5, 0.9, 1.0]]))
SAMPLED = jnp.log(jnp.array([[0.25, 0.5, 0.5], [1.0, 0.5, 1.0]]))
ROWS = update.Rows(
  tokens_BS=jnp.zeros((2, 4), jnp.int32),
  valid_BS=jnp.ones((2, 4), bool),
  old_logp_BT=SAMPLED,
  advantage_B1=jnp.array([[2.0], [-1.0]]),
  weight_BT=jnp.array([[0.2, 0.2, 0.2], [0.2, 0.2, 0.0]]),
  chunk_BT=jnp.array([[0, 1, 1], [0, 1, 0]]),
)


def settings(**changes):
  method = base.get_config().method
  method.update({'max_ratio': 1.5, 'dual_clip': 3.0, **changes})
  return method


def check(objective, expected_BT, expected_sums):
  objective_BT, sums = objective(LEARNER, ROWS)
  mask_BT = ROWS.weight_BT > 0
  np.testing.assert_allclose(objective_BT * mask_BT, expected_BT, rtol=1e-6)
  assert sums.keys() == expected_sums.keys()
  for name, value in expected_sums.items():
    np.testing.assert_allclose(sums[name], value, rtol=1e-6, err_msg=name)


def test_own_rows_have_ratios_by_token():
  # 2, .8, .5 with A = 2 and .5, 1.8 with A = -1, in bounds .8 and 1.28.
  check(
    objectives.own(settings()),
    [[2.56, 1.6, 1.0], [-0.8, -1.8, 0.0]],
    {
      'tokens': 5,
      'ratio': 2 + 0.8 + 0.5 + 0.5 + 1.8,
      'ratio_square': 4 + 0.64 + 0.25 + 0.25 + 3.24,
      'clipped': 2,  # 2 from above, and .5 from below where A < 0.
    },
  )


def test_peer_rows_have_ratios_by_chunk_and_truncated():
  # 2 is cut at 1.5; (.8 * .5) twice; .5; 1.8 is cut at 1.5.
  check(
    objectives.peer_ratio(settings()),
    [[2.56, 0.8, 0.8], [-0.8, -1.5, 0.0]],
    {
      'tokens': 5,
      'ratio': 1.5 + 0.4 + 0.4 + 0.5 + 1.5,
      'ratio_square': 2.25 + 0.16 + 0.16 + 0.25 + 2.25,
      'clipped': 2,
    },
  )


def test_the_dual_clip_is_a_setting():
  objective_BT, _ = objectives.own(settings(dual_clip=1.2))(LEARNER, ROWS)
  np.testing.assert_allclose(objective_BT[1, 1], -1.2, rtol=1e-6)


def test_supervised_rows_are_as_likely_as_they_are():
  np.testing.assert_array_equal(
    objectives.log_likelihood(LEARNER, ROWS)[0], LEARNER
  )
