"""GRPO: the clipped surrogate of group-relative advantages."""

import jax
import jax.numpy as jnp


def clipped_surrogate(
  ratio_BT: jax.Array,
  advantage_B1: jax.Array,
  clip_low: float,
  clip_high: float,
  dual_clip: float = 0.0,
) -> jax.Array:
  """The pessimistic surrogate of every token.

    J_t = min(rho_t A, clip(rho_t, 1 - eps_low, 1 + eps_high) A)

  and, with a dual clip c, max(J_t, c A) where A < 0 (1912.09729, eq. 5).

  GRPO, https://arxiv.org/abs/2402.03300, eq. 3; the asymmetric bounds are
  DAPO's, https://arxiv.org/abs/2503.14476, eq. 10. The gradient is
  rho_t A grad log pi inside the bounds, and zero where the clipped or the dual
  term is the one chosen.

  Args:
    ratio_BT: rho, new over old probability of each token.
    advantage_B1: A of each response.
    clip_low: eps_low.
    clip_high: eps_high.
    dual_clip: c, above 1; 0 leaves the dual clip off.

  Returns:
    The objective of each token, to be maximised.
  """
  clipped_BT = jnp.clip(ratio_BT, 1 - clip_low, 1 + clip_high)
  objective_BT = jnp.minimum(ratio_BT * advantage_B1, clipped_BT * advantage_B1)
  if dual_clip:
    floor_BT = jnp.maximum(objective_BT, dual_clip * advantage_B1)
    objective_BT = jnp.where(advantage_B1 < 0, floor_BT, objective_BT)
  return objective_BT


def is_clipped(ratio_BT, advantage_B1, clip_low, clip_high, dual_clip=0.0):
  """Where a clip of `clipped_surrogate` stops the gradient of an advantage."""
  too_low_BT = ratio_BT < 1 - clip_low
  if dual_clip:
    too_low_BT |= ratio_BT > dual_clip
  return jnp.where(advantage_B1 > 0, ratio_BT > 1 + clip_high, too_low_BT) & (
    advantage_B1 != 0
  )
