"""Measures the time or memory of one part of mrl_jax on this machine.

python launch/bench.py thl --json=thl.json
python launch/bench.py see --response=4096
python launch/bench.py policies --up_to=3
python launch/bench.py sampler --batch=64
python launch/bench.py update --mean=64
python launch/bench.py round --repeat=3
python launch/bench.py memory --chunk=512
python launch/bench.py bandit --groups=100000
python launch/bench.py verify --hostile=0.02
python launch/bench.py scale --peers=7
"""

from importlib import metadata
import json
import os
import platform
import sys

from absl import app
from absl import flags
from absl import logging
import bench_bandit
import bench_memory
import bench_policies
import bench_round
import bench_sampler
import bench_scale
import bench_see
import bench_thl
import bench_update
import bench_verify
from rich import console as console_lib

from mrl_jax import checks
from mrl_jax import files
from mrl_jax.training import display

_JSON = flags.DEFINE_string('json', None, 'A file to write the figures to.')
_LIBRARIES = (
  *('numpy', 'jax', 'msgspec', 'grpcio', 'tokenizers'),
  *('google-tunix', 'torch', 'trl'),
)
BENCHMARKS = {
  'thl': bench_thl.run,
  'see': bench_see.run,
  'policies': bench_policies.run,
  'sampler': bench_sampler.run,
  'update': bench_update.run,
  'round': bench_round.run,
  'memory': bench_memory.run,
  'bandit': bench_bandit.run,
  'verify': bench_verify.run,
  'scale': bench_scale.run,
}


def _versions() -> str:
  installed = {d.name: d.version for d in metadata.distributions()}
  libraries = [f'{n} {installed[n]}' for n in _LIBRARIES if n in installed]
  python = f'Python {platform.python_version()}'
  cpus = f'{os.cpu_count()} CPUs'
  return ', '.join([platform.platform(), cpus, python, *libraries])


def _shown(x: float) -> str:
  return f'{x:,.0f}' if x >= 100 else f'{x:.3g}'


def main(argv):
  if len(argv) != 2:
    sys.exit(f'name a benchmark; known: {", ".join(BENCHMARKS)}')
  logging.set_verbosity(logging.WARNING)
  console = console_lib.Console()
  try:
    benchmark = checks.choose(argv[1], BENCHMARKS, 'benchmark')
    machine = _versions()
    console.out(machine, highlight=False)
    result = benchmark()
    about = [f'{_shown(n)} {what}' for what, n in result.about.items()]
    columns = ['', *next(iter(result.rows.values()))]
    rows = [[n, *map(_shown, row.values())] for n, row in result.rows.items()]
    console.out(', '.join(about), highlight=False)
    console.print(display.table('', columns, rows, left=columns[:1]))
    if _JSON.value:
      figures = {'machine': machine, argv[1]: result._asdict()}
      files.write(_JSON.value, json.dumps(figures, indent=2) + '\n')
  except (checks.InputError, OSError) as error:
    sys.exit(f'{error}')


if __name__ == '__main__':
  app.run(main)
