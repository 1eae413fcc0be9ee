"""Compares methods by the runs of a study.

  found = study.read('runs/study', ['grpo', 'prp'], seeds=[0, 1, 2])
  for arm in study.compare(found.runs, baseline='grpo'):
    print(arm.name, arm.after, arm.difference)

An arm is a method with its settings, and has a run for each seed. Runs of
different arms that share a seed share their warm starts and prompts, so that
arms are compared by paired differences. Only complete runs count; for each
other run, `Study.missing` has the reason.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
import dataclasses
import itertools
import math
import operator
import os
import types

import numpy as np

from mrl_jax import checks
from mrl_jax import config as config_lib
from mrl_jax import workdir
from mrl_jax.analysis import run as run_lib

# Families of prompts, by the policies whose warm start demonstrated them: all
# policies, the policy itself, or only a peer.
KINDS = ('formulas', 'own words', "peer's words")
_TENTHS = 10  # `fall` compares the first tenth of the rounds with the last.


def folder(out: str, arm: str, seed: int) -> str:
  """The work dir of the run of an arm and a seed, in the folder of a study."""
  return os.path.join(out, arm, f'seed-{seed}')


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompleteRun:
  """The numbers of a complete run. Accuracies and rates are from 0 to 1."""

  config: Mapping[str, object]  # Flat, without seed and places.
  before: Mapping[str, float]  # Held-out accuracy by policy, at the start.
  after: Mapping[str, float]  # The same after the last round.
  kinds_before: Mapping[str, float]  # By `KINDS`, mean of families, policies.
  kinds_after: Mapping[str, float]
  rollouts: int  # That all policies sampled for training.
  seconds: float  # Of the whole run, with the warm start unless it was cached.
  round_seconds: float  # Median over the rounds.
  devices: int  # Emulated devices.
  accuracy_R: np.ndarray  # On the prompts of each round, mean of the policies.
  heldout: Mapping[int, float]  # By rounds done, mean of the policies.
  # Decrease of the share of prompts that no sample solves, from the first tenth
  # of the rounds to the last, mean of the policies.
  fall: float
  rescue: float | None  # Mean rescue rate; None if the metrics have none.
  # Standard deviation of the gradient norm over rounds, divided by its mean,
  # mean of the policies; None if undefined.
  unsteadiness: float | None


def read_run(path: str) -> CompleteRun:
  """Reads a work dir; raises InputError with why the run is not complete."""
  checks.require(os.path.isdir(path), 'not started')
  run = run_lib.read(path)
  planned, devices = run.settings.rounds, run.settings.devices
  _require(run, workdir.SETUP, planned and devices, 'rounds or devices unknown')
  checks.require(
    os.path.exists(os.path.join(path, workdir.SUMMARY)),
    f'stopped after {run.rounds:,} of {planned:,} rounds',
  )
  summary = run.summary
  is_whole = summary and summary.policies and summary.timing.seconds is not None
  _require(run, workdir.SUMMARY, is_whole, 'policies or seconds unknown')
  checks.require(
    summary.rounds == planned,
    f'{workdir.SUMMARY}: {summary.rounds:,} rounds, but {planned:,} in '
    f'{workdir.SETUP}',
  )
  rows_NR = _rows(run)
  accuracy_NR, failed_NR, norm_NR, seconds_NR, rollouts_NR = np.moveaxis(
    np.array([[_numbers(row) for row in rows] for rows in rows_NR]), -1, 0
  )
  policies = summary.policies.items()
  before = {name: p.heldout_accuracy.before for name, p in policies}
  heldout_R = [
    [row.heldout_accuracy.get(workdir.OVERALL) for row in rows]
    for rows in zip(*rows_NR, strict=True)
  ]
  tenth = max(planned // _TENTHS, 1)
  failed_R = failed_NR.mean(0)
  return CompleteRun(
    config=without_seed(run.config),
    before=before,
    after={name: p.heldout_accuracy.after for name, p in policies},
    kinds_before=_kinds(run, 'before'),
    kinds_after=_kinds(run, 'after'),
    rollouts=int(rollouts_NR.sum()),
    seconds=summary.timing.seconds,
    round_seconds=float(np.median(seconds_NR.max(0))),
    devices=devices,
    accuracy_R=accuracy_NR.mean(0),
    heldout={0: _mean(before.values())}
    | {r: _mean(n) for r, n in enumerate(heldout_R, 1) if None not in n},
    fall=float(failed_R[:tenth].mean() - failed_R[-tenth:].mean()),
    rescue=_mean(row.rescue_rate for row in run.all_rows),
    unsteadiness=_mean(map(_unsteadiness, norm_NR)),
  )


def without_seed(config: Mapping[str, object]) -> dict[str, object]:
  """The part of a flat config that all runs of an arm have in common."""
  config = config_lib.without_places(config)
  return {key: value for key, value in config.items() if key != 'seed'}


def _require(run, file, condition, otherwise) -> None:
  """Raises `InputError` with the problem of a file, unless `condition`."""
  problems = [problem for problem in run.problems if problem.startswith(file)]
  checks.require(bool(condition), [*problems, f'{file}: {otherwise}'][0])


# Numbers of a row that every study needs.
_numbers = operator.attrgetter(
  'accuracy', 'all_fail_groups', 'grad_norm', 'timing.seconds', 'rollouts'
)


def _rows(run) -> list[Sequence[workdir.RoundMetrics]]:
  """The rows of each policy; checks that there is one for each round."""
  by_policy = {**{name: [] for name in run.summary.policies}, **run.rows}
  for name, rows in by_policy.items():
    rounds = [row.round for row in rows if None not in _numbers(row)]
    _require(
      run,
      workdir.ROUNDS,
      rounds == [*range(run.summary.rounds)],
      f'{len(rounds):,} rows of {name} with all numbers; a complete run has '
      f'one for each of {run.summary.rounds:,} rounds',
    )
  return [*by_policy.values()]


def _kinds(run, when) -> dict[str, float]:
  """Held-out accuracy by `KINDS`; `when` is 'before' or 'after'."""
  accuracies = {kind: [] for kind in KINDS}
  for name, policy in run.summary.policies.items():
    shown = run.config.get(f'policies.{name}.warm_start_families', ())
    families = getattr(policy.heldout_accuracy_by_family, when)
    for family, accuracy in families.items():
      if '/' in family:  # Neither all families together, nor other data.
        kind = 1 if family in shown else 2
        kind = 0 if family.startswith('formula/') else kind
        accuracies[KINDS[kind]].append(accuracy)
  return {kind: _mean(values) for kind, values in accuracies.items() if values}


def _unsteadiness(norm_R) -> float | None:
  if len(norm_R) < 2 or not norm_R.any():
    return None
  return float(norm_R.std(ddof=1) / norm_R.mean())


def _mean(values: Iterable[float | None]) -> float | None:
  """The mean of the known values; None if none is known."""
  known = [value for value in values if value is not None]
  return float(np.mean(known)) if known else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
  """The runs of a study."""

  runs: Mapping[str, Mapping[int, CompleteRun]]  # Complete, by arm and seed.
  missing: Mapping[tuple[str, int], str]  # Why others are, by (arm, seed).


def read(
  out: str,
  arms: Collection[str],
  seeds: Collection[int],
  failed: Mapping[tuple[str, int], str] = types.MappingProxyType({}),
) -> Study:
  """Reads the runs of all arms and seeds in the folder of a study.

  A run whose config differs from the arm's first run, other than by the seed,
  is missing. Runs in `failed` are missing even if they can be read.
  """
  runs, missing = {arm: {} for arm in arms}, {}
  for arm, seed in itertools.product(arms, seeds):
    try:
      checks.require((arm, seed) not in failed, failed.get((arm, seed), ''))
      run = read_run(folder(out, arm, seed))
      other, first = next(iter(runs[arm].items()), (seed, run))
      differ = changes(first.config, run.config)
      checks.require(
        not differ,
        f'its config differs from that of seed {other} in {", ".join(differ)}',
      )
      runs[arm][seed] = run
    except checks.InputError as error:
      missing[arm, seed] = f'{error}'
  return Study(runs=runs, missing=missing)


def changes(
  old: Mapping[str, object], new: Mapping[str, object]
) -> dict[str, object]:
  """The keys in which two flat configs differ, with the values in `new`."""
  keys = sorted({*old, *new})
  return {key: new.get(key) for key in keys if old.get(key) != new.get(key)}


@dataclasses.dataclass(frozen=True)
class Estimate:
  """A mean over `count` seeds, and its standard error.

  The error is s / sqrt(count), where s divides by count - 1; None with one seed.
  """

  mean: float
  error: float | None
  count: int

  @property
  def ratio(self) -> float | None:
    """Student's t of the mean against 0; None if undefined."""
    return self.mean / self.error if self.error else None

  @property
  def percent(self) -> 'Estimate':
    """The estimate of the values times 100."""
    return Estimate(
      100 * self.mean, self.error and 100 * self.error, self.count
    )

  def __format__(self, form: str) -> str:
    """'40.6 ± 3.1' with '.1f', or '40.6 ± -' with one seed."""
    error = '-' if self.error is None else format(self.error, form.lstrip('+'))
    return f'{self.mean:{form}} ± {error}'


