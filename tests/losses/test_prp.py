import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax.losses import grpo
from mrl_jax.losses import prp
from tests.losses import references

LEARNER = jnp.log(jnp.array([[0.5, 0.4, 0.25, 0.5]]))
PEER = jnp.log(jnp.array([[0.25, 0.5, 0.5, 0.5]]))
CHUNKS = jnp.array([[0, 1, 1, 2]])


def test_numbers_worked_by_hand():
  # Chunk 0: .5/.25 = 2; chunk 1: (.4 * .25)/(.5 * .5) = .4; chunk 2: 1.
  ratio = prp.chunk_ratio(LEARNER, PEER, CHUNKS, max_ratio=10.0)
  np.testing.assert_allclose(ratio, [[2.0, 0.4, 0.4, 1.0]], rtol=1e-6)


def test_truncation_bounds_the_ratio():
  ratio = prp.chunk_ratio(LEARNER, PEER, CHUNKS, max_ratio=1.5)
  np.testing.assert_allclose(ratio, [[1.5, 0.4, 0.4, 1.0]], rtol=1e-6)


def test_only_the_sum_over_a_chunk_matters():
  moved = PEER + jnp.array([[0.0, 0.7, -0.7, 0.0]])
  ratio = prp.chunk_ratio(LEARNER, PEER, CHUNKS, 10.0)
  same = prp.chunk_ratio(LEARNER, moved, CHUNKS, 10.0)
  np.testing.assert_allclose(ratio, same, rtol=1e-6)


@pytest.mark.parametrize('max_ratio', [10.0, 1.5])
def test_gradient_is_the_bounded_ratio_times_the_gradient_of_logp(max_ratio):
  gradient = jax.grad(
    lambda logp: prp.chunk_ratio(logp, PEER, CHUNKS, max_ratio).sum()
  )(LEARNER)
  ratio = prp.chunk_ratio(LEARNER, PEER, CHUNKS, max_ratio)
  np.testing.assert_allclose(gradient, ratio, rtol=1e-6)


def test_a_chunk_moves_as_its_ratio_does():
  # The gradient of a chunk's tokens, summed along a direction in which all of
  # them move, is the finite difference of the chunk's own ratio.
  def chunk_1(logp):
    return jnp.exp((logp - PEER)[0, 1:3].sum())

  step = jnp.array([[0.0, 1.0, 1.0, 0.0]]) * 1e-3
  difference = (chunk_1(LEARNER + step) - chunk_1(LEARNER - step)) / 2e-3
  gradient = jax.grad(
    lambda logp: prp.chunk_ratio(logp, PEER, CHUNKS, 10.0)[0, 1:3].sum()
  )(LEARNER)
  np.testing.assert_allclose(gradient[0, 1:3].sum(), difference, rtol=1e-3)


def test_own_chunks_give_the_token_ratio():
  each = jnp.arange(4)[None, :]
  ratio = prp.chunk_ratio(LEARNER, PEER, each, 10.0)
  np.testing.assert_allclose(ratio, jnp.exp(LEARNER - PEER), rtol=1e-6)


def chunks(seed):
  """Of 1 to 3 tokens each."""
  rng = np.random.default_rng(seed)
  return np.array(
    [np.arange(6).repeat(rng.integers(1, 4, 6))[:6] for _ in range(16)]
  )


def test_it_is_the_ratio_of_the_chunks():
  logp_BT, behaviour_BT, *_ = references.rows(8, spread=1.0)
  chunk_BT = chunks(8)
  ratio_BT = jax.jit(prp.chunk_ratio)(logp_BT, behaviour_BT, chunk_BT, 2.0)
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


@pytest.mark.parametrize('sign', [1, -1])
def test_the_surrogate_moves_as_that_of_the_chunks(sign):
  logp_BT, behaviour_BT, _, advantage_B1 = references.rows(9, spread=0.5)
  chunk_BT = chunks(9)
  advantage_B1 = sign * advantage_B1

  def objective(logp_BT):
    ratio_BT = prp.chunk_ratio(logp_BT, behaviour_BT, chunk_BT, 1e6)
    return grpo.clipped_surrogate(ratio_BT, advantage_B1, 0.2, 0.28)

  # The values differ: here a chunk has one for each of its tokens.
  _, found = references.weighted(objective, logp_BT, np.full((16, 6), 1 / 6))
  _, expected = references.by_row(
    lambda b, logp_T: references.prp(
      logp_T,
      behaviour_BT[b].astype(float),
      chunk_BT[b],
      float(advantage_B1[b, 0]),
      0.2,
      0.28,
    ),
    logp_BT,
  )
  references.assert_agree([found], [expected])
  for of_a_sign_B in (advantage_B1[:, 0] > 0, advantage_B1[:, 0] < 0):
    assert (expected[of_a_sign_B] == 0).any()
    assert (expected[of_a_sign_B] != 0).any()
