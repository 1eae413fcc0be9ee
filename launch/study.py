"""Compares methods: runs each with each seed, and reports.

python launch/study.py --out=runs/study --methods=grpo,prp --seeds=0,1,2
python launch/study.py --out=runs/study --methods=grpo,prp --parallel=2
  --arm='prp_own=prp method.baseline=own' --config.train.rounds=99
python launch/study.py --out=runs/study --report

An arm is a file of configs/, by name, or LABEL=FILE with changes of keys, for
ablations. Flags that start with --config. apply to every run. The same command
resumes a study that was stopped.
"""

from collections.abc import Mapping, Sequence
import fcntl
import itertools
import os
import pathlib
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

from absl import app
from absl import flags
from ml_collections import config_flags
from rich import console as console_lib

from mrl_jax import checks
from mrl_jax import config as config_lib
from mrl_jax import workdir
from mrl_jax.analysis import study

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, os.fspath(ROOT))  # Config files are not installed.

_METHODS = flags.DEFINE_list('methods', [], 'Files of configs/, by name.')
_ARMS = flags.DEFINE_multi_string(
  'arm', [], "'LABEL=FILE KEY=VALUE ...', such as 'low=prp thl.max_tokens=9'."
)
_SEEDS = flags.DEFINE_list('seeds', [], 'By default 0,1,2.')
_OUT = flags.DEFINE_string('out', None, 'The folder of the study.')
_PARALLEL = flags.DEFINE_integer('parallel', 1, 'Number of runs at a time.', 1)
_BASELINE = flags.DEFINE_string(
  'baseline', None, 'The arm to compare with: by default grpo, or the first.'
)
_REPORT = flags.DEFINE_bool(
  'report', False, 'Only report, by default on all arms and seeds in --out.'
)

_POLL_S, _STOP_S = 0.2, 30.0  # Between polls; before a child is killed.
_LAST_LINES = 20  # Printed of the log of a run that failed.
_LABEL = re.compile(r'\w[\w.-]*')
_CACHE = 'cache'
_OVERRIDE = re.compile(r'--?config\.')


def arms(
  methods: Sequence[str],
  extra: Sequence[str],
  overrides: Sequence[str],
  out: str,
) -> dict[str, list[str]]:
  """The flags of launch/tpu_pod.py for each arm, by label, without the seed.

  `methods`, `extra` and `overrides` are the values of --methods, --arm and
  --config.KEY=VALUE. Raises InputError if one of them is wrong.
  """
  cache = {'cache_dir': os.path.join(os.path.abspath(out), _CACHE)}
  common = _values([text.lstrip('-').partition('.')[2] for text in overrides])
  files = {path.stem: path for path in (ROOT / 'configs').glob('*.py')}
  flags_of = {}
  for text in [*(f'{method}={method}' for method in methods), *extra]:
    try:
      words = shlex.split(text)
    except ValueError as error:
      raise checks.InputError(f'--arm={text!r}: {error}') from error
    label, equals, file = (words or [''])[0].partition('=')
    checks.require(
      bool(equals), f'--arm={text!r} is not LABEL=FILE KEY=VALUE ...'
    )
    path = checks.choose(file, files, 'file of configs/')
    checks.require(
      bool(_LABEL.fullmatch(label)) and label != _CACHE,
      f'{label!r} cannot be the label of an arm. Labels name folders: use '
      f'letters, digits, _ . and -, and not {_CACHE!r}',
    )
    checks.require(label not in flags_of, f'arm {label} is given twice')
    values = {**cache, **common, **_values(words[1:])}
    flags_of[label] = [f'--config={path}']
    flags_of[label] += [f'--config.{k}={value}' for k, value in values.items()]
  return flags_of


def _values(pairs) -> dict[str, str]:
  values = {}
  for pair in pairs:
    key, equals, value = pair.partition('=')
    checks.require(
      bool(equals), f'{pair!r} is not KEY=VALUE; write it without spaces'
    )
    checks.require(key != 'seed', 'set seeds with --seeds, not with seed=')
    values[key] = value
  return values


