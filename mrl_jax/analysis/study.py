"""Compares methods, from what their runs wrote.

  found = study.read('runs/study', ['grpo', 'prp'], seeds=[0, 1, 2])
  for arm in study.compare(found.runs, baseline='grpo'):
    print(arm.name, arm.after, arm.difference)

An arm is a method with its settings, and has a run for each seed. Arms that
share a seed share their warm starts and prompts, so that they are compared by
the differences of such pairs. A run counts once it is whole; of every other
one it is told what it lacks.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
import dataclasses
import itertools
import json
import math
import os
import types

import msgspec
import numpy as np

from mrl_jax import checks
from mrl_jax import config as config_lib
from mrl_jax.training import metrics

_TENTHS = 10  # The share of prompts out of reach is compared over a tenth.


def workdir(out: str, arm: str, seed: int) -> str:
  """Where the run of an arm and a seed is."""
  return os.path.join(out, arm, f'seed-{seed}')


class Timing(msgspec.Struct, kw_only=True):
  """Of a run, or of a round."""

  seconds: float


class Row(msgspec.Struct, kw_only=True):
  """The part of a row of `metrics.jsonl` that a study is about."""

  round: int
  policy: str
  accuracy: float
  all_fail_groups: float
  grad_norm: float
  timing: Timing
  heldout_accuracy: dict[str, float] = {}
  rollouts: int | None = None  # Sampled, where that is not the config's.
  rescue_rate: float | None = None


class Accuracy(msgspec.Struct, kw_only=True):
  """Before and after the rounds."""

  before: float
  after: float


class Policy(msgspec.Struct, kw_only=True):
  """What `summary.json` says of a policy."""

  heldout_accuracy: Accuracy


class Summary(msgspec.Struct, kw_only=True):
  """The part of `summary.json` that a study is about."""

  rounds: int
  timing: Timing
  policies: dict[str, Policy]


class Settings(
  msgspec.Struct,
  kw_only=True,
  rename={
    'rounds': 'train.rounds',
    'prompts': 'train.prompts',
    'samples': 'train.samples',
    'devices': 'mwra.emulated_devices',
  },
):
  """The part of `config.json` that says how much a run does, and on what."""

  rounds: int
  prompts: int
  samples: int
  devices: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """A run that is whole. Accuracies and rates are shares, from 0 to 1.

  Attributes:
    config: what decides it but for the seed, flat.
    before: held-out accuracy of each policy after the warm start.
    after: the same after the last round.
    rollouts: that all policies sampled to learn from.
    seconds: of the whole run, with the warm start unless it was cached.
    round_seconds: median over the rounds, without what comes before them.
    devices: that were emulated.
    accuracy_R: on the prompts of each round, mean of the policies.
    heldout: held-out accuracy by rounds done, mean of the policies.
    fall: of the share of prompts that no sample solves, from the first tenth
      of the rounds to the last, mean of the policies.
    rescue: mean rescue rate; None where the metrics have none.
    unsteadiness: standard deviation over rounds of the gradient's norm, over
      its mean, mean of the policies; None where there is none.
  """

  config: Mapping[str, object]
  before: Mapping[str, float]
  after: Mapping[str, float]
  rollouts: int
  seconds: float
  round_seconds: float
  devices: int
  accuracy_R: np.ndarray
  heldout: Mapping[int, float]
  fall: float
  rescue: float | None
  unsteadiness: float | None


def read_run(folder: str) -> Run:
  """Reads a work dir.

  Raises:
    InputError: the run is not whole; the message says what it lacks.
  """
  checks.require(os.path.isdir(folder), 'not begun')
  config = _part(folder, 'config.json', _read_json, dict[str, object])
  settings = _part(folder, 'config.json', _read_json, Settings)
  rows = _part(folder, 'metrics.jsonl', metrics.read, list[Row])
  played = max((row.round + 1 for row in rows), default=0)
  checks.require(
    os.path.exists(os.path.join(folder, 'summary.json')),
    f'stopped after {played:,} of {settings.rounds:,} rounds',
  )
  summary = _part(folder, 'summary.json', _read_json, Summary)
  checks.require(
    summary.rounds == settings.rounds,
    f'summary.json: {summary.rounds:,} rounds, and {settings.rounds:,} in '
    'config.json',
  )
  by_policy = _by_policy(rows, summary)
  sampled = settings.prompts * settings.samples
  accuracy_NR = [[row.accuracy for row in n] for n in by_policy.values()]
  seconds_NR = [[row.timing.seconds for row in n] for n in by_policy.values()]
  before, after = (
    {n: getattr(p.heldout_accuracy, at) for n, p in summary.policies.items()}
    for at in ('before', 'after')
  )
  return Run(
    config=but_for_seed(config),
    before=before,
    after=after,
    rollouts=sum(sampled if r.rollouts is None else r.rollouts for r in rows),
    seconds=summary.timing.seconds,
    round_seconds=float(np.median(np.max(seconds_NR, 0))),
    devices=settings.devices,
    accuracy_R=np.mean(accuracy_NR, 0),
    heldout={0: _mean(before.values()), **_heldout(by_policy)},
    fall=_mean(map(_fall, by_policy.values())),
    rescue=_mean(row.rescue_rate for row in rows),
    unsteadiness=_mean(map(_unsteadiness, by_policy.values())),
  )


def but_for_seed(config: Mapping[str, object]) -> dict[str, object]:
  """The part of a flat config that all runs of an arm have in common.

  The digest of what a run read is left out too: the seed draws held-out
  prompts.
  """
  config = config_lib.without_places(config)
  return {k: v for k, v in config.items() if k not in ('seed', 'inputs')}


def _part(folder, name, function, kind):
  """What a file of a run says; if it is damaged, its name is told."""
  try:
    return msgspec.convert(function(os.path.join(folder, name)), kind)
  except (ValueError, OSError) as error:
    raise checks.InputError(f'{name}: {error}') from error


def _read_json(path):
  with open(path, encoding='utf-8') as f:
    return json.load(f)


def _by_policy(rows, summary) -> dict[str, list[Row]]:
  """The rows of each policy, one for each round."""
  by_policy = {name: [] for name in summary.policies}
  checks.require(bool(by_policy), 'summary.json: no policies')
  for row in rows:
    by_policy.setdefault(row.policy, []).append(row)
  for name, of_policy in by_policy.items():
    checks.require(
      [row.round for row in of_policy] == [*range(summary.rounds)],
      f'metrics.jsonl: {len(of_policy):,} rows of {name}; it takes one for '
      f'each of {summary.rounds:,} rounds',
    )
  return by_policy


def _heldout(by_policy) -> dict[int, float]:
  """By rounds done, mean of the policies."""
  heldout = {}
  for rows in zip(*by_policy.values(), strict=True):
    if all('all' in row.heldout_accuracy for row in rows):
      accuracy = _mean(row.heldout_accuracy['all'] for row in rows)
      heldout[rows[0].round + 1] = accuracy
  return heldout


def _fall(rows) -> float:
  share_R = [row.all_fail_groups for row in rows]
  tenth = max(len(rows) // _TENTHS, 1)
  return float(np.mean(share_R[:tenth]) - np.mean(share_R[-tenth:]))


def _unsteadiness(rows) -> float | None:
  norm_R = np.array([row.grad_norm for row in rows])
  if len(norm_R) < 2 or not norm_R.any():
    return None
  return float(norm_R.std(ddof=1) / norm_R.mean())


def _mean(values: Iterable[float | None]) -> float | None:
  """Of those that are known; None if none is."""
  known = [value for value in values if value is not None]
  return float(np.mean(known)) if known else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
  """What there is of a study.

  Attributes:
    runs: that are whole, by arm and seed.
    missing: what every other one lacks, by arm and seed.
  """

  runs: Mapping[str, Mapping[int, Run]]
  missing: Mapping[tuple[str, int], str]


def read(
  out: str,
  arms: Collection[str],
  seeds: Collection[int],
  failed: Mapping[tuple[str, int], str] = types.MappingProxyType({}),
) -> Study:
  """Reads the runs of all arms and seeds.

  Args:
    out: the folder of the study.
    arms: names of its folders.
    seeds: of each.
    failed: runs that are missing whatever is there, and why.

  Runs of an arm must have the same config but for the seed; one that differs
  from the first is missing.
  """
  runs, missing = {arm: {} for arm in arms}, {}
  for arm, seed in itertools.product(arms, seeds):
    try:
      checks.require((arm, seed) not in failed, failed.get((arm, seed), ''))
      run = read_run(workdir(out, arm, seed))
      for other, first in list(runs[arm].items())[:1]:
        differ = changes(first.config, run.config)
        checks.require(
          not differ,
          f'its config is not that of seed {other}: {", ".join(differ)}',
        )
      runs[arm][seed] = run
    except checks.InputError as error:
      missing[arm, seed] = f'{error}'
  return Study(runs=runs, missing=missing)


def changes(
  one: Mapping[str, object], other: Mapping[str, object]
) -> dict[str, object]:
  """Where flat configs differ, and what the other one says there."""
  return {
    key: other.get(key)
    for key in sorted({*one, *other})
    if one.get(key) != other.get(key)
  }


@dataclasses.dataclass(frozen=True)
class Estimate:
  """A mean over seeds.

  Attributes:
    mean: of the sample.
    error: its standard error, s / sqrt(count), where s divides by count - 1;
      None for one seed, which cannot tell it.
    count: how many seeds.
  """

  mean: float
  error: float | None
  count: int

  @property
  def ratio(self) -> float | None:
    """Student's t of the mean against 0; None where it is not defined."""
    return self.mean / self.error if self.error else None


