"""The benchmark of the bandit analysis; see `launch/bench.py`."""

from absl import flags
import bench_tools
import numpy as np

from mrl_jax.bandit import closed_form
from mrl_jax.bandit import methods
from mrl_jax.bandit import problem as problem_lib
from mrl_jax.bandit import simulate

_GROUPS = flags.DEFINE_integer(
  'groups', 1_000_000, 'bandit: groups of each method, a multiple of 4.', 4
)
_ACTIONS = flags.DEFINE_integer('actions', 8, 'bandit: responses, K.', 2)
_SAMPLES = flags.DEFINE_integer(
  'samples', 8, 'bandit: samples of a group, G and H.', 1, 1000
)
_BEST_OF = 3


def run() -> bench_tools.Result:
  """Times the contextual bandit: simulation and closed forms.

  For each method of `methods.METHODS`,

  - 'samples': seconds to sample --groups own and peer groups and to estimate
    the moments of their gradients. The goal is 10 s for a million groups on two
    cores.
  - 'closed form': milliseconds to compute the exact moments, best of 3.
  """
  rng = np.random.default_rng(0)
  actions, samples, groups = _ACTIONS.value, _SAMPLES.value, _GROUPS.value
  problem = problem_lib.Problem(
    pi_K=rng.dirichlet(np.ones(actions)),
    mu_K=rng.dirichlet(np.ones(actions)),
    reward_K=np.arange(actions) < actions // 2,
    own_samples=samples,
    peer_samples=samples,
  )
  rows = {}
  for name, method in methods.METHODS.items():
    sampled = bench_tools.seconds(
      simulate.estimate, problem, method, groups, rng
    )
    exact = min(
      bench_tools.seconds(closed_form.moments, problem, method)
      for _ in range(_BEST_OF)
    )
    rows[name] = {'samples, s': sampled, 'closed form, ms': 1e3 * exact}
  about = {'groups of each method': groups, 'actions': actions,
           'own samples': samples, 'peer samples': samples}  # fmt: skip
  return bench_tools.Result(about, rows)
