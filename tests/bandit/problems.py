"""Problems that the tests of the bandit share."""

import numpy as np

from mrl_jax.bandit import problem as problem_lib

# The score of either action in `small` is a multiple of this.
D_K = np.array([1.0, -1.0])


def problem(
  pi_K, mu_K, reward_K, own_samples, peer_samples
) -> problem_lib.Problem:
  return problem_lib.Problem(
    pi_K=pi_K,
    mu_K=mu_K,
    reward_K=reward_K,
    own_samples=own_samples,
    peer_samples=peer_samples,
  )


def small(own_samples, peer_samples) -> problem_lib.Problem:
  """Two actions; only the first is right.

  p = 1/4 and q = 1/2, so pi / mu is 1/2 and 3/2. With d = (1, -1), s(right) is
  3/4 d and s(wrong) is -1/4 d.
  """
  return problem([0.25, 0.75], [0.5, 0.5], [1, 0], own_samples, peer_samples)


EVEN = problem([0.3, 0.2, 0.2, 0.3], [0.35, 0.3, 0.15, 0.2], [1, 0, 1, 0], 4, 4)
HARD = problem([0.001, 0.499, 0.5], [0.6, 0.2, 0.2], [1, 0, 0], 4, 4)
# The peer never takes the last action.
UNSEEN = problem([0.3, 0.3, 0.4], [0.6, 0.4, 0], [1, 0, 0], 2, 2)


def random(
  rng, most_actions=8, most_samples=6, floor=0.2
) -> problem_lib.Problem:
  """A problem whose K, G, H, policies and rewards are random.

    pi, mu = (1 - floor) Dirichlet(c, ..., c) + floor / K,  log c uniform

  so that some policies are nearly uniform and others have a favourite, and
  pi / mu is at most K / floor.
  """
  K = int(rng.integers(2, most_actions + 1))
  reward_K = rng.permutation(np.arange(K) < rng.integers(1, K)) * 1.0

  def policy():
    concentration = np.exp(rng.uniform(np.log(0.3), np.log(5)))
    drawn_K = rng.dirichlet(np.full(K, concentration))
    return (1 - floor) * drawn_K + floor / K

  pi_K, mu_K = policy(), policy()
  G, H = (int(rng.integers(1, most_samples + 1)) for _ in range(2))
  return problem(pi_K, mu_K, reward_K, G, H)


def several(count=20, seed=0, **settings) -> list[problem_lib.Problem]:
  rng = np.random.default_rng(seed)
  return [random(rng, **settings) for _ in range(count)]


def text(length, own_samples=2, peer_samples=2) -> problem_lib.Problem:
  """A text of two tokens; 1 + chi2 is 1/4 / 0.8 + 1/4 / 0.2 at each position."""
  return problem_lib.text(
    length, 0.8, own_samples=own_samples, peer_samples=peer_samples
  )


def failure_direction(at: problem_lib.Problem) -> np.ndarray:
  """u_F = E_pi[s | failure] = grad log(1 - p), [K]; 0 if p is 1."""
  return at.given(at.pi_K, 0) @ at.score_KK


def same_failures(at: problem_lib.Problem) -> problem_lib.Problem:
  """A peer that fails as the learner does; only its successes differ."""
  success_K, failure_K = at.given(at.mu_K, 1), at.given(at.pi_K, 0)
  return at.replace(mu_K=at.q * success_K + (1 - at.q) * failure_K)