def estimate(values: Iterable[float | None]) -> Estimate | None:
  """Estimates the mean of the known values; None if none is known."""
  known = [value for value in values if value is not None]
  count, error = len(known), None
  if count > 1:
    error = float(np.std(known, ddof=1)) / math.sqrt(count)
  return Estimate(_mean(known), error, count) if known else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
  """An arm compared with the baseline.

  Estimates are over seeds; accuracies are means of the policies. `CompleteRun`
  describes the numbers of the same names.
  """

  name: str
  seeds: Sequence[int]  # Of its complete runs.
  # The seeds with another accuracy than the baseline before the first round;
  # their warm starts or held-out prompts are not the same.
  other_starts: Sequence[int]
  changes: Mapping[str, object]  # Keys that differ from the baseline's config.
  before: Estimate
  after: Estimate
  policies: Mapping[str, Estimate]  # `after` of each policy.
  kinds_before: Mapping[str, Estimate]
  kinds_after: Mapping[str, Estimate]
  # Of `after` to the baseline's, paired by seed; None for the baseline, and
  # without a common seed.
  difference: Estimate | None
  # Mean training accuracy of all rounds, the area under the learning curve as a
  # share of the largest possible.
  area: Estimate
  rollouts: float  # Of a run.
  more_rollouts: float | None  # Beyond the baseline's, as a share of those.
  seconds: Estimate
  device_seconds: Estimate  # Seconds of a run times the number of devices.
  round_seconds: Estimate
  devices: int
  fall: Estimate
  rescue: Estimate | None
  unsteadiness: Estimate | None


