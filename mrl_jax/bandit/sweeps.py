"""The numbers of the figures: moments of methods as one quantity varies."""

from collections.abc import Mapping, Sequence
import functools
import math
from typing import NamedTuple

import numpy as np

from mrl_jax.bandit import closed_form
from mrl_jax.bandit import estimators
from mrl_jax.bandit import methods as methods_lib
from mrl_jax.bandit import problem as problem_lib
from mrl_jax.bandit import simulate

Methods = Mapping[str, estimators.Estimator]


def prompt(p: float, q: float, **sizes: int) -> problem_lib.Problem:
  """The prompt of the figures: two right responses and four wrong ones.

  Learner and peer prefer different responses. Raises InputError if a success
  rate, p of the learner and q of the peer, or a group size is out of range;
  `sizes` are `own_samples` and `peer_samples`.
  """
  return problem_lib.Problem(
    pi_K=[0.35, 0.15, 0.225, 0.15, 0.075, 0.05],
    mu_K=[0.2, 0.3, 0.075, 0.1, 0.125, 0.2],
    reward_K=[1, 1, 0, 0, 0, 0],
    **sizes,
  ).replace(p=p, q=q)


class Sweep(NamedTuple):
  """Moments of methods as one quantity varies."""

  x_X: np.ndarray  # f64, values of the quantity.
  moments: Mapping[str, Sequence[closed_form.Moments]]  # X by method.
  bound_X: np.ndarray | None = None  # On a quantity that the sweep names.

  def curves(self, attribute: str) -> dict[str, np.ndarray]:
    """An attribute of `Moments` by method, f64 [X] each."""
    return {
      name: np.array([getattr(moments, attribute) for moments in of_method])
      for name, of_method in self.moments.items()
    }

  def distances(self) -> dict[str, np.ndarray]:
    """|E g - E g of the first method|, by other method, f64 [X] each."""
    (_, first_XK), *others = self.curves('mean_K').items()
    return {
      name: np.array([*map(np.linalg.norm, mean_XK - first_XK)])
      for name, mean_XK in others
    }


def _sweep(
  x_X: Sequence[float],
  cases: Sequence[tuple[problem_lib.Problem, Methods]],
  bounds: Sequence[float] | None = None,
  moments=closed_form.moments,
) -> Sweep:
  """The moments of X problems, each with its own settings of the methods."""
  by_method = {
    name: [moments(at, methods[name]) for at, methods in cases]
    for name in cases[0][1]
  }
  bound_X = None if bounds is None else np.array(bounds)
  return Sweep(np.asarray(x_X, np.float64), by_method, bound_X)


def vary(problem: problem_lib.Problem, methods: Methods, **varied) -> Sweep:
  """The methods as one property of the problem varies.

    vary(problem, methods, p=[0.01, 0.1])

  `varied` is one argument of `Problem.replace`, with its values.
  """
  ((name, values),) = varied.items()
  cases = [(problem.replace(**{name: value}), methods) for value in values]
  return _sweep(values, cases)


def simulated(
  problem: problem_lib.Problem,
  methods: Methods,
  rng: np.random.Generator,
  groups: int,
) -> Sweep:
  """Simulated moments of the methods, at the problem's p only.

  Own and peer groups, `groups` of each, are sampled anew for each method.
  """
  estimate = functools.partial(simulate.estimate, groups=groups, rng=rng)
  return _sweep([problem.p], [(problem, methods)], moments=estimate)


def by_divergence(
  problem: problem_lib.Problem,
  tilt_X: Sequence[float],
  methods: Methods,
  *,
  std: bool = True,
) -> Sweep:
  """The methods as the peer is `tilted` to what the learner seldom does.

  x_X is chi2(pi || mu), and `bound_X` is `prp_second_moment_bound`, which is
  for the peer's term of PRP. `std` says whether the methods, and so the bound,
  divide by the standard deviation.
  """
  varied = [tilted(problem, tilt) for tilt in tilt_X]
  bounds = [closed_form.prp_second_moment_bound(at, std=std) for at in varied]
  cases = [(at, methods) for at in varied]
  return _sweep([at.chi2 for at in varied], cases, bounds)


