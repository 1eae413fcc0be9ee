"""KL divergence from a reference policy, estimated from sampled tokens."""

import jax
import jax.numpy as jnp

# Penalties by name, of d = log pi - log pi_ref.
FORMS = {
  'k1': lambda difference_BT: difference_BT,
  'k2': lambda difference_BT: difference_BT**2 / 2,
  # k3 is exp(-d) - 1 + d; `expm1` keeps the digits of a small d.
  'k3': lambda difference_BT: jnp.expm1(-difference_BT) + difference_BT,
}


def estimate(
  logp_BT: jax.Array, reference_logp_BT: jax.Array, form: str
) -> jax.Array:
  """A penalty at every token, to be *subtracted* from its objective.

    d = log pi(y_t) - log pi_ref(y_t)
    k1 = d,  k2 = d^2 / 2,  k3 = exp(-d) - 1 + d

  For y_t drawn from pi, k1 and k3 have the mean KL(pi || pi_ref), k3 with less
  variance, and k2 is close to it where the policies are close (John Schulman,
  http://joschu.net/blog/kl-approx.html). Their gradients have other means, since
  none passes through the sampling:

    k1  grad log pi               of mean zero: noise, and no penalty
    k2  d grad log pi             of mean grad KL(pi || pi_ref)
    k3  (1 - exp(-d)) grad log pi of mean grad KL(pi_ref || pi)

  for the distribution of one token after given ones. k2's is the gradient of
  the reverse KL; k3's, of the forward KL, is the same to first order in d,
  but bounded where d > 0 and exponential where d < 0. For tokens of an older
  policy all of it holds only approximately. GRPO's is k3
  (https://arxiv.org/abs/2402.03300, eq. 4).

  Args:
    logp_BT: the learner's log-probabilities.
    reference_logp_BT: the reference's; no gradient reaches them.
    form: a name in `FORMS`.

  Returns:
    The estimate of each token; 0 at padding, where both inputs are 0.
  """
  return FORMS[form](logp_BT - jax.lax.stop_gradient(reference_logp_BT))
