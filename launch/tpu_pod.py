"""Trains policies together: all in one process, or each on its own machine.

python launch/tpu_pod.py --config=configs/xgrpo.py --config.train.rounds=20

Every key of mrl_jax/config_keys.py is a flag.
"""

import datetime
import os
import pathlib
import sys

from absl import app
from absl import flags
from absl import logging
from ml_collections import config_flags
from rich import console as console_lib

# Config files import the one they start from; they are not installed.
sys.path.insert(0, os.fspath(pathlib.Path(__file__).resolve().parents[1]))

_CONFIG = config_flags.DEFINE_config_file(
  'config', lock_config=True, help_string='A file of configs/.'
)
_WORKDIR = flags.DEFINE_string(
  'workdir',
  None,
  'The folder to write to, by default a new one under runs/. The folder of a '
  'run that was stopped resumes it.',
)


def main(_):
  # Imported after flags are parsed: a mistake in them is reported at once.
  import jax

  from mrl_jax import checks
  from mrl_jax import workdir as workdir_lib
  from mrl_jax.training import job as job_lib
  from mrl_jax.training import loop

  if not flags.FLAGS['verbosity'].present:
    logging.set_verbosity(logging.WARNING)
  config = _CONFIG.value
  workdir = _WORKDIR.value or os.path.join(
    'runs', f'{datetime.datetime.now():%Y%m%d-%H%M%S}-{config.method.name}'
  )
  jax.config.update('jax_num_cpu_devices', config.mwra.emulated_devices)
  jax.config.update(
    'jax_compilation_cache_dir',
    os.path.join(workdir_lib.cache_dir(config, workdir), 'xla'),
  )
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.2)
  console = console_lib.Console()
  try:
    job = job_lib.build(config, workdir)
    try:
      loop.run(job, console)
    finally:  # Also a run that is stopped or fails has a report.
      write_report(workdir, console)
  except checks.InputError as error:
    sys.exit(f'{error}')
  except KeyboardInterrupt:
    sys.exit(f'Interrupted. The same flags with --workdir={workdir} resume.')


def write_report(workdir, console):
  """Writes the page of the run so far, and prints where it is.

  An error is logged, not raised: it must not replace the error of the run.
  """
  from mrl_jax.analysis.report import page

  try:
    path = page.write(workdir)
    console.print(f'Report: {path}', soft_wrap=True, markup=False)
  except Exception:
    logging.exception('launch/report.py may report %s later', workdir)


def parse(argv):
  """Parses flags; reports a mistake in them without a traceback."""
  try:
    rest = app.parse_flags_with_usage(argv)
    _CONFIG.value.keys()  # A file that could not be read fails here.
  except OSError as error:
    sys.exit(f'--config: {str(error).splitlines()[-1].strip()}')
  except (AttributeError, KeyError) as error:
    while isinstance(error.args[0], Exception):
      error = error.args[0]
    sys.exit(f'--config: no such key: {error.args[0]}')
  if len(rest) > 1:
    sys.exit(f'not a flag: {rest[1]!r}; flags are --config.KEY=VALUE')
  return rest


if __name__ == '__main__':
  flags.mark_flag_as_required('config')
  app.run(main, flags_parser=parse)
