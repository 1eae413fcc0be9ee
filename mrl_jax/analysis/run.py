"""Reads the work dir of a run, finished or not.

  run = run_lib.read('runs/mine')
  for problem in run.problems:
    print(problem)

The run may still be writing, and files may be damaged or hostile. `Run` has
everything that can be read; `problems` names each file and line that is missing
or left out. Reports, comparisons, studies and inspections of exchanges all read
runs by this module.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import datetime
import functools
import json
import pathlib

import msgspec

from mrl_jax import checks
from mrl_jax import config_keys
from mrl_jax import workdir
from mrl_jax.see import ledger
from mrl_jax.thl import transfer

# What is unknown if a file is missing.
FILES = {
  workdir.SETUP: 'the config is unknown',
  workdir.PLAN: 'the devices of the policies are unknown',
  workdir.ROUNDS: 'the metrics of the rounds are unknown',
  workdir.EVALUATIONS: 'held-out accuracies and completions are unknown',
  workdir.SUMMARY: 'totals are sums over the rounds in metrics.jsonl',
}
_DIGITS = 18  # Longer integers are damage, and may not fit in a float.
_Count, _Number = workdir.Count | None, workdir.Number


class Settings(msgspec.Struct, frozen=True, kw_only=True):
  """The keys of a flat config that analysis depends on.

  If the config is unknown, limits of THL have their defaults; others are None.
  """

  method: str = msgspec.field(default='', name='method.name')
  seed: int | None = None
  rounds: _Count = msgspec.field(default=None, name='train.rounds')
  devices: _Count = msgspec.field(default=None, name='mwra.emulated_devices')
  kl_weight: _Number = msgspec.field(default=None, name='method.kl_weight')
  clip_low: _Number = msgspec.field(default=None, name='method.clip_low')
  clip_high: _Number = msgspec.field(default=None, name='method.clip_high')
  max_tokens: workdir.Count = msgspec.field(
    default=config_keys.KEYS['thl.max_tokens'].default, name='thl.max_tokens'
  )
  max_residual: float = msgspec.field(
    default=config_keys.KEYS['thl.max_residual'].default,
    name='thl.max_residual',
  )


class Run(msgspec.Struct, frozen=True, kw_only=True, eq=False, dict=True):
  """The contents of a work dir.

  Attributes:
    folder: the work dir, as it was given.
    written: modification time of its newest file; None without any file.
    config: the flat config; empty if unknown.
    settings: the keys of it that analysis depends on, with checked types.
    plan: None if unknown.
    rows: metrics by policy, in the order of rounds.
    evaluations: by policy, in the order of rounds.
    summary: None if the run is not finished, or if it continued since.
    problems: what is missing or was left out, and why.
  """

  folder: str
  written: datetime.datetime | None = None
  config: Mapping[str, object] = {}
  settings: Settings = Settings()
  plan: workdir.Plan | None = None
  rows: Mapping[str, Sequence[workdir.Row]] = {}
  evaluations: Mapping[str, Sequence[workdir.Evaluation]] = {}
  summary: workdir.Summary | None = None
  problems: Sequence[str] = ()

  @functools.cached_property
  def policies(self) -> list[str]:
    """The policies that this process trains."""
    planned = self.plan.policies if self.plan else {}
    return sorted({*planned, *self.rows, *self.evaluations})

  @functools.cached_property
  def names(self) -> list[str]:
    """All policies; those that other processes train come last."""
    pairs = [*self.fates(), *self.residuals()]
    names = {name for pair in pairs for name in pair.split('->')}
    for row in self.all_rows:
      by_peer = [v for v in row.method.values() if isinstance(v, Mapping)]
      names.update(row.rescued_by, row.residuals, *by_peer)
    names.update(self.plan.elsewhere if self.plan else ())
    return [*self.policies, *sorted(names - {*self.policies})]

  @functools.cached_property
  def all_rows(self) -> list[workdir.Row]:
    """The metrics of all policies."""
    return [row for rows in self.rows.values() for row in rows]

  @functools.cached_property
  def rounds(self) -> int:
    """Number of rounds that are done."""
    done = [row.round + 1 for row in self.all_rows]
    done += [last.rounds for *_, last in self.evaluations.values()]
    return max([*done, self.summary.rounds if self.summary else 0])

  @property
  def state(self) -> str:
    """Progress of the run, in words."""
    planned = self.settings.rounds
    of = f' of {planned:,}' if planned is not None else ''
    if self.summary and (planned is None or self.rounds >= planned):
      return f'finished, {self.rounds:,} rounds'
    if not self.rounds:
      return f'before its first round{of}'
    return f'after {self.rounds:,}{of} rounds: still running, or stopped'

  @property
  def seconds(self) -> float | None:
    """Seconds since the start of the run."""
    if self.summary and self.summary.timing.seconds is not None:
      return self.summary.timing.seconds
    elapsed = [row.timing.elapsed for row in self.all_rows]
    return max((s for s in elapsed if s is not None), default=None)

  @functools.cached_property
  def process(self) -> list[workdir.Row]:
    """A row for each round; rows of all policies have the same times."""
    rows = {row.round: row for row in self.all_rows}
    return [rows[round] for round in sorted(rows)]

  def phases(self) -> dict[str, float]:
    """Seconds by phase; if no round is missing, 'start' is what is left."""
    totals = collections.Counter()
    for row in self.process:
      totals.update(row.timing.phases)
    is_whole = len(self.process) == self.rounds
    if totals and is_whole and self.seconds is not None:
      totals = {'start': max(self.seconds - sum(totals.values()), 0), **totals}
    return totals

  def waited(self) -> dict[str, float]:
    """Seconds that receivers waited for senders, by 'sender->receiver'."""
    if self.summary:
      return self.summary.timing.waited
    totals = collections.Counter()
    for row in self.all_rows:
      for sender, seconds in row.timing.waited.items():
        totals[f'{sender}->{row.policy}'] += seconds
    return totals

  def fates(self) -> workdir.Pairs:
    """Counts of exchanged records by pair, kind and fate."""
    if self.summary:
      return {**self.summary.exchange, **self.summary.sent}
    return ledger.totals_by_pair(
      (row.policy, row.exchange) for row in self.all_rows
    )

  def residuals(self) -> workdir.Residuals:
    """THL residuals by pair."""
    if self.summary:
      return self.summary.residuals
    pairs = {}
    for row in self.all_rows:
      for sender, residual in row.residuals.items():
        pair = f'{sender}->{row.policy}'
        pairs.setdefault(pair, transfer.Residual()).add(residual)
    return pairs

  def rescues(self) -> dict[tuple[str, str], float]:
    """By (sender, receiver), the share of failed prompts that a peer solved.

    The share is of all prompts that a whole group of the receiver failed:
    rounds with more of them have more weight.
    """
    solved, failed = collections.Counter(), collections.Counter()
    for row in self.all_rows:
      for sender, share in row.rescued_by.items():
        pair, weight = (sender, row.policy), row.all_fail_groups or 0.0
        solved[pair] += weight * share
        failed[pair] += weight
    return {
      pair: n / failed[pair] for pair, n in solved.items() if failed[pair]
    }

  def refusals(self) -> dict[str, dict[str, int]]:
    """Counts of refusals by place and reason.

    A place is a pair (records that the exchange refused), 'messages' (refused
    before their sender was known), or 'training rows of POLICY' (responses and
    claims of peers that the policy refused when it made its training rows).
    """
    places = collections.defaultdict(collections.Counter)
    if self.summary:
      for pair, reasons in self.summary.refusals.items():
        places[pair].update(reasons)
      places['messages'].update(self.summary.messages_refused)
    for row in self.all_rows:
      places[f'training rows of {row.policy}'].update(row.refused)
    return {
      place: refused for place, counts in places.items() if (refused := +counts)
    }


def read(folder: str) -> Run:
  """Reads a work dir.

  Raises:
    InputError: it has none of the files of a run.
  """
  reader = _Reader(folder)
  checks.require(
    bool(reader.paths),
    f'no run in {folder}: looked for {", ".join(FILES)}; give the work dir of '
    'a run',
  )
  setup = reader.object(workdir.SETUP, workdir.Setup) or workdir.Setup()
  settings = (
    reader.attempt(workdir.SETUP, msgspec.convert, setup.config, Settings)
    or Settings()
  )
  plan = reader.object(workdir.PLAN, workdir.Plan)
  rows = reader.lines(workdir.ROUNDS, workdir.Row)
  done = max((row.round + 1 for row in rows), default=0)
  is_optional = done < (settings.rounds or 0)
  summary = reader.object(workdir.SUMMARY, workdir.Summary, is_optional)
  if summary and summary.rounds < done:
    reader.problems.append(
      f'{workdir.SUMMARY} left out: it is about {summary.rounds:,} rounds, but '
      f'{workdir.ROUNDS} has {done:,}'
    )
    summary = None
  evaluations = reader.lines(workdir.EVALUATIONS, workdir.Evaluation)
  written = max(path.stat().st_mtime for path in reader.paths)
  return Run(
    folder=folder,
    written=datetime.datetime.fromtimestamp(written, datetime.UTC),
    config=setup.config,
    settings=settings,
    plan=plan,
    rows=_by_policy((row.policy, row.round, row) for row in rows),
    evaluations=_by_policy((e.policy, e.rounds, e) for e in evaluations),
    summary=summary,
    problems=reader.problems,
  )


def attempt(problems: list[str], what: str, function: Callable, *arguments):
  """Calls a function that reads something.

  Returns:
    Its result. None if what it reads is damaged; the reason is appended to
    `problems`.
  """
  try:
    return function(*arguments)
  except json.JSONDecodeError as error:
    why = f'it is not JSON: {error.msg} at character {error.pos + 1}'
  except RecursionError:
    why = 'it is nested too deeply'
  except (ValueError, OSError) as error:
    why = f'{error}'
  problems.append(f'{what} left out: {why}')
  return None


class _Reader:
  """Reads files of a folder, and collects problems."""

  def __init__(self, folder):
    self.problems = []
    self._root = pathlib.Path(folder)
    self.paths = [p for name in FILES if (p := self._root / name).is_file()]

  def attempt(self, what, function, *arguments):
    return attempt(self.problems, what, function, *arguments)

  def object(self, name, kind, is_optional=False):
    """Reads a JSON file; None, and a problem, if it is missing or damaged."""
    if is_optional and not (self._root / name).exists():
      return None
    data = self._data(name)
    return None if data is None else self.attempt(name, _decode, data, kind)

  def lines(self, name, kind) -> list:
    """Reads a file of JSON lines, without those that are damaged."""
    *lines, last = (self._data(name) or b'').split(b'\n')
    values, not_finite = [], []
    for i, line in enumerate(lines, 1):
      place, constants = f'{name}, line {i}', []
      value = self.attempt(place, _decode, line, kind, constants.append)
      if value is not None:
        values.append(value)
      if constants:
        not_finite.append(place)
    if not_finite:
      more = len(not_finite) - 1
      self.problems.append(
        f'{not_finite[0]}: numbers that are not finite are not shown'
        + f'; the same in {more:,} more lines' * bool(more)
      )
    if last:
      self.problems.append(
        f'{name}, line {len(lines) + 1} left out: its end is missing'
      )
    return values

  def _data(self, name) -> bytes | None:
    path = self._root / name
    if not path.exists():
      self.problems.append(f'{name} is missing: {FILES[name]}')
      return None
    return self.attempt(name, path.read_bytes)


def _decode(data, kind, on_constant=lambda name: None):
  """Converts JSON; `on_constant` is called with each NaN or infinity."""

  def constant(name):
    on_constant(name)
    return float(name)

  value = json.loads(data, parse_int=_integer, parse_constant=constant)
  if kind is workdir.Setup:
    version = value.get('format') if isinstance(value, dict) else None
    checks.require(
      version == workdir.FORMAT,
      'another version of mrl_jax wrote it, in a format that this one cannot '
      'read',
    )
  return msgspec.convert(value, kind)


def _integer(digits: str) -> int:
  checks.require(
    len(digits) <= _DIGITS, f'it has an integer of {len(digits):,} digits'
  )
  return int(digits)


def _by_policy(items) -> dict[str, list]:
  """Sorts (policy, place, value); of values at one place the last counts."""
  by_policy = {}
  for policy, place, value in items:
    by_policy.setdefault(policy, {})[place] = value
  return {
    policy: [values[place] for place in sorted(values)]
    for policy, values in sorted(by_policy.items())
  }
