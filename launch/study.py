"""Compares methods at equal rollouts: runs each with each seed, and reports.

python launch/study.py --out=runs/study --methods=grpo,prp --seeds=0,1,2
python launch/study.py --out=runs/study --methods=grpo,prp --parallel=2
  --arm='prp_own=prp method.baseline=own' --config.train.rounds=99
python launch/study.py --out=runs/study --report

An arm is a file of configs/, by name, or LABEL=FILE and what is set in it, so
that ablations are arms. What starts with --config. goes to every run. The same
command again goes on where it was stopped.
"""

import collections
from collections.abc import Mapping, Sequence
import fcntl
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
from typing import NamedTuple

from absl import app
from absl import flags
from ml_collections import config_flags
import numpy as np
from rich import console as console_lib

from mrl_jax import checks
from mrl_jax import config as config_lib
from mrl_jax.analysis import study

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, os.fspath(ROOT))  # Config files are not installed.

_METHODS = flags.DEFINE_list('methods', None, 'Files of configs/, by name.')
_ARMS = flags.DEFINE_multi_string(
  'arm', [], "'LABEL=FILE KEY=VALUE ...', such as 'low=prp thl.max_tokens=9'."
)
_SEEDS = flags.DEFINE_list('seeds', None, 'By default 0,1,2.')
_OUT = flags.DEFINE_string('out', None, 'The folder of the study.')
_PARALLEL = flags.DEFINE_integer('parallel', 1, 'How many run at a time.', 1)
_BASELINE = flags.DEFINE_string(
  'baseline', None, 'The arm to compare with: by default grpo, or the first.'
)
_REPORT = flags.DEFINE_bool(
  'report', False, 'Report on what is there, of all arms and seeds by default.'
)

_POLL_S, _STOP_S = 0.2, 10.0  # Between looks; before a child is killed.
_LAST = 20  # Lines of the log of a run that failed.
_LABEL = re.compile(r'\w[\w.-]*')
_CACHE = 'cache'
_OVERRIDE = re.compile(r'--?config\.')
_DEFAULT_SEEDS = ('0', '1', '2')


class Arm(NamedTuple):
  """What is compared: a file of configs/, and what is set in it."""

  label: str
  file: str
  overrides: Mapping[str, str]

  def flags(self, seed: int, out: str) -> list[str]:
    """How launch/tpu_pod.py is told of it."""
    path = ROOT / 'configs' / f'{self.file}.py'
    cache = os.path.join(os.path.abspath(out), _CACHE)
    values = {'cache_dir': cache, **self.overrides, 'seed': seed}
    return [
      f'--config={path}',
      *(f'--config.{key}={value}' for key, value in values.items()),
    ]

  def config(self, seed: int, out: str) -> dict:
    """What launch/tpu_pod.py will make of that, flat."""
    holder = flags.FlagValues()
    argv = [self.label, *self.flags(seed, out)]
    config = config_flags.DEFINE_config_file(
      'config', lock_config=True, flag_values=holder, sys_argv=argv
    )
    try:
      holder(argv)
    except (AttributeError, KeyError) as error:
      while isinstance(error.args[0], Exception):
        error = error.args[0]
      raise checks.InputError(
        f'{self.label}: no such key: {error.args[0]}'
      ) from error
    except flags.Error as error:
      raise checks.InputError(f'{self.label}: {error}') from error
    values = config.value
    config_lib.check(values)
    return json.loads(json.dumps(config_lib.flat(values)))


def arms(
  methods: Sequence[str], extra: Sequence[str], overrides: Sequence[str]
) -> list[Arm]:
  """What the flags name.

  Args:
    methods: files of configs/.
    extra: 'LABEL=FILE KEY=VALUE ...'.
    overrides: '--config.KEY=VALUE', of all arms.
  """
  common = _values([text.lstrip('-').partition('.')[2] for text in overrides])
  known = dict.fromkeys(p.stem for p in (ROOT / 'configs').glob('*.py'))
  found = [Arm(method, method, common) for method in methods]
  for text in extra:
    words = shlex.split(text)
    label, equals, file = (words or [''])[0].partition('=')
    checks.require(
      bool(equals), f'--arm={text!r} is not LABEL=FILE KEY=VALUE ...'
    )
    found.append(Arm(label, file, {**common, **_values(words[1:])}))
  for arm in found:
    checks.choose(arm.file, known, 'file of configs/')
    checks.require(
      bool(_LABEL.fullmatch(arm.label)) and arm.label != _CACHE,
      f'{arm.label!r} cannot be the label of an arm, as it names a folder: '
      f'letters, digits, _ . and -, and not {_CACHE!r}',
    )
  _check_distinct([arm.label for arm in found], 'arm')
  return found