def tilted(problem: problem_lib.Problem, tilt: float) -> problem_lib.Problem:
  """A problem whose peer inverts the learner's preferences; q stays.

    mu(a | S) ~ pi(a | S)^(1 - tilt), and likewise given failure

  A tilt of 0 is a peer that differs from the learner by q only.
  """
  mu_K = np.zeros_like(problem.mu_K)
  for reward, chance in ((1, problem.q), (0, 1 - problem.q)):
    given_K = problem.given(problem.pi_K, reward)
    power_K = np.zeros_like(given_K)
    np.power(given_K, 1 - tilt, out=power_K, where=given_K > 0)
    mu_K += chance * (power_K / power_K.sum())
  return problem.replace(mu_K=mu_K)


def by_length(
  lengths_X: Sequence[int],
  *,
  chi2: float,
  own_samples: int,
  peer_samples: int,
  **settings,
) -> Sweep:
  """The compared methods as responses, those of `problem.text`, become longer.

  Their length T is also L of HACPO and GRAFT. `chi2` is that of each position;
  1 + that of the text is (1 + chi2)^T. `settings` are those of
  `methods.compared`, except its length.
  """
  # A peer that chooses the first token with probability m has, per token,
  # 1 + chi2 = 1/4 / m + 1/4 / (1 - m) = 1 / (4 m (1 - m)).
  m = (1 + math.sqrt(1 - 1 / (1 + chi2))) / 2
  texts = [
    problem_lib.text(T, m, own_samples=own_samples, peer_samples=peer_samples)
    for T in lengths_X
  ]
  methods = [methods_lib.compared(length=T, **settings) for T in lengths_X]
  return _sweep(lengths_X, [*zip(texts, methods, strict=True)])


def context_weights(
  problem: problem_lib.Problem,
  p_X: Sequence[float],
  qs: Sequence[float],
  *,
  std: bool = True,
) -> Sweep:
  """GRPO, and XGRPO for success rates `qs` of the peer, as p > 0 varies.

  Their E g is c grad J; the curves of interest are those of `context_weight`.
  `std` says whether advantages are divided by the standard deviation.
  """
  moments = vary(problem, {'GRPO': estimators.Grpo(std=std)}, p=p_X).moments
  for q in qs:
    method = {f'XGRPO, q = {q:g}': estimators.Xgrpo(std=std)}
    moments |= vary(problem.replace(q=q), method, p=p_X).moments
  return Sweep(np.asarray(p_X), moments)


def by_truncation(
  problem: problem_lib.Problem, max_ratio_X: Sequence[float]
) -> Sweep:
  """PRP without std, exact and truncated at C, which varies.

  `bound_X` is `truncation_bias_bound`, of the distance of the two.
  """
  exact, bound = estimators.Prp(), closed_form.truncation_bias_bound
  cases = [
    (problem, {'exact': exact, 'truncated': estimators.Prp(max_ratio=C)})
    for C in max_ratio_X
  ]
  return _sweep(max_ratio_X, cases, [bound(problem, C) for C in max_ratio_X])


def by_thl_error(
  problem: problem_lib.Problem,
  error_X: Sequence[float],
  rng: np.random.Generator,
) -> Sweep:
  """PRP without std, exact and with log ratios that are off by up to E nats.

  E varies, and the random errors are drawn once for all E. `bound_X` is
  `thl_error_bound`, of the distance of each kind of error from the exact PRP.
  """
  sign_K = 2 * problem.reward_K - 1
  kinds = {
    'exact': np.zeros_like(sign_K),
    'all by E': np.ones_like(sign_K),
    'successes by E, failures by -E': sign_K,
    'drawn from [-E, E]': rng.uniform(-1, 1, len(sign_K)),
  }
  cases = [
    (problem, {n: estimators.Prp(error_K=E * k_K) for n, k_K in kinds.items()})
    for E in error_X
  ]
  bounds = [closed_form.thl_error_bound(problem, E) for E in error_X]
  return _sweep(error_X, cases, bounds)
