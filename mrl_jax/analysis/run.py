"""What a run has written so far, as the report needs it.

  run = run_lib.read('runs/mine')

A run may still be writing, and files may be damaged. What cannot be read is
told in `problems`, by file and line, and all the rest is there.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import datetime
import functools
import json
import pathlib
from typing import Annotated

import msgspec

from mrl_jax import checks
from mrl_jax.see import ledger
from mrl_jax.thl import transfer
from mrl_jax.training import metrics

CONFIG, PLAN, SUMMARY = 'config.json', 'plan.json', 'summary.json'
# What is not known without each file.
FILES = {
  CONFIG: 'what was planned',
  PLAN: 'which policy has which devices',
  metrics.ROUNDS: 'what happened in the rounds',
  metrics.EVALUATIONS: 'errors of accuracies, and completions',
  SUMMARY: 'totals of the run, other than by summing over rounds',
}
OVERALL = 'all'  # The accuracy that is not of one family.

_DIGITS = 18  # Of a sound integer, at most.

Number = float | None
Count = Annotated[int, msgspec.Meta(ge=0)]
Residuals = dict[str, transfer.Residual]


class Ratios(msgspec.Struct, kw_only=True):
  """What a row says of the tokens of its own or of peers' responses."""

  kl: Number = None
  logp: Number = None
  clip_fraction: Number = None
  truncated: Number = None
  max_ratio: Number = None
  ess_fraction: Number = None
  log_ratio_counts: list[Count] = []

  def __post_init__(self):
    bins = len(metrics.LOG_RATIO_EDGES) + 1
    if self.log_ratio_counts and len(self.log_ratio_counts) != bins:
      raise ValueError(f'{len(self.log_ratio_counts)} bins in place of {bins}')


class Timing(msgspec.Struct, kw_only=True):
  """Seconds: of the round, of the run up to its end, and by phase."""

  seconds: Number = None
  elapsed: Number = None
  tokens_per_second: Number = None
  phases: dict[str, float] = {}


class Row(msgspec.Struct, kw_only=True):
  """The part of a row of `metrics.jsonl` that is shown; None is not known."""

  round: Count
  policy: str
  reward: Number = None
  accuracy: Number = None
  all_fail_groups: Number = None
  zero_signal_groups: Number = None
  rows_with_signal: Number = None
  entropy: Number = None
  response_length: Number = None
  stopped: Number = None
  rollouts: Count | None = None
  grad_norm: Number = None
  own: Ratios = msgspec.field(default_factory=Ratios)
  peer: Ratios = msgspec.field(default_factory=Ratios)
  mismatch: Ratios = msgspec.field(default_factory=Ratios)
  peer_rows: Number = None
  rescue_rate: Number = None
  rescued_by: dict[str, float] = {}
  compatibility: Number = None
  admitted: Number = None
  capability: dict[str, float] = {}
  refused: dict[str, Count] = {}
  exchange: ledger.Pairs = {}  # By sender.
  residuals: Residuals = {}  # By sender.
  heldout_accuracy: dict[str, float] = {}
  timing: Timing = msgspec.field(default_factory=Timing)


class Completion(msgspec.Struct, kw_only=True):
  """What a policy answered, and what came of it."""

  prompt: str
  completion: str
  answer: str = ''
  reward: Number = None
  verdict: str = ''
  finish: str = ''
  tokens: Count | None = None
  logp: Number = None


class Evaluation(msgspec.Struct, kw_only=True):
  """Accuracies of a policy after so many rounds, by family, and errors."""

  rounds: Count
  policy: str
  accuracy: dict[str, float]
  error: dict[str, Number] = {}
  best: list[Completion] = []
  worst: list[Completion] = []

  @property
  def overall(self) -> tuple[Number, Number]:
    """Accuracy of all prompts, and its error."""
    return self.accuracy.get(OVERALL), self.error.get(OVERALL)


