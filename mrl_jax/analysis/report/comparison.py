"""A page on which runs stand side by side."""

import collections
from collections.abc import Mapping, Sequence
import itertools
import json
import pathlib

from mrl_jax import checks
from mrl_jax import config as config_lib
from mrl_jax import files
from mrl_jax.analysis import run as run_lib
from mrl_jax.analysis.report import charts
from mrl_jax.analysis.report import drawing
from mrl_jax.analysis.report import html
from mrl_jax.analysis.report import page
from mrl_jax.thl import transfer

Runs = Mapping[str, run_lib.Run]  # By label.

_FIELDS = (
  'reward', 'all_fail_groups', 'own.kl', 'entropy', 'response_length',
  'grad_norm',
)  # fmt: skip
_CURVES = [
  curve
  for curve in (*charts.LEARNING, *charts.UPDATES)
  if curve.field in _FIELDS
]
_REWARD = next(curve for curve in _CURVES if curve.field == 'reward')


def write(workdirs: Sequence[str], path: str) -> str:
  """Writes the comparison of runs to `path`, and returns it.

  Raises:
    InputError: there is nothing of a run in one of them, or one is given twice.
  """
  names = labels(workdirs)
  runs = {
    name: run_lib.read(folder)
    for name, folder in zip(names, workdirs, strict=True)
  }
  files.write(path, render(runs))
  return path


def labels(folders: Sequence[str]) -> list[str]:
  """As much of the end of each path as tells them apart."""
  paths = [pathlib.Path(folder).resolve().parts for folder in folders]
  for one, other in itertools.combinations(range(len(paths)), 2):
    checks.require(
      paths[one] != paths[other],
      f'{folders[other]} is the run {folders[one]} again; give each run once',
    )
  size = next(
    n for n in itertools.count(1) if len({p[-n:] for p in paths}) == len(paths)
  )
  return ['/'.join(path[-size:]).replace('//', '/') for path in paths]


def render(runs: Runs) -> str:
  """The page, as HTML that needs no other file."""
  found = {label: page.results(run) for label, run in runs.items()}
  policies = sorted({one.policy for of_run in found.values() for one in of_run})
  problems = [
    f'{label}: {problem}'
    for label, run in runs.items()
    for problem in run.problems
  ]
  times = {
    label: (page.round_seconds(run), page.stack(run.phases(), charts.PHASES))
    for label, run in runs.items()
  }
  return html.render(
    'comparison.html',
    runs=runs,
    styles={label: drawing.line_style(i) for i, label in enumerate(runs)},
    problems=problems[: page.MOST],
    more_problems=max(len(problems) - page.MOST, 0),
    policies=policies,
    accuracies={
      label: {
        'mean': page.mean(of_run),
        **{one.policy: one.overall for one in of_run},
      }
      for label, of_run in found.items()
    },
    means=[
      *heldout(runs),
      *(chart for curve in _CURVES for chart in over_rounds(runs, curve)),
    ],
    of_policies={
      name: [*heldout(runs, name), *over_rounds(runs, _REWARD, name)]
      for name in policies
    },
    differences=differences(runs),
    longest=max(run.seconds or 0 for run in runs.values()),
    times=times,
    phases={
      phase: drawing.area_style(i)
      for i, phase in enumerate(charts.PHASES)
      if any(phase in run.phases() for run in runs.values())
    },
    records={label: records(run) for label, run in runs.items()},
    residuals={label: residual(run) for label, run in runs.items()},
  )


def over_rounds(
  runs: Runs, curve: charts.Curve, policy: str | None = None
) -> list[drawing.Chart | charts.Absent]:
  """A curve of all runs: of a policy, or the mean of those of each run."""
  series, absent = [], {}
  for i, (label, run) in enumerate(runs.items()):
    points = [
      curve.points(rows)
      for name, rows in run.rows.items()
      if policy in (None, name)
    ]
    lines = drawing.line(
      label, drawing.line_style(i), means(points), curve.factor
    )
    series += lines
    if not lines:
      absent.setdefault(curve.absent(run).why, []).append(label)
  return _with_absent(curve.title, curve.chart(series), absent)


def heldout(
  runs: Runs, policy: str | None = None
) -> list[drawing.Chart | charts.Absent]:
  """Held-out accuracy of all runs, as `over_rounds`."""
  series, absent = [], {}
  for i, (label, run) in enumerate(runs.items()):
    points = [
      [(one.rounds, *one.overall) for one in found]
      for name, found in run.evaluations.items()
      if policy in (None, name)
    ]
    lines = drawing.line(label, drawing.line_style(i), means(points), 100)
    series += lines
    if not lines:
      absent.setdefault('there was no evaluation', []).append(label)
  chart = drawing.Chart(series=series, **charts.HELDOUT)
  return _with_absent(chart.title, chart, absent)


def means(points: Sequence[Sequence[tuple]]) -> list[tuple]:
  """Points of the mean of policies, where the points of all are known.

  The error is the most that it can be, which is the mean of the errors.
  """
  by_place = {}
  for place, *value_and_error in itertools.chain(*points):
    by_place.setdefault(place, []).append(value_and_error)
  return [
    (place, *map(page.mean_of_all, zip(*values, strict=True)))
    for place, values in sorted(by_place.items())
    if len(values) == len(points)
  ]


def _with_absent(title, chart, absent):
  """A chart that may have no series, and whose are not there, by reason."""
  return [chart] * bool(chart.series) + [
    charts.Absent(f'{title} of {", ".join(labels)}', why)
    for why, labels in absent.items()
  ]


def differences(runs: Runs) -> dict[str, list[str | None]]:
  """The keys in which configs differ, and what each says; None is nothing.

  Where things are is no difference.
  """
  told = [
    {
      key: json.dumps(value, ensure_ascii=False)
      for key, value in config_lib.without_places(run.config).items()
    }
    for run in runs.values()
  ]
  keys = sorted({key for values in told for key in values})
  found = {key: [values.get(key) for values in told] for key in keys}
  return {
    key: values
    for key, values in found.items()
    if len({v for v, of in zip(values, told, strict=True) if of}) > 1
  }


def records(run: run_lib.Run) -> dict[str, int]:
  """Counts of records of all pairs and kinds, by what became of them."""
  counts = collections.Counter()
  for kinds in run.fates().values():
    for of_kind in kinds.values():
      counts.update(of_kind)
  return counts


def residual(run: run_lib.Run) -> transfer.Residual:
  """Of all directions."""
  total = transfer.Residual()
  for one in run.residuals().values():
    total.add(one)
  return total