def _seeds(texts) -> list[int]:
  for i, text in enumerate(texts):
    checks.require(
      text.isdecimal(), f'--seeds: {text!r} is not a whole number from 0 on'
    )
    checks.require(text not in texts[:i], f'seed {text} is given twice')
  return [int(text) for text in texts]


def config(label: str, values: Sequence[str]) -> dict:
  """The flat config of an arm's flags; raises InputError if one is wrong."""
  holder, argv = flags.FlagValues(), [label, *values]
  defined = config_flags.DEFINE_config_file(
    'config', lock_config=True, flag_values=holder, sys_argv=argv
  )
  try:
    holder(argv)
  except (AttributeError, KeyError, flags.Error) as error:
    cause = error
    while isinstance(cause.args[0], Exception):
      cause = cause.args[0]
    raise checks.InputError(f'{label}: {cause.args[0]}') from error
  config_lib.check(defined.value)
  config_lib.settle_devices(defined.value)  # As launch/tpu_pod.py does.
  return config_lib.flat(defined.value)


class Job(NamedTuple):
  """A run that is to be made."""

  arm: str
  seed: int
  folder: str
  command: Sequence[str]

  @property
  def log(self) -> str:
    return f'{self.folder}.log'

  @property
  def is_cold(self) -> bool:
    """Whether the run does not train yet: it may still make its warm starts."""
    return not os.path.exists(os.path.join(self.folder, workdir.ROUNDS))


def jobs(
  flags_of: Mapping[str, Sequence[str]], seeds: Sequence[int], out: str
) -> list[Job]:
  """The runs of some arms that are not complete.

  They go seed by seed, so that a part of a study compares all arms. Raises
  InputError if the config of a run is wrong.
  """
  script, todo = os.fspath(ROOT / 'launch' / 'tpu_pod.py'), []
  for seed, (arm, values) in itertools.product(seeds, flags_of.items()):
    folder = study.folder(os.path.abspath(out), arm, seed)
    values = [*values, f'--config.seed={seed}']
    if not _is_complete(folder, config(arm, values)):
      command = (sys.executable, script, *values, f'--workdir={folder}')
      todo.append(Job(arm, seed, folder, command))
  return todo


def _is_complete(folder, asked) -> bool:
  """Whether the run exists; launch/tpu_pod.py refuses to change its config."""
  try:
    stored = study.read_run(folder).config
  except checks.InputError:
    return False
  asked = study.without_seed(asked)
  return all(stored.get(key) == value for key, value in asked.items())


def run(
  todo: Sequence[Job], parallel: int, console: console_lib.Console
) -> dict[tuple[str, int], str]:
  """Makes runs; returns why runs failed, by (arm, seed).

  Runs of one seed share their warm starts. A run does not start while another
  of its seed still makes them, and will find them in the cache.
  """
  waiting, running, failed, seconds = list(todo), {}, {}, []
  try:
    while waiting or running:
      for job, (process, began) in list(running.items()):
        if process.poll() is None:
          continue
        del running[job]
        seconds.append(time.monotonic() - began)
        if why := _result(job, process.returncode, console):
          failed[job.arm, job.seed] = why
        left = len(waiting) + len(running)
        minutes = left * statistics.fmean(seconds) / parallel / 60
        if left:
          _say(console, f'  {left:,} to go, about {minutes:,.0f} min')
      cold = {job.seed for job in running if job.is_cold}
      ready = [job for job in waiting if job.seed not in cold]
      if not ready or len(running) >= parallel:
        time.sleep(_POLL_S if running else 0)
        continue
      job = ready[0]
      waiting.remove(job)
      try:
        running[job] = _start(job), time.monotonic()
      except BlockingIOError:
        failed[job.arm, job.seed] = 'another process makes this run'
  finally:
    _stop([process for process, _ in running.values()])
  return failed


def _start(job) -> subprocess.Popen:
  """Starts a run; it holds a lock on its log as long as it lives."""
  os.makedirs(os.path.dirname(job.log), exist_ok=True)
  with open(job.log, 'ab') as log:
    fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    log.truncate(0)
    return subprocess.Popen(
      job.command,
      stdin=subprocess.DEVNULL,
      stdout=log,
      stderr=log,
      process_group=0,  # Ctrl-C reaches it through `_stop` only.
    )


