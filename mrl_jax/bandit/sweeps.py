"""Moments of the methods as one thing varies: the numbers of `figures.py`."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import math

import numpy as np

from mrl_jax import checks
from mrl_jax.bandit import closed_form
from mrl_jax.bandit import methods as methods_lib
from mrl_jax.bandit import problem as problem_lib
from mrl_jax.bandit import simulate

Methods = Mapping[str, methods_lib.Method]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Line:
  """What `closed_form.Moments` tells of one method, at each value.

  Attributes:
    support_X: u_S . E g, of d log p / d eta.
    noise_X: tr Cov g.
    second_X: E |g|^2.
  """

  support_X: np.ndarray
  noise_X: np.ndarray
  second_X: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sweep:
  """Methods as one thing varies.

  Attributes:
    x_X: its values.
    lines: by method.
  """

  x_X: np.ndarray
  lines: Mapping[str, Line]


def prompt(
  p: float, q: float, *, group: int, peers: int
) -> problem_lib.Problem:
  """A prompt with two right answers and four wrong ones.

  Learner and peer prefer different ones, and neither excludes any.

  Args:
    p: how often the learner succeeds.
    q: how often the peer does.
    group: G.
    peers: H.

  Raises:
    InputError: a rate is not between 0 and 1, or a size is wrong.
  """
  for name, rate in (('p', p), ('q', q)):
    checks.require(0 < rate < 1, f'{name} = {rate}; it must be between 0 and 1')
  return problem_lib.Problem(
    pi_K=[0.35, 0.15, 0.225, 0.15, 0.075, 0.05],
    mu_K=[0.2, 0.3, 0.075, 0.1, 0.125, 0.2],
    reward_K=[1, 1, 0, 0, 0, 0],
    group=group,
    peers=peers,
  ).with_rates(p=p, q=q)


def by_learner(
  problem: problem_lib.Problem, p_X: np.ndarray, methods: Methods
) -> Sweep:
  """As the learner's success rate varies."""
  return _sweep(p_X, (problem.with_rates(p=p) for p in p_X), methods)


def simulated(
  problem: problem_lib.Problem,
  methods: Methods,
  rng: np.random.Generator,
  groups: int,
) -> Sweep:
  """The same of samples, at the learner's success rate.

  Args:
    problem: the bandit.
    methods: what is simulated.
    rng: of all samples.
    groups: M, of each method.
  """
  lines = {}
  for name, method in methods.items():
    found = simulate.estimate(problem, method.simulator, groups, rng)
    lines[name] = Line(
      support_X=np.array([problem.u_S_K @ found.mean_K]),
      noise_X=np.array([np.trace(found.covariance_KK)]),
      second_X=np.array([found.second]),
    )
  return Sweep(x_X=np.array([problem.p]), lines=lines)


def by_peer(
  problem: problem_lib.Problem, q_X: np.ndarray, methods: Methods
) -> Sweep:
  """As the peer's success rate varies."""
  return _sweep(q_X, (problem.with_rates(q=q) for q in q_X), methods)


def by_group(
  problem: problem_lib.Problem, group_X: Sequence[int], methods: Methods
) -> Sweep:
  """As G varies."""
  varied = (dataclasses.replace(problem, group=G) for G in group_X)
  return _sweep(group_X, varied, methods)


def by_peers(
  problem: problem_lib.Problem, peers_X: Sequence[int], methods: Methods
) -> Sweep:
  """As H varies."""
  varied = (dataclasses.replace(problem, peers=H) for H in peers_X)
  return _sweep(peers_X, varied, methods)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Divergence(Sweep):
  """As chi2(pi || mu) varies, which is x_X.

  Attributes:
    bound_X: `closed_form.prp_second_moment_bound`, of the peer's part.
  """

  bound_X: np.ndarray


def by_divergence(
  problem: problem_lib.Problem,
  tilt_X: np.ndarray,
  methods: Methods,
  *,
  std: bool = True,
) -> Divergence:
  """As the peer comes to prefer what the learner seldom does.

    mu(a | S) ~ pi(a | S)^(1 - tilt),  the same of failures; q stays.

  Args:
    problem: the bandit; of its peer, only q matters.
    tilt_X: 0 for a peer that differs by q alone.
    methods: what is compared.
    std: of the bound, as the methods have it.
  """
  varied = [tilted(problem, tilt) for tilt in tilt_X]
  chi2_X = np.array([at.chi2 for at in varied])
  bounds = (closed_form.prp_second_moment_bound(at, std=std) for at in varied)
  return Divergence(
    x_X=chi2_X,
    lines=_sweep(chi2_X, varied, methods).lines,
    bound_X=np.array([*bounds]),
  )


def tilted(problem: problem_lib.Problem, tilt: float) -> problem_lib.Problem:
  """The peer of `by_divergence`."""
  kinds = (problem.q, problem.pi_S_K), (1 - problem.q, problem.pi_F_K)
  mu_K = sum(rate * _power(policy_K, 1 - tilt) for rate, policy_K in kinds)
  return dataclasses.replace(problem, mu_K=mu_K)


def _power(policy_K, exponent) -> np.ndarray:
  power_K = np.zeros_like(policy_K)
  np.power(policy_K, exponent, out=power_K, where=policy_K > 0)
  return power_K / power_K.sum()


