"""The benchmark of the number of policies; see `launch/bench.py`."""

import contextlib
import itertools
import os
import pathlib
import statistics
import sys
import tempfile

from absl import flags
import bench_job
import bench_tools

# Config files are not installed.
sys.path.insert(0, os.fspath(pathlib.Path(__file__).resolve().parents[1]))

_UP_TO = flags.DEFINE_integer('up_to', 4, 'policies: largest number.', 1)
_PLAYED = flags.DEFINE_integer(
  'played', 3, 'policies: rounds a measurement.', 1
)
_BEST_OF = flags.DEFINE_integer('best_of', 3, 'policies: measurements.', 1)
# A method without exchange, and one that exchanges the rollouts of all peers, or
# of one peer for each prompt.
METHODS = {
  'grpo': {'name': 'grpo'},
  'prp': {'name': 'prp'},
  'prp, one peer': {'name': 'prp', 'max_peer_groups': 1},
}
_COMPILED = 2  # Rounds after which no program is compiled any more.


def run() -> bench_tools.Result:
  """Times rounds of 1 to --up_to equal policies that take turns on one device.

  Every policy is the Llama-like one of configs/base.py with one layer and 8
  prompts a round. Every other rollout is rewarded, whatever it says, so that all
  are trained on. The times are the best of --best_of medians of --played rounds;
  the runs alternate, forwards and backwards.

  'x alone' is 1 if N policies take as long as N policies that run alone. If N
  policies exchange all rollouts, each also trains on those of the N - 1 others:
  sampling grows with N and training with N squared, unless
  method.max_peer_groups bounds it. Their tokenizers are equal, so that THL
  encodes nothing anew.
  """
  # Not before the flags are parsed: a mistake in them is reported at once.
  import jax

  from mrl_jax import bucket
  from mrl_jax.training import job
  from mrl_jax.training import loop
  from mrl_jax.training import progress

  def median(run, rounds):
    return statistics.median(
      bench_tools.seconds(loop.play_round, *run) for _ in range(rounds)
    )

  jax.config.update('jax_num_cpu_devices', 1)
  sizes = range(1, _UP_TO.value + 1)
  runs, best = {}, {}
  with contextlib.ExitStack() as stack:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    jax.config.update('jax_compilation_cache_dir', os.path.join(folder, 'xla'))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)
    for pair in itertools.product(METHODS, sizes):
      config = _config(*pair, os.path.join(folder, 'cache'))
      built = job.build(
        config,
        bucket.WorkDir(os.path.join(folder, '{}-{}'.format(*pair))),
      )
      stack.callback(built.close)
      for worker in built.workers.values():
        worker.judge = bench_job.Alternating()
        worker.start_from()
      runs[pair], best[pair] = (built, progress.Progress()), float('inf')
      median(runs[pair], _COMPILED)
    for turn in range(_BEST_OF.value):
      for pair in [*runs][:: -1 if turn % 2 else 1]:
        best[pair] = min(best[pair], median(runs[pair], _PLAYED.value))
  rows = {f'N = {n}': {} for n in sizes}
  for (method, n), seconds in best.items():
    rows[f'N = {n}'] |= {
      f'{method}, s a round': seconds,
      f'{method}, x alone': seconds / (n * best[method, 1]),
    }
  about = {'measurements': _BEST_OF.value, 'rounds of each': _PLAYED.value}
  return bench_tools.Result(about, rows)


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
  config.cache_dir = cache
  config.warm_start.steps = 0
  config.train.prompts = 8
  config.mwra.time_share = True
  return config
