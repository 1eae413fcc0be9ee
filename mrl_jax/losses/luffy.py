"""LUFFY: peers' responses, with a shaped probability in place of a ratio."""

import jax
import jax.numpy as jnp


def shaped(
  logp_BT: jax.Array, advantage_B1: jax.Array, gamma: float
) -> jax.Array:
  """The shaped objective of peers' tokens.

    x_t = pi(y_t),  f(x) = x / (x + gamma),  J_t = f(x_t) A

  The source's probability is set to 1, so that x is the ratio; there is
  no clip. The gradient is gamma x / (x + gamma)^2 A grad log pi: greatest at
  x = gamma, so that it lifts unlikely tokens more than x A grad log pi would.

  LUFFY, https://arxiv.org/abs/2504.14945, policy shaping (the authors' code
  names it `p_div_p_0.1`).

  Args:
    logp_BT: the learner's log-probabilities.
    advantage_B1: A of each response, the source's.
    gamma: the probability that moves most.

  Returns:
    The objective of each token, to be maximised.
  """
  probability_BT = jnp.exp(logp_BT)
  return probability_BT / (probability_BT + gamma) * advantage_B1