class Part(msgspec.Struct, kw_only=True):
  """What a policy is, and where."""

  model: str = ''
  parameters: Count | None = None
  adapters: Count = 0
  vocabulary: Count | None = None
  tokenizer: str = ''
  devices: list[Count] = []
  mesh: dict[str, Count] = {}
  memory_bytes: Number = None
  load: Number = None


class Plan(msgspec.Struct, kw_only=True):
  devices: str = ''
  policies: dict[str, Part] = {}
  elsewhere: dict[str, str] = {}
  prompts_skipped: Count = 0


class BeforeAfter(msgspec.Struct, kw_only=True):
  before: dict[str, float]
  after: dict[str, float]


class OfPolicy(msgspec.Struct, kw_only=True):
  heldout_accuracy_by_family: BeforeAfter


class OfRun(msgspec.Struct, kw_only=True):
  seconds: Number = None
  waited: dict[str, float] = {}


class Summary(msgspec.Struct, kw_only=True):
  """The part of `summary.json` that is shown."""

  rounds: Count
  timing: OfRun = msgspec.field(default_factory=OfRun)
  policies: dict[str, OfPolicy] = {}
  exchange: ledger.Pairs = {}
  sent: ledger.Pairs = {}
  refusals: dict[str, dict[str, Count]] = {}
  messages_refused: dict[str, Count] = {}
  residuals: Residuals = {}