def _stop(processes) -> None:
  for process in processes:
    process.terminate()  # The run writes a checkpoint.
  for process in processes:
    try:
      process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait()


def _result(job, status, console) -> str:
  """Prints the result of a run; returns why it failed, or ''."""
  name = f'{job.arm}, seed {job.seed}'
  try:
    checks.require(status == 0, f'exit status {status}')
    result = study.read_run(job.folder)
  except checks.InputError as error:
    with open(job.log, encoding='utf-8', errors='replace') as log:
      lines = log.read().splitlines()[-_LAST_LINES:]
    text = f'{name} failed: {error}. The end of {job.log}:'
    _say(console, '\n  '.join([text, *lines]))
    return f'failed: {error}; see {job.log}'
  before = statistics.fmean(result.before.values())
  after = statistics.fmean(result.after.values())
  _say(console, f'{name}: {before:.1%} → {after:.1%}, {result.seconds:,.0f} s')
  return ''


def _stored(out: str) -> tuple[list[str], list[int]]:
  """The arms and the seeds that have a run or a log in a folder."""
  pairs = [
    (path.parent.name, int(seed[1]))
    for path in pathlib.Path(out).glob('*/seed-*')
    if _LABEL.fullmatch(path.parent.name)
    and (seed := re.fullmatch(r'seed-(\d+)(\.log)?', path.name))
  ]
  return sorted({arm for arm, _ in pairs}), sorted({seed for _, seed in pairs})


def _say(console: console_lib.Console, text: str) -> None:
  console.print(text, soft_wrap=True)


def conduct(argv: Sequence[str], console: console_lib.Console) -> bool:
  """Makes the runs, and reports; returns whether all are complete.

  Raises InputError if a flag is wrong.
  """
  # It imports matplotlib, which takes a moment.
  from mrl_jax.analysis import study_report

  out, is_report = _OUT.value, _REPORT.value
  checks.require(bool(out), 'name the folder of the study with --out')
  for text in argv:
    checks.require(
      _OVERRIDE.match(text) is not None,
      f'not a flag: {text!r}; flags of every run are --config.KEY=VALUE',
    )
  flags_of = arms(_METHODS.value, _ARMS.value, argv, out)
  labels, seeds = list(flags_of), _seeds(_SEEDS.value)
  if is_report:
    stored_labels, stored_seeds = _stored(out)
    labels, seeds = labels or stored_labels, seeds or stored_seeds
    checks.require(bool(labels), f'no study in {out}: looked for ARM/seed-N')
  checks.require(bool(labels), 'name what to compare with --methods or --arm')
  baseline = _BASELINE.value or ('grpo' if 'grpo' in labels else labels[0])
  checks.choose(baseline, dict.fromkeys(labels), 'arm for --baseline')
  seeds, failed = seeds or [0, 1, 2], {}
  if not is_report:
    todo = jobs(flags_of, seeds, out)
    total = len(labels) * len(seeds)
    console.print(f'{total:,} runs, {total - len(todo):,} of them complete')
    failed = run(todo, _PARALLEL.value, console)
  result = study.read(out, labels, seeds, failed)
  study_report.write(out, result, baseline, console)
  return not result.missing


def main(argv):
  console = console_lib.Console(markup=False, emoji=False, highlight=False)
  # A shell lets processes in the background ignore SIGINT; a study must not.
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.default_int_handler)
  try:
    sys.exit(0 if conduct(argv[1:], console) else 1)
  except (checks.InputError, OSError) as error:
    sys.exit(f'{error}')
  except KeyboardInterrupt:
    sys.exit('Interrupted. The same command resumes the study.')


def parse(argv):
  """Parses flags; those of the runs (--config.*) are left as arguments."""
  ours = [text for text in argv if not _OVERRIDE.match(text)]
  theirs = [text for text in argv if _OVERRIDE.match(text)]
  return [*app.parse_flags_with_usage(ours), *theirs]


if __name__ == '__main__':
  app.run(main, flags_parser=parse)
