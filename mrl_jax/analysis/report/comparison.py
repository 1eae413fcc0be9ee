"""A page that compares several runs."""

import collections
from collections.abc import Mapping, Sequence
import itertools
import json
import pathlib

from mrl_jax import checks
from mrl_jax import config as config_lib
from mrl_jax import files
from mrl_jax.analysis import run as run_lib
from mrl_jax.analysis.figures import style
from mrl_jax.analysis.report import charts
from mrl_jax.analysis.report import drawing
from mrl_jax.analysis.report import html
from mrl_jax.analysis.report import page

Runs = Mapping[str, run_lib.Run]  # By label.

_FIELDS = (
  'reward', 'all_fail_groups', 'own.kl', 'entropy', 'response_length',
  'grad_norm',
)  # fmt: skip
_CURVES = [
  charts.HELDOUT,
  *(c for c in (*charts.LEARNING, *charts.UPDATES) if c.field in _FIELDS),
]


def write(folders: Sequence[str], path: str) -> str:
  """Writes the comparison of the runs in `folders` to `path`; returns it.

  Raises InputError if a folder is not the work dir of a run, or given twice.
  """
  runs = dict(zip(labels(folders), map(run_lib.read, folders), strict=True))
  files.write(path, render(runs))
  return path


def labels(folders: Sequence[str]) -> list[str]:
  """The shortest ends of the paths that tell them apart."""
  paths = [pathlib.Path(folder).resolve().parts for folder in folders]
  for i, j in itertools.combinations(range(len(paths)), 2):
    checks.require(
      paths[i] != paths[j],
      f'{folders[j]} is the same run as {folders[i]}; give each run once',
    )
  size = next(
    n for n in itertools.count(1) if len({p[-n:] for p in paths}) == len(paths)
  )
  return ['/'.join(path[-size:]).replace('//', '/') for path in paths]


def render(runs: Runs) -> str:
  """The page, as HTML that needs no other file."""
  results = {label: page.results(run) for label, run in runs.items()}
  policies = sorted({name for of_run in results.values() for name in of_run})
  return html.render(
    'comparison.html',
    runs=runs,
    styles={label: style.line_style(i) for i, label in enumerate(runs)},
    problems=[
      f'{label}: {problem}'
      for label, run in runs.items()
      for problem in run.problems
    ],
    policies=policies,
    accuracies={
      label: {
        'mean': page.mean(of_run),
        **{name: overall for name, (overall, *_) in of_run.items()},
      }
      for label, of_run in results.items()
    },
    means=over_rounds(runs, _CURVES),
    of_policies={
      policy: over_rounds(runs, (charts.HELDOUT, charts.LEARNING[0]), policy)
      for policy in policies
    },
    differences=differences(runs),
    longest=max(run.seconds or 0 for run in runs.values()),
    parts={
      label: page.stack(run.phases(), charts.PHASES)
      for label, run in runs.items()
    },
    phases={
      phase: style.area_style(i)
      for i, phase in enumerate(charts.PHASES)
      if any(phase in run.phases() for run in runs.values())
    },
    total=run_lib.total,
  )


def over_rounds(
  runs: Runs, curves: Sequence[charts.Curve], policy: str | None = None
) -> list[drawing.Chart | charts.Absent]:
  """Charts with a line for each run: of a policy, or the mean of all.

  Runs that lack a curve are named with the reason.
  """
  drawn = []
  for curve in curves:
    series, absent = [], collections.defaultdict(list)
    for i, (label, run) in enumerate(runs.items()):
      names = run.policies if policy is None else {policy} & {*run.policies}
      points = means([curve.points(run, name) for name in names])
      line = drawing.line(label, style.line_style(i), points, curve.factor)
      series += line
      if not line:
        absent[curve.absent(run).why].append(label)
    drawn += [curve.chart(series)] * bool(series)
    drawn += [
      charts.Absent(f'{curve.title} of {", ".join(labels_of_runs)}', why)
      for why, labels_of_runs in absent.items()
    ]
  return drawn


def means(points: Sequence[Sequence[tuple]]) -> list[tuple]:
  """Means over policies, at the places where the points of all are known.

  The error is the mean of the errors, an upper bound.
  """
  by_place = {}
  for place, *value_and_error in itertools.chain(*points):
    by_place.setdefault(place, []).append(value_and_error)
  return [
    (place, *map(page.mean_of_all, zip(*values, strict=True)))
    for place, values in sorted(by_place.items())
    if len(values) == len(points)
  ]


def differences(runs: Runs) -> dict[str, list[str | None]]:
  """The keys in which known configs differ, with the value of each run as JSON.

  None marks a run without the key. Places of files and hosts are left out.
  """
  configs = [
    {
      key: json.dumps(value, ensure_ascii=False)
      for key, value in config_lib.without_places(run.config).items()
    }
    for run in runs.values()
  ]
  return {
    key: [config.get(key) for config in configs]
    for key in sorted({key for config in configs for key in config})
    if len({config.get(key) for config in configs if config}) > 1
  }