def compare(
  runs: Mapping[str, Mapping[int, CompleteRun]], baseline: str
) -> list[Arm]:
  """Compares every arm that has a run; the baseline may have none."""
  base = runs.get(baseline, {})
  return [
    _compare(name, runs_of_arm, base, paired=name != baseline)
    for name, runs_of_arm in runs.items()
    if runs_of_arm
  ]


def _compare(name, runs, base, paired) -> Arm:
  first, *_ = runs.values()
  reference, *_ = [*base.values(), first]
  rollouts, base_rollouts = (
    _mean(run.rollouts for run in some.values()) for some in (runs, base)
  )

  def over_seeds(value):
    return estimate(map(value, runs.values()))

  def by_key(field):
    return {
      key: over_seeds(lambda run, key=key: getattr(run, field).get(key))
      for key in getattr(first, field)
    }

  same = ('seconds', 'round_seconds', 'fall', 'rescue', 'unsteadiness')
  common = [seed for seed in runs if seed in base]
  return Arm(
    name=name,
    seeds=list(runs),
    other_starts=[s for s in common if runs[s].before != base[s].before],
    changes=changes(reference.config, first.config),
    before=over_seeds(lambda run: _mean(run.before.values())),
    after=over_seeds(_after),
    policies=by_key('after'),
    kinds_before=by_key('kinds_before'),
    kinds_after=by_key('kinds_after'),
    difference=estimate(
      _after(runs[s]) - _after(base[s]) for s in common if paired
    ),
    area=over_seeds(lambda run: float(run.accuracy_R.mean())),
    rollouts=rollouts,
    more_rollouts=rollouts / base_rollouts - 1 if base_rollouts else None,
    device_seconds=over_seeds(lambda run: run.seconds * run.devices),
    devices=first.devices,
    **{field: over_seeds(operator.attrgetter(field)) for field in same},
  )


def _after(run: CompleteRun) -> float:
  return _mean(run.after.values())
