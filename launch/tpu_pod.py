"""Trains policies together: all in one process, or each on its own machine.

python launch/tpu_pod.py --config=configs/xgrpo.py --config.train.rounds=20

Every key of mrl_jax/config_keys.py is a flag.
"""

from collections.abc import Callable
import datetime
import os
import pathlib
import shlex
import sys
import threading
import traceback
from typing import NoReturn

from absl import app
from absl import flags
from absl import logging
from ml_collections import config_flags
from rich import console as console_lib

# Config files import the one they start from; they are not installed.
sys.path.insert(0, os.fspath(pathlib.Path(__file__).resolve().parents[1]))

CONFIG = config_flags.DEFINE_config_file(
  'config', lock_config=True, help_string='A file of configs/.'
)
_WORKDIR = flags.DEFINE_string(
  'workdir',
  None,
  'The folder to write to, by default a new one under runs/. The folder of a '
  'run that was stopped resumes it.',
)
_PRINT_COMMANDS = flags.DEFINE_bool(
  'print_commands',
  False,
  'Plan every policy on a TPU slice of its own, and print the commands that '
  'make the slices and train there, with --workdir=gs://BUCKET/RUN.',
)
_SLICE = flags.DEFINE_multi_string(
  'slice', [], 'For them: POLICY=GENERATION:SHAPE@ZONE, for each policy.'
)
_PROJECT = flags.DEFINE_string('project', None, 'For them: the cloud project.')
_SPOT = flags.DEFINE_bool('spot', False, 'For them: ask for spot capacity.')


def main(_):
  # Imported after flags are parsed: a mistake in them is reported at once.
  import jax

  from mrl_jax import bucket
  from mrl_jax import checks
  from mrl_jax import cluster
  from mrl_jax import config as config_lib
  from mrl_jax import files
  from mrl_jax import workdir as workdir_lib
  from mrl_jax.training import job as job_lib
  from mrl_jax.training import loop
  from mrl_jax.training import stopping

  if not flags.FLAGS['verbosity'].present:
    logging.set_verbosity(logging.WARNING)
  config = CONFIG.value
  if _PRINT_COMMANDS.value:
    print_commands(config)
    return
  devices = config_lib.settle_devices(config)
  jax.config.update('jax_num_cpu_devices', devices)
  try:
    cluster.start(config.cluster)
    began = cluster.decided(
      'the name of the work dir',
      lambda: f'{datetime.datetime.now():%Y%m%d-%H%M%S}-{config.method.name}',
    )
    workdir = _WORKDIR.value or os.path.join('runs', began)
    home = bucket.WorkDir(workdir)
  except (checks.InputError, cluster.LostHostError) as error:
    fail(f'{error}')
  jax.config.update(
    'jax_compilation_cache_dir',
    os.path.join(workdir_lib.cache_dir(config, workdir), 'xla'),
  )
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
  console = console_lib.Console(quiet=not cluster.leads())

  def end(has_time):
    if not cluster.leads():
      return
    if has_time:
      write_report(home, console)
    console.show_cursor()
    print(f'Stopped. {how_to_resume(workdir)}', file=sys.stderr, flush=True)

  stop = stopping.Stop()
  stop.listen(config.checkpoint.stop_s, end)
  silence(files.no_room)
  try:
    job = job_lib.build(config, home)
    try:
      loop.run(job, console, stop)
    finally:  # Also a run that is stopped or fails has a report.
      if cluster.leads():
        write_report(home, console)
  except (checks.InputError, cluster.LostHostError) as error:
    fail(f'{error}')
  except KeyboardInterrupt:
    end(has_time=False)
    cluster.leave(stopping.EXIT)
  except Exception as error:
    reason = files.no_room(error)
    if reason is not None:
      fail(
        f'{workdir} cannot be written: {reason}. Make room, then go on. '
        f'{how_to_resume(workdir)}'
      )
    if cluster.size() == 1:
      raise
    traceback.print_exc()
    cluster.leave(1)


