import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax.losses import prp

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
