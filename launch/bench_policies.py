"""The benchmark of more and more policies; see `launch/bench.py`."""

import dataclasses
import itertools
import os
import pathlib
import statistics
import sys
import tempfile
import time

from absl import flags
from rich import console as console_lib
from rich import table as table_lib

from mrl_jax.rewards import functions
from mrl_jax.rewards import verify

# Config files are not installed.
sys.path.insert(0, os.fspath(pathlib.Path(__file__).resolve().parents[1]))

_UP_TO = flags.DEFINE_integer('up_to', 4, 'policies: at most so many.', 1)
_PLAYED = flags.DEFINE_integer('played', 3, 'policies: rounds of a median.', 1)
_BEST_OF = flags.DEFINE_integer('best_of', 3, 'policies: medians.', 1)
# A method without exchange, and one with the whole rollouts of all peers, or of
# one of them for each prompt.
METHODS = {
  'grpo': {'name': 'grpo'},
  'prp': {'name': 'prp'},
  'prp, one peer': {'name': 'prp', 'max_peer_groups': 1},
}
_COMPILED = 2  # Rounds after which nothing is compiled any more.


def run(console: console_lib.Console) -> dict:
  """Rounds of 1 to --up_to equal policies that take turns on one device.

  Each is the Llama-like one of configs/base.py, with one layer and 8 prompts a
  round. Every other rollout is rewarded, whatever it says, so that all of them
  are trained on. Given is the best of --best_of medians of --played rounds; the
  runs take turns, forwards and backwards.

  'x alone' is 1 where N policies take as long as N that are alone. Of N that
  exchange all rollouts each also trains on those of the N - 1 others: sampling
  grows with N, and training with its square, unless method.max_peer_groups
  bounds it. Their tokenizers are equal, so that THL encodes nothing anew.
  """
  # Not before the flags are parsed: a mistake in them is reported at once.
  import jax

  jax.config.update('jax_num_cpu_devices', 1)
  sizes = range(1, _UP_TO.value + 1)
  pairs = [*itertools.product(METHODS, sizes)]
  best = dict.fromkeys(pairs, float('inf'))
  with tempfile.TemporaryDirectory() as folder:
    jax.config.update('jax_compilation_cache_dir', os.path.join(folder, 'xla'))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)
    runs = {pair: _Run(*pair, folder) for pair in pairs}
    for turn in range(_BEST_OF.value):
      for pair in pairs[:: -1 if turn % 2 else 1]:
        best[pair] = min(best[pair], runs[pair].seconds(_PLAYED.value))
    for played in runs.values():
      played.close()
  table = table_lib.Table('policies')
  for method in METHODS:
    table.add_column(f'{method}, s a round', justify='right')
    table.add_column('x alone', justify='right')
  figures = {method: {} for method in METHODS}
  for n in sizes:
    row = []
    for method in METHODS:
      seconds = best[method, n]
      ratio = seconds / (n * best[method, 1])
      figures[method][n] = {'s_a_round': seconds, 'x_alone': ratio}
      row += [f'{seconds:.3f}', f'{ratio:.2f}']
    table.add_row(str(n), *row)
  console.print(table)
  return figures


class _InTurn(functions.Judge):
  """Rewards every other completion, so that there is something to learn."""

  def __init__(self):
    super().__init__(verify.Exact(marker='='), weights={})
    self._turns = itertools.count()

  def judge_all(self, completions):
    return [(float(next(self._turns) % 2), 'correct') for _ in completions]


class _Run:
  """A run that has compiled what it needs."""

  def __init__(self, method, policies, folder):
    from mrl_jax.training import job
    from mrl_jax.training import progress

    name = f'{method}-{policies}'
    config = _config(method, policies, os.path.join(folder, 'cache'))
    self._job = dataclasses.replace(
      job.build(config, os.path.join(folder, name)), judge=_InTurn()
    )
    for worker in self._job.workers.values():
      worker.start_from()
    self._progress = progress.Progress()
    self.seconds(_COMPILED)

  def seconds(self, rounds) -> float:
    """The median of the times of so many rounds."""
    from mrl_jax.training import loop

    taken = []
    for _ in range(rounds):
      start = time.perf_counter()
      loop.play_round(self._job, self._progress)
      taken.append(time.perf_counter() - start)
    return statistics.median(taken)

  def close(self):
    self._job.node.close()


def _config(method, policies, cache):
  import ml_collections

  from configs import base

  config = base.get_config()
  config.method.update(METHODS[method])
  config.policies.llama.model.num_layers = 1
  config.policies = ml_collections.ConfigDict(
    {
      f'policy{i}': config.policies.llama.copy_and_resolve_references()
      for i in range(policies)
    }
  )
  config.see.peers = base.peers(config.policies)
  config.cache_dir = cache
  config.warm_start.steps = 0
  config.train.prompts = 8
  config.mwra.time_share = True
  return config