def estimate(values: Iterable[float | None]) -> Estimate | None:
  """Of those values that are known; None if none is."""
  known = [value for value in values if value is not None]
  if not known:
    return None
  error = None
  if len(known) > 1:
    error = float(np.std(known, ddof=1)) / math.sqrt(len(known))
  return Estimate(float(np.mean(known)), error, len(known))


def paired(
  runs: Mapping[int, Run],
  baseline: Mapping[int, Run],
  value: Callable[[Run], float],
) -> Estimate | None:
  """The differences to a baseline, over the seeds that both have."""
  shared = [seed for seed in runs if seed in baseline]
  return estimate(value(runs[seed]) - value(baseline[seed]) for seed in shared)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
  """An arm beside the baseline; `Run` says what the figures are.

  Attributes:
    name: its label.
    seeds: that it has.
    other_starts: those of them with another accuracy than the baseline before
      the first round: their warm starts or held-out prompts are not the same.
    changes: how its config differs from the baseline's.
    before: held-out accuracy, mean of the policies.
    after: the same after the last round.
    policies: the same of each.
    difference: of `after` to the baseline's, paired by seed; None for the
      baseline, and without a seed in common.
    area: mean training accuracy of all rounds: what is under the learning
      curve, as a share of what could be.
    rollouts: of a run.
    more_rollouts: than the baseline's, as a share of those; 0 if equal.
    seconds: of a run.
    device_seconds: the same, times the devices.
    round_seconds: of a round.
    devices: that were emulated.
    fall: support, which every arm has.
    rescue: support, where the metrics tell it.
    unsteadiness: the reverse of stability.
  """

  name: str
  seeds: Sequence[int]
  other_starts: Sequence[int]
  changes: Mapping[str, object]
  before: Estimate
  after: Estimate
  policies: Mapping[str, Estimate]
  difference: Estimate | None
  area: Estimate
  rollouts: float
  more_rollouts: float | None
  seconds: Estimate
  device_seconds: Estimate
  round_seconds: Estimate
  devices: int
  fall: Estimate
  rescue: Estimate | None
  unsteadiness: Estimate | None


