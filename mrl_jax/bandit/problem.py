"""A prompt as a bandit: what a learner and a peer answer, and what is right."""

import dataclasses
import functools

import numpy as np

from mrl_jax import checks

# The binomial coefficients of larger groups have no float.
_MOST_SAMPLES = 1000
_TOLERANCE = 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
  """A prompt with K possible responses, a learner and a peer.

    pi = softmax(theta),  score s(a) = grad_theta log pi(a) = e_a - pi
    J = p = pi(S),  grad J = p u_S,  u_S = E_pi[s | success]

  with S the successes. Gradients, here and in all of the package, are with
  respect to the logits theta, and are to be ascended.

  Attributes:
    pi_K: f64, the learner's probabilities; they may be 0.
    mu_K: f64, the peer's.
    reward_K: f64, 0 or 1; at least one action of each.
    group: G, samples of the learner's own.
    peers: H, samples of the peer; may be 0.

  Raises:
    InputError: an attribute is not as said.
  """

  pi_K: np.ndarray
  mu_K: np.ndarray
  reward_K: np.ndarray
  group: int
  peers: int

  def __post_init__(self):
    reward_K = np.asarray(self.reward_K, np.float64)
    # `checks.require` would have numpy write every row, which takes longer than
    # all else here.
    if reward_K.ndim != 1 or {*reward_K.tolist()} != {0.0, 1.0}:
      raise checks.InputError(
        f'reward_K = {self.reward_K}; it is a row of 0 and 1, and has both'
      )
    object.__setattr__(self, 'reward_K', reward_K)
    for name in ('pi_K', 'mu_K'):
      object.__setattr__(self, name, self._distribution(name))
    for name, least in (('group', 1), ('peers', 0)):
      checks.require(
        least <= getattr(self, name) <= _MOST_SAMPLES,
        f'{name} = {getattr(self, name)}; it must be from {least} to '
        f'{_MOST_SAMPLES:,}',
      )

  def _distribution(self, name):
    given_K = np.asarray(getattr(self, name), np.float64)
    checks.require(
      given_K.shape == self.reward_K.shape,
      f'{name} has shape {given_K.shape}; reward_K has {self.reward_K.shape}',
    )
    if not ((given_K >= 0).all() and abs(given_K.sum() - 1) < _TOLERANCE):
      raise checks.InputError(
        f'{name} = {given_K}; probabilities are at least 0 and their sum is 1'
      )
    return given_K / given_K.sum()

  @property
  def pooled(self) -> int:
    """N = G + H."""
    return self.group + self.peers

  @functools.cached_property
  def p(self) -> float:
    """pi(S): how often the learner succeeds."""
    return min(float(self.pi_K @ self.reward_K), 1.0)

  @functools.cached_property
  def q(self) -> float:
    """mu(S): how often the peer succeeds."""
    return min(float(self.mu_K @ self.reward_K), 1.0)

  @property
  def pi_S_K(self) -> np.ndarray:
    """The learner's successes, pi(a | S); 0 where p is 0."""
    return given(self.pi_K, self.reward_K)

  @property
  def pi_F_K(self) -> np.ndarray:
    """The learner's failures, pi(a | not S); 0 where p is 1."""
    return given(self.pi_K, 1 - self.reward_K)

  @property
  def mu_S_K(self) -> np.ndarray:
    """The peer's successes, mu(a | S); 0 where q is 0."""
    return given(self.mu_K, self.reward_K)

  @property
  def mu_F_K(self) -> np.ndarray:
    """The peer's failures, mu(a | not S); 0 where q is 1."""
    return given(self.mu_K, 1 - self.reward_K)

  @functools.cached_property
  def score_KK(self) -> np.ndarray:
    """s(a) = e_a - pi, a row for each action a."""
    return np.eye(len(self.pi_K)) - self.pi_K

  @property
  def u_S_K(self) -> np.ndarray:
    """E_pi[s | success] = grad log p; 0 where p is 0."""
    return self.pi_S_K @ self.score_KK

  @property
  def u_F_K(self) -> np.ndarray:
    """E_pi[s | failure] = grad log(1 - p); 0 where p is 1."""
    return self.pi_F_K @ self.score_KK

  @property
  def grad_J_K(self) -> np.ndarray:
    """The gradient of p: p u_S."""
    return self.p * self.u_S_K

  @property
  def chi2(self) -> float:
    """How far the ratio is from 1: E_mu[(pi / mu)^2] - 1.

    chi2(pi || mu). Infinite where the learner does what the peer never does.
    """
    if np.any((self.pi_K > 0) & (self.mu_K == 0)):
      return np.inf
    ratio_K = density_ratio(self.pi_K, self.mu_K)
    return float(self.mu_K @ ratio_K**2) - 1

  @property
  def rescue(self) -> float:
    """P(the whole group fails, and the peer's does not).

    (1 - p)^G (1 - (1 - q)^H)
    """
    peer = 1 - (1 - self.q) ** self.peers
    return (1 - self.p) ** self.group * peer

  def with_rates(
    self, p: float | None = None, q: float | None = None
  ) -> 'Problem':
    """The same, but for how often each succeeds.

      pi' = p pi(. | S) + (1 - p) pi(. | not S)

    Args:
      p: of the learner; None leaves it.
      q: of the peer; None leaves it.

    Raises:
      InputError: a rate is not in [0, 1], or a policy that never succeeds (or
        never fails) is to.
    """
    pi_K, mu_K = self.pi_K, self.mu_K
    if p is not None:
      pi_K = _mixture('p', p, self.pi_S_K, self.pi_F_K)
    if q is not None:
      mu_K = _mixture('q', q, self.mu_S_K, self.mu_F_K)
    return dataclasses.replace(self, pi_K=pi_K, mu_K=mu_K)


