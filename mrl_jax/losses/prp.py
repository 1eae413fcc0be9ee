"""PRP: peer rollouts, with a ratio for each chunk of two vocabularies."""

import jax
import jax.numpy as jnp


def chunk_ratio(
  logp_BT: jax.Array,
  behaviour_logp_BT: jax.Array,
  chunk_BT: jax.Array,
  max_ratio: float,
) -> jax.Array:
  """The truncated density ratio of every token's chunk.

    log rho_c = sum_{t in c} log pi(y_t) - sum_{t in c} log mu(y_t)
    rho_t     = sg[min(rho_c, C)] exp(log pi(y_t) - sg[log pi(y_t)])

  A chunk is the text between two consecutive byte offsets where tokens of both
  vocabularies end: the shortest text to which both policies give a probability.
  The value of rho_t is that of its chunk; its gradient is
  min(rho_c, C) grad log pi(y_t), so that a chunk's gradient is that of its ratio
  however many tokens it has. Truncation matters where A < 0: there, the clip of
  the surrogate does not act on a large rho, and truncation scales its gradient
  down without zeroing it. A dual clip above C has no effect.

  mu is the distribution that the peer sampled from, pi the learner's at its own
  temperature.

  Mutual RL, https://arxiv.org/abs/2605.07244, shares raw rollouts; the chunks,
  the token form (after GSPO-token, https://arxiv.org/abs/2507.18071, eq. 14)
  and the truncation are our reconstruction.

  Args:
    logp_BT: the learner's log-probabilities; 0 at padding.
    behaviour_logp_BT: the peer's log-probabilities, projected onto the
      learner's tokens; 0 at padding. Only their sums over chunks matter.
    chunk_BT: the chunk of each token, in [0, T).
    max_ratio: C.

  Returns:
    rho_BT.
  """
  slots = logp_BT.shape[1]
  difference_BT = jax.lax.stop_gradient(logp_BT) - behaviour_logp_BT
  log_ratio_BT = jax.vmap(
    lambda difference_T, chunk_T: jax.ops.segment_sum(
      difference_T, chunk_T, num_segments=slots
    )[chunk_T]
  )(difference_BT, chunk_BT)
  bounded_BT = jnp.exp(jnp.minimum(log_ratio_BT, jnp.log(max_ratio)))
  return bounded_BT * jnp.exp(logp_BT - jax.lax.stop_gradient(logp_BT))