def _values(texts) -> dict[str, str]:
  pairs = {}
  for text in texts:
    key, equals, value = text.partition('=')
    checks.require(
      bool(equals), f'{text!r} is not KEY=VALUE; write it in one piece'
    )
    checks.require(key != 'seed', 'seed is what --seeds sets')
    pairs[key] = value
  return pairs


def _seeds(texts) -> list[int]:
  for text in texts:
    checks.require(
      text.isdecimal(), f'--seeds: {text!r} is not a whole number from 0 on'
    )
  _check_distinct(texts, 'seed')
  return [int(text) for text in texts]


def _check_distinct(names, what) -> None:
  twice = [n for n, count in collections.Counter(names).items() if count > 1]
  checks.require(not twice, f'{what} {", ".join(twice)} is there twice')


class Job(NamedTuple):
  """A run to be made."""

  arm: str
  seed: int
  folder: str
  command: Sequence[str]

  @property
  def log(self) -> str:
    return f'{self.folder}.log'

  @property
  def warm(self) -> bool:
    """Whether it has warm starts; before, it makes them or waits for them."""
    return os.path.exists(os.path.join(self.folder, 'metrics.jsonl'))


def jobs(found: Sequence[Arm], seeds: Sequence[int], out: str) -> list[Job]:
  """What is not there yet, seed by seed: a part of a study compares all arms.

  Raises:
    InputError: the flags of a run cannot be.
  """
  script, todo = os.fspath(ROOT / 'launch' / 'tpu_pod.py'), []
  for seed in seeds:
    for arm in found:
      folder = study.workdir(os.path.abspath(out), arm.label, seed)
      if not _whole(folder, arm.config(seed, out)):
        of_run = (*arm.flags(seed, out), f'--workdir={folder}')
        command = (sys.executable, script, *of_run)
        todo.append(Job(arm.label, seed, folder, command))
  return todo


def _whole(folder, config) -> bool:
  try:
    there = study.read_run(folder).config
  except checks.InputError:
    return False
  # If it is of another config, launch/tpu_pod.py says in what they differ.
  asked = study.but_for_seed(config)
  return all(there.get(key) == value for key, value in asked.items())


def run(
  todo: Sequence[Job], parallel: int, console: console_lib.Console
) -> dict[tuple[str, int], str]:
  """Runs what is to do; returns what failed, by arm and seed, and why.

  Runs of one seed have their warm starts in common. None is begun while
  another is still making them, so that it finds them in the cache.
  """
  waiting, running, failed, seconds = list(todo), {}, {}, []
  try:
    while waiting or running:
      ended = [j for j, (p, _) in running.items() if p.poll() is not None]
      for job in ended:
        process, began = running.pop(job)
        seconds.append(time.monotonic() - began)
        why = _told(job, process.returncode, console)
        if why:
          failed[job.arm, job.seed] = why
        left = len(waiting) + len(running)
        minutes = left * sum(seconds) / len(seconds) / parallel / 60
        if left:
          _say(console, f'  {left:,} to go, about {minutes:,.0f} min')
      cold = {job.seed for job in running if not job.warm}
      ready = [job for job in waiting if job.seed not in cold]
      if not ready or len(running) >= parallel:
        time.sleep(_POLL_S if running else 0)
        continue
      job = ready[0]
      waiting.remove(job)
      try:
        running[job] = _start(job), time.monotonic()
      except BlockingIOError:
        failed[job.arm, job.seed] = 'another process runs it'
  finally:
    _stop([process for process, _ in running.values()])
  return failed


