"""A prompt as a bandit: possible responses, a learner, a peer and rewards."""

import dataclasses
import functools

import numpy as np

from mrl_jax import checks

_MOST_SAMPLES = 1000  # Binomial coefficients of larger groups overflow a float.
_TOLERANCE = 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
  """A prompt with K possible responses, a learner and a peer.

    pi = softmax(theta),  score s(a) = grad_theta log pi(a) = e_a - pi
    J = p = pi(S),  grad J = p u_S,  u_S = E_pi[s | success]

  with S the set of successes. In this package, every gradient is with respect
  to the logits theta and points uphill.

  Raises InputError if a field breaks one of the conditions beside it.
  """

  pi_K: np.ndarray  # f64, the learner's probabilities; they may be 0.
  mu_K: np.ndarray  # f64, the peer's probabilities; they may be 0.
  reward_K: np.ndarray  # f64, 0 or 1; at least one action of each.
  own_samples: int  # G, size of the learner's own group, 1 to 1,000.
  peer_samples: int  # H, size of the peer's group, 0 to 1,000.

  def __post_init__(self):
    reward_K = np.asarray(self.reward_K, np.float64)
    object.__setattr__(self, 'reward_K', reward_K)
    # Not `checks.require`: formatting arrays for messages that nobody sees
    # would take longer than everything else here.
    if reward_K.ndim != 1 or {*reward_K.tolist()} != {0.0, 1.0}:
      raise checks.InputError(
        f'reward_K = {self.reward_K}; it must be a vector that contains 0 and '
        '1, and nothing else'
      )
    for name in ('pi_K', 'mu_K'):
      policy_K = np.asarray(getattr(self, name), np.float64)
      if policy_K.shape != reward_K.shape or not (
        (policy_K >= 0).all() and abs(policy_K.sum() - 1) < _TOLERANCE
      ):
        raise checks.InputError(
          f'{name} = {policy_K}; it must be {len(reward_K)} probabilities, one '
          'for each element of reward_K, that sum to 1'
        )
      object.__setattr__(self, name, policy_K / policy_K.sum())
    for name, least in (('own_samples', 1), ('peer_samples', 0)):
      checks.require(
        least <= getattr(self, name) <= _MOST_SAMPLES,
        f'{name} = {getattr(self, name)}; it must be from {least} to '
        f'{_MOST_SAMPLES:,}',
      )

  @property
  def samples(self) -> int:
    """N = G + H, size of the two groups together."""
    return self.own_samples + self.peer_samples

  @functools.cached_property
  def p(self) -> float:
    """pi(S), the learner's success rate."""
    return min(float(self.pi_K @ self.reward_K), 1.0)

  @functools.cached_property
  def q(self) -> float:
    """mu(S), the peer's success rate."""
    return min(float(self.mu_K @ self.reward_K), 1.0)

  def given(self, policy_K: np.ndarray, reward: int) -> np.ndarray:
    """A policy given success (1) or failure (0), [K]; all 0 if it has none."""
    event_K = self.reward_K == reward
    mass = float(policy_K @ event_K)
    return policy_K * event_K / mass if mass else np.zeros_like(policy_K)

  @functools.cached_property
  def score_KK(self) -> np.ndarray:
    """The scores s(a) = e_a - pi; row a belongs to action a."""
    return np.eye(len(self.pi_K)) - self.pi_K

  @property
  def u_S_K(self) -> np.ndarray:
    """E_pi[s | success] = grad log p; 0 if p is 0."""
    return self.given(self.pi_K, 1) @ self.score_KK

  @property
  def grad_J_K(self) -> np.ndarray:
    """The policy gradient: the gradient of p, which is p u_S."""
    return self.p * self.u_S_K

  @property
  def chi2(self) -> float:
    """The chi-squared divergence of the learner from the peer.

    chi2(pi || mu) = E_mu[(pi / mu)^2] - 1, the variance of the ratio under mu.
    Infinite if the learner takes an action that the peer never takes.
    """
    if np.any((self.pi_K > 0) & (self.mu_K == 0)):
      return np.inf
    ratio_K = density_ratio(self.pi_K, self.mu_K)
    return float(self.mu_K @ ratio_K**2) - 1

  @property
  def rescue(self) -> float:
    """(1 - p)^G (1 - (1 - q)^H): own samples all fail, and a peer's succeeds."""
    peer = 1 - (1 - self.q) ** self.peer_samples
    return (1 - self.p) ** self.own_samples * peer

  def replace(
    self, *, p: float | None = None, q: float | None = None, **attributes
  ) -> 'Problem':
    """A copy with other success rates or other attributes.

      pi' = p pi(. | S) + (1 - p) pi(. | not S), and likewise mu' with q

    Without a rate, the policy stays as it is. Raises InputError if a rate is
    not in [0, 1], or if the policy has no success (or no failure) to which it
    could be given.
    """
    for name, rate, policy in (('p', p, 'pi_K'), ('q', q, 'mu_K')):
      if rate is None:
        continue
      policy_K = getattr(self, policy)
      success_K, failure_K = self.given(policy_K, 1), self.given(policy_K, 0)
      attributes[policy] = rate * success_K + (1 - rate) * failure_K
      checks.require(
        0 <= rate <= 1 and abs(attributes[policy].sum() - 1) < _TOLERANCE,
        f'{name} = {rate}; it must be from 0 to 1, and {policy} a policy that '
        'sometimes succeeds and sometimes fails',
      )
    return dataclasses.replace(self, **attributes)


def density_ratio(pi_K: np.ndarray, mu_K: np.ndarray) -> np.ndarray:
  """The ratio pi / mu; 0 for actions that the peer never takes."""
  return np.divide(pi_K, mu_K, out=np.zeros_like(pi_K + mu_K), where=mu_K > 0)


def text(length: int, peer_first: float, **sizes: int) -> Problem:
  """Responses of T = `length` independent tokens of two kinds, so that K = 2^T.

    pi(y) = prod_t pi(y_t),  1 + chi2(pi || mu) = (1 + chi2 of a token)^T

  At every position the learner chooses either token with probability 1/2, and
  the peer the first with probability `peer_first`. The second moment of the
  ratio of whole responses is exponential in T. Only the first token is right,
  as the last of a text, so that p and q do not depend on T. The score is still
  the bandit's: there is one logit per response. `sizes` are `own_samples` and
  `peer_samples`.
  """
  mu_TV = np.tile([peer_first, 1 - peer_first], (length, 1))
  return Problem(
    pi_K=np.full(2**length, 0.5**length),
    mu_K=functools.reduce(np.kron, mu_TV),
    reward_K=np.tile([1, 0], 2 ** (length - 1)),
    **sizes,
  )
