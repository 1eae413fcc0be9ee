"""GSPO: one ratio for a whole response."""

import jax
import jax.numpy as jnp


def sequence_ratio(
  logp_BT: jax.Array,
  old_logp_BT: jax.Array,
  mask_BT: jax.Array,
  row_BT: jax.Array,
  max_log_ratio: float | None = None,
) -> jax.Array:
  """The length-normalised ratio of a response, at each of its tokens.

    s_i  = exp(mean over the mask of (log pi(y_t) - log pi_old(y_t)))
    s_it = sg[s_i] exp(log pi(y_t) - sg[log pi(y_t)])

  The value at every token is s_i; its gradient there is s_i grad log pi(y_t).
  With an advantage common to the response, and tokens weighted by 1/|y_i|, the
  clipped surrogate of s_it has the value and the gradient of that of s_i.

  GSPO, https://arxiv.org/abs/2507.18071, eq. 7 (s_i) and eq. 14 (s_it); the
  surrogates are its eq. 5 and eq. 13.

  Args:
    logp_BT: the learner's log-probabilities.
    old_logp_BT: the log-probabilities of the policy that sampled. Only their
      mean over the mask matters: if a peer with another vocabulary sampled, its
      mean over its own tokens is at every position (HACPO).
    mask_BT: False where a token does not count. If no token counts, s_i is 1.
    row_BT: which response a token belongs to, in [0, T].
    max_log_ratio: bound of |log s_i|. It changes the value, and stops no
      gradient. None leaves s_i unbounded.

  Returns:
    s_BT, at every position, also where the mask is False.
  """
  constant_BT = jax.lax.stop_gradient(logp_BT)
  difference_BT = jnp.where(mask_BT, constant_BT - old_logp_BT, 0.0)
  length_BT = jnp.maximum(_sums(mask_BT.astype(jnp.float32), row_BT), 1)
  log_ratio_BT = _sums(difference_BT, row_BT) / length_BT
  if max_log_ratio is not None:
    log_ratio_BT = jnp.clip(log_ratio_BT, -max_log_ratio, max_log_ratio)
  return jnp.exp(log_ratio_BT) * jnp.exp(logp_BT - constant_BT)


def _sums(x_BT, row_BT):
  """The sum over the response of each token, at each token."""
  count = x_BT.shape[1] + 1
  return jax.vmap(
    lambda x_T, row_T: jax.ops.segment_sum(x_T, row_T, count)[row_T]
  )(x_BT, row_BT)
