"""The benchmark of the bandit; see `launch/bench.py`."""

import time

from absl import flags
import numpy as np
from rich import console as console_lib
from rich import table as table_lib

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


def run(console: console_lib.Console) -> dict:
  """The contextual bandit: samples, and closed forms.

  For each method of `methods.METHODS`,

  - 'samples': --groups groups of the learner and of the peer are drawn, and the
    moments of their gradients taken. The goal is 10 s for a million on two
    cores.
  - 'closed form': the exact moments, best of 3.
  """
  rng = np.random.default_rng(0)
  problem = problem_lib.Problem(
    pi_K=rng.dirichlet(np.ones(_ACTIONS.value)),
    mu_K=rng.dirichlet(np.ones(_ACTIONS.value)),
    reward_K=np.arange(_ACTIONS.value) < _ACTIONS.value // 2,
    group=_SAMPLES.value,
    peers=_SAMPLES.value,
  )
  table = table_lib.Table('', 'samples, s', 'closed form, ms')
  sampled, exact = {}, {}
  for name, method in methods.METHODS.items():
    sampled[name] = _seconds(
      lambda simulator=method.simulator: simulate.estimate(
        problem, simulator, _GROUPS.value, rng
      )
    )
    exact[name] = 1e3 * min(
      _seconds(lambda of=method.closed_form: of(problem))
      for _ in range(_BEST_OF)
    )
    table.add_row(name, f'{sampled[name]:.2f}', f'{exact[name]:.2f}')
  console.out(
    f'{_GROUPS.value:,} groups of each method, {_ACTIONS.value} actions, '
    f'{_SAMPLES.value} own samples and as many of the peer'
  )
  console.print(table)
  return {
    'groups': _GROUPS.value,
    'samples_s': sampled,
    'closed_form_ms': exact,
  }


def _seconds(function) -> float:
  start = time.perf_counter()
  function()
  return time.perf_counter() - start