def compare(runs: Mapping[str, Mapping[int, Run]], baseline: str) -> list[Arm]:
  """Every arm that has a run beside the baseline, which may have none."""
  base = runs.get(baseline, {})
  return [
    _arm(name, of_arm, {} if name == baseline else base, base)
    for name, of_arm in runs.items()
    if of_arm
  ]


def _arm(name, runs, others, baseline) -> Arm:
  one, *_ = runs.values()
  base_config = next((r.config for r in baseline.values()), one.config)
  rollouts = _mean(run.rollouts for run in runs.values())
  fewer = _mean(run.rollouts for run in baseline.values())

  def over_seeds(value):
    return estimate(value(run) for run in runs.values())

  return Arm(
    name=name,
    seeds=list(runs),
    other_starts=[
      seed
      for seed, run in runs.items()
      if seed in baseline and run.before != baseline[seed].before
    ],
    changes=changes(base_config, one.config),
    before=over_seeds(lambda run: _mean(run.before.values())),
    after=over_seeds(_after),
    policies={
      policy: over_seeds(lambda run, policy=policy: run.after.get(policy))
      for policy in one.after
    },
    difference=paired(runs, others, _after),
    area=over_seeds(lambda run: float(run.accuracy_R.mean())),
    rollouts=rollouts,
    more_rollouts=rollouts / fewer - 1 if fewer else None,
    seconds=over_seeds(lambda run: run.seconds),
    device_seconds=over_seeds(lambda run: run.seconds * run.devices),
    round_seconds=over_seeds(lambda run: run.round_seconds),
    devices=one.devices,
    fall=over_seeds(lambda run: run.fall),
    rescue=over_seeds(lambda run: run.rescue),
    unsteadiness=over_seeds(lambda run: run.unsteadiness),
  )


def _after(run: Run) -> float:
  return _mean(run.after.values())


def smooth(values_R: np.ndarray, width: int) -> np.ndarray:
  """Means over a window around every round, narrower towards the ends."""
  box = np.ones(min(width, len(values_R)))
  return np.convolve(values_R, box, 'same') / np.convolve(
    np.ones(len(values_R)), box, 'same'
  )


def curve(
  runs: Collection[Run], width: int
) -> tuple[np.ndarray, np.ndarray | None]:
  """The smoothed learning curve, and its standard error over seeds."""
  smooth_SR = np.array([smooth(run.accuracy_R, width) for run in runs])
  estimates = [estimate(values) for values in smooth_SR.T]
  mean_R = np.array([e.mean for e in estimates])
  if len(runs) < 2:
    return mean_R, None
  return mean_R, np.array([e.error for e in estimates])


def heldout(runs: Collection[Run]) -> dict[int, Estimate]:
  """Held-out accuracy over seeds, by rounds done."""
  done = sorted({rounds for run in runs for rounds in run.heldout})
  return {n: estimate(run.heldout.get(n) for run in runs) for n in done}
