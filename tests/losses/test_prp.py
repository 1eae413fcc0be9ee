import jax
import numpy as np
import pytest

from mrl_jax.losses import grpo
from mrl_jax.losses import prp
from tests.losses import references

LEARNER = np.log([[0.5, 0.4, 0.25, 0.5]])
PEER = np.log([[0.25, 0.5, 0.5, 0.5]])
CHUNKS = np.array([[0, 1, 1, 2]])

chunk_ratio = jax.jit(prp.chunk_ratio)


@pytest.mark.parametrize(
  ('max_ratio', 'expected'),
  [(10.0, [[2.0, 0.4, 0.4, 1.0]]), (1.5, [[1.5, 0.4, 0.4, 1.0]])],
)
def test_numbers_worked_by_hand(max_ratio, expected):
  # Chunk 0: .5/.25 = 2; chunk 1: (.4 * .25)/(.5 * .5) = .4; chunk 2: 1. The
  # gradient in log pi is the truncated ratio itself.
  value_B, gradient_BT = references.weighted(
    lambda logp_BT: prp.chunk_ratio(logp_BT, PEER, CHUNKS, max_ratio),
    LEARNER,
    np.ones((1, 4)),
  )
  np.testing.assert_allclose(gradient_BT, expected, rtol=1e-6)
  np.testing.assert_allclose(value_B, np.sum(expected), rtol=1e-6)
  ratio_BT = chunk_ratio(LEARNER, PEER, CHUNKS, max_ratio)
  np.testing.assert_allclose(ratio_BT, expected, rtol=1e-6)


def test_only_the_sum_over_a_chunk_matters():
  moved_BT = PEER + np.array([[0.0, 0.7, -0.7, 0.0]])
  np.testing.assert_allclose(
    chunk_ratio(LEARNER, moved_BT, CHUNKS, 10.0),
    chunk_ratio(LEARNER, PEER, CHUNKS, 10.0),
    rtol=1e-6,
  )


def test_the_ratio_of_a_chunk_of_one_token_is_that_of_the_token():
  ratio_BT = chunk_ratio(LEARNER, PEER, np.arange(4)[None, :], 10.0)
  np.testing.assert_allclose(ratio_BT, np.exp(LEARNER - PEER), rtol=1e-6)


def chunks(seed):
  """Random chunks of 1 to 3 tokens, of 16 responses."""
  rng = np.random.default_rng(seed)
  return np.array(
    [np.arange(6).repeat(rng.integers(1, 4, 6))[:6] for _ in range(16)]
  )


def test_it_is_the_ratio_of_the_chunks():
  logp_BT, behaviour_BT, *_ = references.rows(8, spread=1.0)
  chunk_BT = chunks(8)
  ratio_BT = chunk_ratio(logp_BT, behaviour_BT, chunk_BT, 2.0)
  expected = np.zeros((16, 6))
  for b in range(16):
    ratios = references.chunk_ratios(
      logp_BT[b].astype(float), behaviour_BT[b].astype(float), chunk_BT[b]
    )
    for t in range(6):
      expected[b, t] = min(ratios[chunk_BT[b, t]], 2.0)
  np.testing.assert_allclose(ratio_BT, expected, rtol=1e-5)
  assert (expected == 2.0).any()
  assert (expected < 1.0).any()


def test_the_gradient_of_the_surrogate_is_that_of_the_chunks():
  logp_BT, behaviour_BT, _, advantage_B1 = references.rows(9, spread=0.5)
  chunk_BT = chunks(9)

  def objective(logp_BT):
    ratio_BT = prp.chunk_ratio(logp_BT, behaviour_BT, chunk_BT, 1e6)
    return grpo.clipped_surrogate(ratio_BT, advantage_B1, 0.2, 0.28)

  # The values differ: here every token of a chunk has the chunk's value.
  _, found = references.weighted(objective, logp_BT, np.full((16, 6), 1 / 6))
  _, expected = references.by_row(
    references.prp,
    *(logp_BT, behaviour_BT, chunk_BT, advantage_B1[:, 0]),
    **{'low': 0.2, 'high': 0.28},
  )
  references.assert_agree([found], [expected])
  for sign in (1, -1):
    rows_B = sign * advantage_B1[:, 0] > 0
    assert (expected[rows_B] == 0).any()
    assert (expected[rows_B] != 0).any()