def print_commands(config):
  """Prints the commands that train on Cloud TPU, if every policy fits there."""
  from mrl_jax import checks
  from mrl_jax import config as config_lib
  from mrl_jax.mwra import cloud as cloud_lib
  from mrl_jax.mwra import commands
  from mrl_jax.training import proof

  flag, root = flags.FLAGS['config'], pathlib.Path(__file__).parents[1]
  path, *argument = config_flags.get_config_filename(flag).split(':')
  path = os.path.relpath(path, root)
  given = config_flags.get_override_values(flag)
  try:
    config_lib.check(config)
    checks.require(
      path.partition(os.sep)[0] in commands.CODE,
      f'--config={path}; workers get {", ".join(commands.CODE)} of {root.name}: '
      'put it into one of them',
    )
    cloud = cloud_lib.Cloud(
      project=_PROJECT.value or '',
      folder=_WORKDIR.value or '',
      slices=cloud_lib.parse_slices(_SLICE.value),
      spot=_SPOT.value,
    )
    steps = commands.steps(config, ':'.join([path, *argument]), given, cloud)
    notes = []
    for name, slice_ in cloud.slices.items():
      part = proof.alone(config, name, slice_.topology)
      notes.append(
        f'{name} on {slice_.topology}: {part.cost.peak_bytes / 2**30:.1f} GiB of '
        f'each of {len(part.devices)} chips, by the plan'
      )
  except (checks.InputError, OSError) as error:
    sys.exit(f'{error}')
  print(commands.script(steps, notes), end='')


def fail(message: str) -> NoReturn:
  """Ends this process with an error message."""
  from mrl_jax import cluster

  if cluster.size() == 1:
    sys.exit(message)
  print(message, file=sys.stderr)
  cluster.leave(1)


def how_to_resume(workdir: str) -> str:
  """Says what was saved last, and gives the command that goes on from there."""
  from mrl_jax import workdir as workdir_lib
  from mrl_jax.update import checkpoint

  rounds = checkpoint.newest(os.path.join(workdir, workdir_lib.CHECKPOINTS))
  saved = (
    'No checkpoint was written yet'
    if rounds is None
    else f'The last checkpoint is of round {rounds}'
  )
  given = [] if _WORKDIR.value else [f'--workdir={workdir}']
  command = shlex.join(['python', *sys.argv, *given])
  return f'{saved}. This resumes the run:\n  {command}'


def silence(is_known: Callable[[BaseException | None], object]) -> None:
  """Hides tracebacks of known errors, but the one that ends the main thread.

  They are printed by threads, by the log and at exit. All of them follow from an
  error that the main thread gets too, and explains.
  """

  def is_hidden(error):
    # Of many writes of orbax, the first that fails closes the loop of the others.
    # A signal may interrupt what Python cannot stop, such as the end of an object.
    return (
      is_known(error)
      or isinstance(error, KeyboardInterrupt)
      or 'Event loop is closed' in str(error)
    )

  def unless_hidden(show, error_of):
    return lambda *args: None if is_hidden(error_of(*args)) else show(*args)

  sys.excepthook = unless_hidden(sys.excepthook, lambda _, error, __: error)
  threading.excepthook = unless_hidden(
    threading.excepthook, lambda args: args.exc_value
  )
  sys.unraisablehook = unless_hidden(
    sys.unraisablehook, lambda args: args.exc_value
  )
  logging.get_absl_handler().addFilter(
    lambda record: not (record.exc_info and is_hidden(record.exc_info[1]))
  )


def write_report(home, console):
  """Writes the page of the run so far, and prints where it is.

  An error is logged, not raised: it must not replace the error of the run.
  """
  from mrl_jax import workdir
  from mrl_jax.analysis.report import page

  try:
    try:
      page.write(home.folder)
    finally:
      home.push(wait=True)
    path = home.path(workdir.REPORT)
    console.print(f'Report: {path}', soft_wrap=True, markup=False)
  except OSError as error:
    logging.error('no report: %s; launch/report.py may write it later', error)
  except Exception:
    logging.exception('launch/report.py may report %s later', home.given)


def parse(argv):
  """Parses flags; reports a mistake in them without a traceback."""
  try:
    rest = app.parse_flags_with_usage(argv)
    CONFIG.value.keys()  # A file that could not be read fails here.
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