def density_ratio(pi_K: np.ndarray, mu_K: np.ndarray) -> np.ndarray:
  """The ratio pi / mu, and 0 where the peer never samples."""
  return np.divide(pi_K, mu_K, out=np.zeros_like(pi_K + mu_K), where=mu_K > 0)


def random(
  rng: np.random.Generator,
  *,
  most_actions: int = 8,
  most_group: int = 6,
  most_peers: int = 6,
  floor: float = 0.2,
) -> Problem:
  """A problem whose K, G, H, pi, mu and rewards are drawn.

    pi, mu = (1 - floor) Dirichlet(c, ..., c) + floor / K

  with log c uniform, so that some policies are nearly uniform and others have
  a favourite.

  Args:
    rng: of all draws.
    most_actions: K is from 2 to this.
    most_group: G is from 1 to this.
    most_peers: H is from 1 to this.
    floor: what is spread evenly; it bounds pi / mu by K / floor, and thereby
      the tails of what is simulated.
  """
  actions = int(rng.integers(2, most_actions + 1))
  reward_K = rng.permutation(
    np.arange(actions) < rng.integers(1, actions)
  ).astype(np.float64)

  def policy():
    spread = np.exp(rng.uniform(np.log(0.3), np.log(5)))
    drawn_K = rng.dirichlet(np.full(actions, spread))
    return (1 - floor) * drawn_K + floor / actions

  return Problem(
    pi_K=policy(),
    mu_K=policy(),
    reward_K=reward_K,
    group=int(rng.integers(1, most_group + 1)),
    peers=int(rng.integers(1, most_peers + 1)),
  )


def text(
  pi_TV: np.ndarray,
  mu_TV: np.ndarray,
  reward_V: np.ndarray,
  *,
  group: int,
  peers: int,
) -> Problem:
  """Responses of T tokens that are drawn independently; K = V^T.

    pi(y) = prod_t pi_t(y_t),  1 + chi2(pi || mu) = prod_t (1 + chi2_t)

  so that the second moment of the ratio of whole responses is exponential in T.
  What is rewarded is the last token, whose chances do not change with T. The
  score is still that of the bandit, whose logits are those of responses.

  Args:
    pi_TV: f64, the learner's probabilities of each token.
    mu_TV: f64, the peer's.
    reward_V: 0 or 1, by the last token.
    group: G.
    peers: H.
  """
  pi_TV, mu_TV = np.asarray(pi_TV), np.asarray(mu_TV)
  earlier = pi_TV.shape[1] ** (len(pi_TV) - 1)
  return Problem(
    pi_K=functools.reduce(np.kron, pi_TV),
    mu_K=functools.reduce(np.kron, mu_TV),
    reward_K=np.tile(reward_V, earlier),
    group=group,
    peers=peers,
  )


def given(policy_K: np.ndarray, kind_K: np.ndarray) -> np.ndarray:
  """The policy given that an action is of a kind; 0 if none ever is.

  Args:
    policy_K: probabilities.
    kind_K: 1 for the actions of that kind, 0 for others.
  """
  mass = float(policy_K @ kind_K)
  return policy_K * kind_K / mass if mass else np.zeros_like(policy_K)


def _mixture(name, rate, success_K, failure_K):
  checks.require(0 <= rate <= 1, f'{name} = {rate}; it must be from 0 to 1')
  mixed_K = rate * success_K + (1 - rate) * failure_K
  checks.require(
    abs(mixed_K.sum() - 1) < _TOLERANCE,
    f'{name} = {rate}, but the policy has no such actions to give it to',
  )
  return mixed_K
