"""Prompts that tests of the bandit are about."""

import dataclasses

import numpy as np

from mrl_jax.bandit import problem as problem_lib

# Two actions, of which the first is right; p = 1/4, q = 1/2. With d = (1, -1),
# s(right) = 3/4 d and s(wrong) = -1/4 d; pi / mu is 1/2 and 3/2.
D_K = np.array([1.0, -1.0])


def problem(pi_K, mu_K, reward_K, group, peers) -> problem_lib.Problem:
  return problem_lib.Problem(
    pi_K=pi_K, mu_K=mu_K, reward_K=reward_K, group=group, peers=peers
  )


def small(group, peers) -> problem_lib.Problem:
  return problem([0.25, 0.75], [0.5, 0.5], [1, 0], group, peers)


EVEN = problem([0.3, 0.2, 0.2, 0.3], [0.35, 0.3, 0.15, 0.2], [1, 0, 1, 0], 4, 4)
HARD = problem([0.001, 0.499, 0.5], [0.6, 0.2, 0.2], [1, 0, 0], 4, 4)
# The last action is the learner's alone.
UNSEEN = problem([0.3, 0.3, 0.4], [0.6, 0.4, 0], [1, 0, 0], 2, 2)


def several(count=40, seed=0, **settings) -> list[problem_lib.Problem]:
  rng = np.random.default_rng(seed)
  return [problem_lib.random(rng, **settings) for _ in range(count)]


def text(length, group=2, peers=2) -> problem_lib.Problem:
  """Of every token, 1 + chi2 is 1/4 / 0.8 + 1/4 / 0.2."""
  pi_TV, mu_TV = np.full((length, 2), 0.5), np.tile([0.8, 0.2], (length, 1))
  return problem_lib.text(pi_TV, mu_TV, [1, 0], group=group, peers=peers)


def same_failures(at: problem_lib.Problem) -> problem_lib.Problem:
  """The peer fails as the learner does: successes alone tell them apart."""
  return dataclasses.replace(at, mu_K=at.q * at.mu_S_K + (1 - at.q) * at.pi_F_K)