def _start(job) -> subprocess.Popen:
  """Starts a run, which holds a lock on its log for as long as it lives."""
  os.makedirs(os.path.dirname(job.log), exist_ok=True)
  with open(job.log, 'ab') as log:
    fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    log.truncate(0)
    return subprocess.Popen(
      job.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
    )


def _stop(processes) -> None:
  for process in processes:
    process.terminate()  # A run goes on from what it last saved.
  for process in processes:
    try:
      process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait()


def _told(job, status, console) -> str:
  """Says what came of a run; returns why it failed, '' if it did not."""
  name = f'{job.arm}, seed {job.seed}'
  try:
    checks.require(status == 0, f'exit status {status}')
    one = study.read_run(job.folder)
  except checks.InputError as error:
    with open(job.log, encoding='utf-8', errors='replace') as log:
      lines = log.read().splitlines()[-_LAST:]
    _say(console, f'{name} failed, {error}; the end of {job.log}:')
    _say(console, '\n'.join(f'  {line}' for line in lines))
    return f'failed, {error}; see {job.log}'
  before, after = (
    np.mean([*accuracy.values()]) for accuracy in (one.before, one.after)
  )
  _say(console, f'{name}: {before:.1%} → {after:.1%}, {one.seconds:,.0f} s')
  return ''


def _there(out: str) -> tuple[list[str], list[int]]:
  """The arms and the seeds that a folder has something of."""
  there = [
    (path.parent.name, int(seed[1]))
    for path in pathlib.Path(out).glob('*/seed-*')
    if _LABEL.fullmatch(path.parent.name)
    and (seed := re.fullmatch(r'seed-(\d+)(\.log)?', path.name))
  ]
  labels, seeds = ({pair[i] for pair in there} for i in (0, 1))
  return sorted(labels), sorted(seeds)


def _say(console: console_lib.Console, text: str) -> None:
  console.print(text, soft_wrap=True)


def conduct(argv: Sequence[str], console: console_lib.Console) -> bool:
  """Runs what is to be run, and reports; returns whether nothing is missing."""
  from mrl_jax.analysis import (
    study_report,  # It takes a moment, as matplotlib does.
  )

  checks.require(bool(_OUT.value), 'name the folder of the study with --out')
  out = _OUT.value
  for text in argv:
    checks.require(
      _OVERRIDE.match(text) is not None,
      f'not a flag: {text!r}; what is for every run is --config.KEY=VALUE',
    )
  found = arms(_METHODS.value or [], _ARMS.value, argv)
  seeds = _seeds(_SEEDS.value or _DEFAULT_SEEDS)
  labels = [arm.label for arm in found]
  if _REPORT.value:
    there = _there(out)
    labels = labels or there[0]
    seeds = seeds if _SEEDS.value else there[1]
  checks.require(
    bool(labels),
    f'nothing of a study in {out}: looked for ARM/seed-N'
    if _REPORT.value
    else 'name what to compare with --methods or --arm',
  )
  baseline = _BASELINE.value or ('grpo' if 'grpo' in labels else labels[0])
  checks.choose(baseline, dict.fromkeys(labels), 'arm for --baseline')
  failed = {}
  if not _REPORT.value:
    todo = jobs(found, seeds, out)
    total = len(labels) * len(seeds)
    console.print(f'{total:,} runs, of which {total - len(todo):,} are there')
    failed = run(todo, _PARALLEL.value, console)
  whole = study.read(out, labels, seeds, failed)
  study_report.write(out, whole, baseline, console)
  return not whole.missing


def main(argv):
  console = console_lib.Console(markup=False, emoji=False, highlight=False)
  # SIGINT too: a shell leaves it ignored in what runs in the background.
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.default_int_handler)
  try:
    sys.exit(0 if conduct(argv[1:], console) else 1)
  except (checks.InputError, OSError) as error:
    sys.exit(f'{error}')
  except KeyboardInterrupt:
    sys.exit('Interrupted. The same command goes on where it was stopped.')


def parse(argv):
  """Parses flags but for those of the runs, which are left as arguments."""
  ours = [text for text in argv if not _OVERRIDE.match(text)]
  theirs = [text for text in argv if _OVERRIDE.match(text)]
  return [*app.parse_flags_with_usage(ours), *theirs]


if __name__ == '__main__':
  app.run(main, flags_parser=parse)
