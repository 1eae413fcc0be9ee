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
from collections.abc import Callable, Iterable, Mapping, Sequence
import datetime
import functools
import json
import pathlib
import statistics

import msgspec

from mrl_jax import checks
from mrl_jax import config_keys
from mrl_jax import records
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
  """The contents of a work dir; unknown contents are empty or None."""

  folder: str  # The work dir, as it was given.
  written: datetime.datetime | None = None  # When its newest file changed.
  config: Mapping[str, object] = {}  # Flat.
  settings: Settings = Settings()  # Keys of the config, with checked types.
  plan: workdir.Plan = workdir.Plan()
  # By policy, in the order of rounds.
  rows: Mapping[str, Sequence[workdir.RoundMetrics]] = {}
  evaluations: Mapping[str, Sequence[workdir.Evaluation]] = {}
  # None if the run is not finished, or if it continued since.
  summary: workdir.Summary | None = None
  problems: Sequence[str] = ()  # What is missing or was left out, and why.

  @functools.cached_property
  def policies(self) -> list[str]:
    """The policies that this process trains."""
    return sorted({*self.plan.policies, *self.rows, *self.evaluations})

  @functools.cached_property
  def names(self) -> list[str]:
    """All policies; those that other processes train come last."""
    pairs = [*self.fates(), *self.totals.residuals]
    names = {*self.plan.elsewhere}.union(*(pair.split('->') for pair in pairs))
    for row in self.all_rows:
      by_peer = [v for v in row.method.values() if isinstance(v, Mapping)]
      names.update(row.rescued_by, row.residuals, *by_peer)
    return [*self.policies, *sorted(names - {*self.policies})]

  @functools.cached_property
  def all_rows(self) -> list[workdir.RoundMetrics]:
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
    of = '' if planned is None else f' of {planned:,}'
    if self.summary and self.rounds >= (planned or 0):
      return f'finished, {self.rounds:,} rounds'
    if not self.rounds:
      return f'before its first round{of}'
    return f'after {self.rounds:,}{of} rounds: still running, or stopped'

  @property
  def seconds(self) -> float | None:
    """Seconds since the start of the run."""
    return self.totals.timing.seconds

  @functools.cached_property
  def process(self) -> list[workdir.RoundMetrics]:
    """A row for each round; rows of all policies have the same times."""
    rows = {row.round: row for row in self.all_rows}
    return [rows[round] for round in sorted(rows)]

  @property
  def round_seconds(self) -> float | None:
    """Seconds of a round, the median."""
    times = [row.timing.seconds for row in self.process]
    known = [seconds for seconds in times if seconds is not None]
    return statistics.median(known) if known else None

  def phases(self) -> dict[str, float]:
    """Seconds by phase; if no round is missing, 'start' is what is left."""
    totals = sums(row.timing.phases for row in self.process)
    is_whole = len(self.process) == self.rounds
    if totals and is_whole and self.seconds is not None:
      totals = {'start': max(self.seconds - sum(totals.values()), 0), **totals}
    return totals

  @functools.cached_property
  def totals(self) -> workdir.Summary:
    """The summary; without one, what sums over the rounds can tell."""
    if self.summary:
      return self.summary
    elapsed = [row.timing.elapsed for row in self.all_rows]
    seconds = max((s for s in elapsed if s is not None), default=None)
    waited, residuals = collections.Counter(), {}
    for row in self.all_rows:
      for sender, time in row.timing.waited.items():
        waited[f'{sender}->{row.policy}'] += time
      for sender, residual in row.residuals.items():
        pair = f'{sender}->{row.policy}'
        residuals.setdefault(pair, transfer.Residual()).add(residual)
    return workdir.Summary(
      rounds=self.rounds,
      timing=workdir.RunTiming(seconds=seconds, waited=waited),
      exchange=ledger.totals_by_pair(
        (r.policy, r.exchange) for r in self.all_rows
      ),
      residuals=residuals,
    )

  def fates(self) -> workdir.Pairs:
    """Counts of exchanged records by pair, kind and fate."""
    return {**self.totals.exchange, **self.totals.sent}

  def records(self) -> dict[str, int]:
    """Counts of exchanged records by fate, over all pairs and kinds."""
    pairs = self.fates().values()
    return sums(counts for kinds in pairs for counts in kinds.values())

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
    before their sender was known), 'training rows of POLICY' (responses and
    claims of peers that the policy refused when it made its training rows), or
    'answers of POLICY' (verifications that took too much time or memory).
    """
    places = {
      **self.totals.refusals,
      'messages': self.totals.messages_refused,
      **{
        f'training rows of {policy}': sums(row.refused for row in rows)
        for policy, rows in self.rows.items()
      },
      **{
        f'answers of {policy}': {
          verdict: sum(row.verified.get(verdict, 0) for row in rows)
          for verdict in records.UNDECIDED
        }
        for policy, rows in self.rows.items()
      },
    }
    return {
      place: refused
      for place, counts in places.items()
      if (refused := +collections.Counter(counts))
    }


def read(folder: str) -> Run:
  """Reads a work dir; raises InputError if it has no file of a run."""
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
  plan = reader.object(workdir.PLAN, workdir.Plan) or workdir.Plan()
  rows = reader.lines(workdir.ROUNDS, workdir.RoundMetrics)
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
    rows=_by_policy(rows, 'round'),
    evaluations=_by_policy(evaluations, 'rounds'),
    summary=summary,
    problems=reader.problems,
  )


def sums(counts: Iterable[Mapping]) -> collections.Counter:
  """Adds counts by name."""
  total = collections.Counter()
  for part in counts:
    total.update(part)
  return total


def total(residuals: Iterable[transfer.Residual]) -> transfer.Residual:
  """Adds THL residuals."""
  sum_of_all = transfer.Residual()
  for residual in residuals:
    sum_of_all.add(residual)
  return sum_of_all


def attempt(problems: list[str], what: str, function: Callable, *arguments):
  """The result of a function; None, and a problem, if it reads damaged data."""
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
    self.problems, self._root = [], pathlib.Path(folder)
    self.attempt = functools.partial(attempt, self.problems)
    self.paths = [p for name in FILES if (p := self._root / name).is_file()]

  def object(self, name, kind, is_optional=False):
    """Reads a JSON file; None, and a problem, if it is missing or damaged."""
    data = self._data(name, is_optional)
    return None if data is None else self.attempt(name, _decode, data, kind)

  def lines(self, name, kind) -> list:
    """Reads a file of JSON lines, without those that are damaged."""
    *lines, last = (self._data(name) or b'').split(b'\n')
    values, not_finite = [], []
    for i, line in enumerate(lines, 1):
      place, constants = f'{name}, line {i}', []
      value = self.attempt(place, _decode, line, kind, constants.append)
      values += [] if value is None else [value]
      not_finite += [place] if constants else []
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

  def _data(self, name, is_optional=False) -> bytes | None:
    path = self._root / name
    if path.exists():
      return self.attempt(name, path.read_bytes)
    if not is_optional:
      self.problems.append(f'{name} is missing: {FILES[name]}')
    return None


def _decode(data, kind, on_constant=lambda name: None):
  """Converts JSON; `on_constant` is called with each NaN or infinity."""

  def constant(name):
    on_constant(name)
    return float(name)

  value = json.loads(data, parse_int=_integer, parse_constant=constant)
  if kind is workdir.Setup:
    checks.require(
      isinstance(value, dict) and value.get('format') == workdir.FORMAT,
      'another version of mrl_jax wrote it, in a format that this one cannot '
      'read',
    )
  return msgspec.convert(value, kind)


def _integer(digits: str) -> int:
  count = len(digits)
  checks.require(count <= _DIGITS, f'it has an integer of {count:,} digits')
  return int(digits)


def _by_policy(values, place) -> dict[str, list]:
  """Sorts by policy and the field `place`; of equal places the last counts."""
  by_policy = collections.defaultdict(dict)
  for value in values:
    by_policy[value.policy][getattr(value, place)] = value
  return {
    policy: [by_place[key] for key in sorted(by_place)]
    for policy, by_place in sorted(by_policy.items())
  }
