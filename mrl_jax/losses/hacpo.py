"""HACPO: peers' responses, with bounds that tighten during a round."""

import jax
import jax.numpy as jnp


def stepwise_surrogate(
  ratio_BT: jax.Array,
  advantage_B1: jax.Array,
  low_B1: jax.Array,
  high: float,
  alpha: float,
) -> jax.Array:
  """The clipped and exponentially weighted surrogate of peers' rows.

    c_t = clip(s_t, lo, hi)
    J_t = c_t sg[c_t]^alpha A

  There is no minimum with the unclipped term: outside [lo, hi] the gradient is
  zero for both signs of A. Inside, bounds included, it is
  s_t sg[s_t]^alpha A grad log pi. With hi = 1, the
  less likely a response is for the learner than for the source, the lower its
  weight.

  HACPO, https://arxiv.org/abs/2603.02604, sections 3.3 (weight) and 3.4
  (bounds); where paper and code differ, the authors' code.

  Args:
    ratio_BT: s, the `gspo.sequence_ratio` against the source's mean
      log-probability over the source's own tokens.
    advantage_B1: A of each response, for this learner.
    low_B1: lo of each response; see `lower_bound`.
    high: hi.
    alpha: the exponent of the weight; 0 leaves the weight off.

  Returns:
    The objective of each token, to be maximised.
  """
  clipped_BT = jax.lax.stop_gradient(jnp.clip(ratio_BT, low_B1, high))
  # Not `clip` alone, whose gradient at a bound is half: for an identical peer s
  # is exactly 1, which may be a bound.
  inside_BT = (ratio_BT >= low_B1) & (ratio_BT <= high)
  value_BT = jnp.where(inside_BT, ratio_BT, clipped_BT)
  return value_BT * clipped_BT**alpha * advantage_B1


def lower_bound(
  delta: float, delta_step: float, mini_batch_B1: jax.Array
) -> jax.Array:
  """The lower bound of the ratio, which rises with the learner's updates.

    lo = min(1, 1 - delta + m delta_step)

  HACPO, https://arxiv.org/abs/2603.02604, section 3.4. No gradient is involved.

  Args:
    delta: how far below 1 the bound starts.
    delta_step: how much the bound rises in each mini-batch.
    mini_batch_B1: m, counted from 0 within the round.

  Returns:
    lo_B1.
  """
  return jnp.minimum(1.0, 1 - delta + mini_batch_B1 * delta_step)