def by_length(
  lengths_X: Sequence[int],
  *,
  chi2: float,
  group: int,
  peers: int,
  **settings,
) -> Sweep:
  """As texts of two equally probable tokens become longer.

  At every position the learner says either with 1/2, and the peer prefers the
  first; right is what ends with it (`problem.text`). HACPO and GRAFT take their
  ratios a token, of so many tokens.

  Args:
    lengths_X: T; K = 2^T.
    chi2: chi2 of one token; 1 + that of the text is (1 + chi2)^T.
    group: G.
    peers: H.
    **settings: of `methods.compared`, but for its length.
  """
  # 1 + chi2 = 1 / (4 m (1 - m)).
  m = (1 + math.sqrt(1 - 1 / (1 + chi2))) / 2
  moments = []
  for T in lengths_X:
    problem = problem_lib.text(
      np.full((T, 2), 0.5),
      np.tile([m, 1 - m], (T, 1)),
      [1, 0],
      group=group,
      peers=peers,
    )
    compared = methods_lib.compared(length=T, **settings)
    moments.append({n: of.closed_form(problem) for n, of in compared.items()})
  return _lines(lengths_X, moments)


def _sweep(x_X, problems: Iterable, methods: Methods) -> Sweep:
  return _lines(
    x_X,
    [
      {name: method.closed_form(at) for name, method in methods.items()}
      for at in problems
    ],
  )


def _lines(x_X, moments: Sequence[Mapping[str, closed_form.Moments]]) -> Sweep:
  return Sweep(
    x_X=np.asarray(x_X, np.float64),
    lines={
      name: Line(
        support_X=np.array([found[name].support for found in moments]),
        noise_X=np.array([found[name].noise for found in moments]),
        second_X=np.array([found[name].second for found in moments]),
      )
      for name in moments[0]
    },
  )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ContextWeights:
  """How much a prompt counts, by how hard it is: E g = c grad J.

  Attributes:
    p_X: the learner's success rates.
    q_Y: the peer's.
    grpo_X: c of GRPO.
    xgrpo_YX: c of XGRPO.
  """

  p_X: np.ndarray
  q_Y: np.ndarray
  grpo_X: np.ndarray
  xgrpo_YX: np.ndarray


def context_weights(
  problem: problem_lib.Problem,
  p_X: np.ndarray,
  q_Y: np.ndarray,
  *,
  std: bool = True,
) -> ContextWeights:
  """Of GRPO and XGRPO, whose E g has the direction of grad J.

  Args:
    problem: the bandit.
    p_X: above 0.
    q_Y: the peer's success rates.
    std: whether the deviation is divided by.
  """

  def weight(moments):
    grad_K = moments.problem.grad_J_K
    return moments.mean_K @ grad_K / (grad_K @ grad_K)

  varied = [problem.with_rates(p=p) for p in p_X]
  return ContextWeights(
    p_X=np.asarray(p_X),
    q_Y=np.asarray(q_Y),
    grpo_X=np.array([weight(closed_form.grpo(at, std=std)) for at in varied]),
    xgrpo_YX=np.array(
      [
        [
          weight(closed_form.xgrpo(at.with_rates(q=q), std=std))
          for at in varied
        ]
        for q in q_Y
      ]
    ),
  )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Errors:
  """What a wrong ratio does to E g of PRP, without std.

  Attributes:
    x_X: how wrong it may be.
    off: |E g~ - E g|, by how it is wrong.
    bound_X: of all of these.
    deviation_X: sqrt(tr Cov g~) of the first, for comparison.
  """

  x_X: np.ndarray
  off: Mapping[str, np.ndarray]
  bound_X: np.ndarray
  deviation_X: np.ndarray


def by_truncation(
  problem: problem_lib.Problem, max_ratio_X: np.ndarray
) -> Errors:
  """Of PRP truncated at C, beside `closed_form.truncation_bias_bound`."""
  bounds = (closed_form.truncation_bias_bound(problem, C) for C in max_ratio_X)
  return _errors(
    problem,
    max_ratio_X,
    {'truncated': [{'max_ratio': C} for C in max_ratio_X]},
    bounds,
  )


def by_thl_error(
  problem: problem_lib.Problem,
  error_X: np.ndarray,
  rng: np.random.Generator,
) -> Errors:
  """Of log ratios that are off by up to E, beside `closed_form.thl_error_bound`.

  Args:
    problem: the bandit.
    error_X: E, in nats.
    rng: of the errors that are drawn, once for all E.
  """
  sign_K = 2 * problem.reward_K - 1
  shapes = {
    'all by E': np.ones_like(sign_K),
    'successes by E, failures by -E': sign_K,
    'drawn from [-E, E]': rng.uniform(-1, 1, len(sign_K)),
  }
  return _errors(
    problem,
    error_X,
    {
      name: [{'error_K': E * shape_K} for E in error_X]
      for name, shape_K in shapes.items()
    },
    (closed_form.thl_error_bound(problem, E) for E in error_X),
  )


def _errors(problem, x_X, wrong, bounds) -> Errors:
  right_K = closed_form.prp(problem).mean_K
  found = {
    name: [closed_form.prp(problem, **settings) for settings in varied]
    for name, varied in wrong.items()
  }
  return Errors(
    x_X=np.asarray(x_X),
    off={
      name: np.array([np.linalg.norm(m.mean_K - right_K) for m in moments])
      for name, moments in found.items()
    },
    bound_X=np.array([*bounds]),
    deviation_X=np.sqrt([m.noise for m in next(iter(found.values()))]),
  )


def learning(
  problem: problem_lib.Problem,
  methods: Methods,
  *,
  steps: int,
  rate: float,
  seeds: int,
) -> dict[str, simulate.Curves]:
  """`simulate.learn` of each method, with the same seed for all."""
  return {
    name: simulate.learn(
      problem,
      method,
      np.random.default_rng(0),
      steps=steps,
      rate=rate,
      seeds=seeds,
    )
    for name, method in methods.items()
  }