class Settings(
  msgspec.Struct,
  kw_only=True,
  rename={
    'method': 'method.name',
    'rounds': 'train.rounds',
    'kl_weight': 'method.kl_weight',
    'clip_low': 'method.clip_low',
    'clip_high': 'method.clip_high',
  },
):
  """The part of `config.json` that decides what is shown."""

  method: str = ''
  seed: int | None = None
  rounds: Count | None = None
  kl_weight: Number = None
  clip_low: Number = None
  clip_high: Number = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """What there is of a run.

  Attributes:
    folder: its work dir, as it was given.
    written: when the newest of its files was; None if there is none.
    config: flat, as it is in the file.
    settings: the same, as far as the page depends on them.
    plan: None if it is not known.
    rows: of each policy, in the order of rounds.
    evaluations: of each policy, in the order of rounds.
    summary: None if there is none, or it is older than the rows.
    problems: what is missing or was left out, and why.
  """

  folder: str
  written: datetime.datetime | None
  config: Mapping[str, object]
  settings: Settings
  plan: Plan | None
  rows: Mapping[str, Sequence[Row]]
  evaluations: Mapping[str, Sequence[Evaluation]]
  summary: Summary | None
  problems: Sequence[str]

  @functools.cached_property
  def policies(self) -> list[str]:
    """That train here."""
    planned = self.plan.policies if self.plan else {}
    return sorted({*planned, *self.rows, *self.evaluations})

  @functools.cached_property
  def names(self) -> list[str]:
    """Of all policies, those that train elsewhere among them."""
    pairs = [*self.fates(), *self.residuals()]
    told = {name for pair in pairs for name in pair.split('->')}
    for _, row in self._all_rows():
      told.update(row.rescued_by, row.residuals)
    elsewhere = told.union(self.plan.elsewhere if self.plan else ())
    return [*self.policies, *sorted(elsewhere - {*self.policies})]

  @property
  def rounds(self) -> int:
    """That are done."""
    done = [rows[-1].round + 1 for rows in self.rows.values()]
    done += [found[-1].rounds for found in self.evaluations.values()]
    return max([*done, self.summary.rounds if self.summary else 0])

  @property
  def state(self) -> str:
    planned = self.settings.rounds
    of = f' of {planned:,}' if planned is not None else ''
    if self.summary and (planned is None or self.rounds >= planned):
      return f'finished, {self.rounds:,} rounds'
    if not self.rounds:
      return f'before its first round{of}'
    return f'after {self.rounds:,}{of} rounds: it still runs, or was stopped'

  @property
  def seconds(self) -> float | None:
    """Since it began."""
    if self.summary and self.summary.timing.seconds is not None:
      return self.summary.timing.seconds
    elapsed = [r.timing.elapsed for rows in self.rows.values() for r in rows]
    return max((s for s in elapsed if s is not None), default=None)

  @functools.cached_property
  def process(self) -> list[Row]:
    """A row for each round, of policies that take their time together."""
    rows = {r.round: r for rows in self.rows.values() for r in rows}
    return [rows[round] for round in sorted(rows)]

  def phases(self) -> dict[str, float]:
    """Seconds of the run by phase, the start among them; empty if not told."""
    totals = {}
    for row in self.process:
      for name, seconds in row.timing.phases.items():
        totals[name] = totals.get(name, 0.0) + seconds
    whole = len(self.process) == self.rounds  # No round is missing.
    if totals and whole and self.seconds is not None:
      totals = {'start': max(self.seconds - sum(totals.values()), 0), **totals}
    return totals

  def fates(self) -> ledger.Pairs:
    """What became of the records of each pair, by kind."""
    if self.summary:
      return {**self.summary.exchange, **self.summary.sent}
    return ledger.summed((name, row.exchange) for name, row in self._all_rows())

  def residuals(self) -> Residuals:
    """Of each direction."""
    if self.summary:
      return self.summary.residuals
    pairs = {}
    for receiver, row in self._all_rows():
      for sender, residual in row.residuals.items():
        pair = pairs.setdefault(f'{sender}->{receiver}', transfer.Residual())
        pair.add(residual)
    return pairs

  def rescues(self) -> dict[tuple[str, str], float]:
    """By (sender, receiver), the share of failed prompts that were solved.

    Of all prompts that a group of the receiver failed as a whole, so that
    rounds with more of them count for more.
    """
    sums = {}
    for receiver, row in self._all_rows():
      failed = row.all_fail_groups or 0.0
      for sender, share in row.rescued_by.items():
        sums.setdefault((sender, receiver), []).append((failed * share, failed))
    return {
      pair: sum(solved for solved, _ in shares) / total
      for pair, shares in sums.items()
      if (total := sum(failed for _, failed in shares)) > 0
    }

  def refusals(self) -> dict[str, dict[str, int]]:
    """What was refused, by who did and why: records, and in lessons."""
    found = {}
    if self.summary:
      found = {pair: {**why} for pair, why in self.summary.refusals.items()}
      if self.summary.messages_refused:
        found['messages'] = {**self.summary.messages_refused}
    for policy, row in self._all_rows():
      for reason, n in row.refused.items():
        if n:
          by_policy = found.setdefault(f'{policy}, in its lessons', {})
          by_policy[reason] = by_policy.get(reason, 0) + n
    return found

  def _all_rows(self):
    return [(name, row) for name, rows in self.rows.items() for row in rows]


def read(folder: str) -> Run:
  """Reads a work dir.

  Raises:
    InputError: it has none of the files of a run.
  """
  root, problems = pathlib.Path(folder), []
  there = [root / name for name in FILES if (root / name).is_file()]
  checks.require(
    bool(there),
    f'nothing of a run in {folder}: looked for {", ".join(FILES)}; give the '
    'work dir of a run',
  )
  config = _object(root / CONFIG, dict[str, object], problems) or {}
  settings = _attempt(problems, CONFIG, msgspec.convert, config, Settings)
  plan = _object(root / PLAN, Plan, problems)
  rows = {}
  for row in _lines(root / metrics.ROUNDS, Row, problems):
    rows.setdefault(row.policy, {})[row.round] = row
  rows = _in_order(rows)
  done = max(
    (of_policy[-1].round + 1 for of_policy in rows.values()), default=0
  )
  summary = _summary(root / SUMMARY, done, settings, problems)
  told = _lines(root / metrics.EVALUATIONS, Evaluation, problems)
  written = max(path.stat().st_mtime for path in there)
  return Run(
    folder=folder,
    written=datetime.datetime.fromtimestamp(written, datetime.UTC),
    config=config,
    settings=settings or Settings(),
    plan=plan,
    rows=rows,
    evaluations=_evaluations(rows, summary, told),
    summary=summary,
    problems=problems,
  )


def _summary(path, done, settings, problems) -> Summary | None:
  """What the file says, unless the run went on since."""
  planned = settings.rounds if settings else None
  if not path.exists() and planned is not None and done < planned:
    return None
  summary = _object(path, Summary, problems)
  if summary and summary.rounds < done:
    problems.append(
      f'{SUMMARY} left out: it is about {summary.rounds:,} rounds, of which '
      f'{metrics.ROUNDS} has {done:,}'
    )
    return None
  return summary


def _evaluations(rows, summary, told) -> dict[str, list[Evaluation]]:
  """Those that are told, and what other files say of the rest."""
  others = [
    (name, rounds, accuracy)
    for name, of_policy in (summary.policies if summary else {}).items()
    for rounds, accuracy in (
      (0, of_policy.heldout_accuracy_by_family.before),
      (summary.rounds, of_policy.heldout_accuracy_by_family.after),
    )
  ]
  others += [
    (name, row.round + 1, row.heldout_accuracy)
    for name, of_policy in rows.items()
    for row in of_policy
    if row.heldout_accuracy
  ]
  found = {}
  for name, rounds, accuracy in others:
    found.setdefault(name, {})[rounds] = Evaluation(
      rounds=rounds, policy=name, accuracy=accuracy
    )
  for one in told:
    found.setdefault(one.policy, {})[one.rounds] = one
  return _in_order(found)


def _in_order(by_policy):
  """Lists of what has a place, by policy."""
  return {
    name: [by_policy[name][place] for place in sorted(by_policy[name])]
    for name in sorted(by_policy)
  }


def _object(path, kind, problems):
  """What a file says; None, and a problem, if it is not there or damaged."""
  data = _data(path, problems)
  if data is None:
    return None
  return _attempt(problems, path.name, _decode, data, kind)


def _lines(path, kind, problems) -> list:
  """What the lines of a file say, but for those that are damaged."""
  *lines, last = (_data(path, problems) or b'').split(b'\n')
  found, odd = [], {}
  for i, line in enumerate(lines, 1):
    place = f'{path.name}, line {i}'
    told = odd.setdefault(place, [])
    found.append(_attempt(problems, place, _decode, line, kind, told.append))
  places = [place for place, told in odd.items() if told]
  if places:
    problems.append(
      f'{places[0]}: has numbers that are not finite, which are not shown'
      + f'; so have {len(places) - 1:,} more lines' * (len(places) > 1)
    )
  if last:
    problems.append(f'{path.name}, line {len(lines) + 1} left out: it is cut')
  return [one for one in found if one is not None]


def _data(path, problems) -> bytes | None:
  if not path.exists():
    problems.append(f'{path.name} is missing, and with it {FILES[path.name]}')
    return None
  return _attempt(problems, path.name, path.read_bytes)


def _attempt(problems, what, function, *arguments):
  """What a function gives; None, and a problem, if something is damaged."""
  try:
    return function(*arguments)
  except json.JSONDecodeError as error:
    why = f'not JSON, {error.msg} at character {error.pos + 1}'
  except RecursionError:
    why = 'it is nested too deeply'
  except (ValueError, OSError) as error:
    why = f'{error}'
  problems.append(f'{what} left out: {why}')
  return None


def _decode(data, kind, tell=lambda name: None):
  """A value of JSON; of numbers that are not finite, the names are told."""

  def constant(name):
    tell(name)
    return float(name)

  value = json.loads(data, parse_int=_integer, parse_constant=constant)
  return msgspec.convert(value, kind)


def _integer(digits: str) -> int:
  if len(digits) > _DIGITS:
    raise ValueError(f'an integer of {len(digits):,} digits')
  return int(digits)
