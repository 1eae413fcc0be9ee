"""The page of a run: `report.html` in its work dir."""

from collections.abc import Collection, Iterable, Mapping, Sequence
import os
import statistics
from typing import NamedTuple

from mrl_jax import files
from mrl_jax.analysis import run as run_lib
from mrl_jax.analysis.report import charts
from mrl_jax.analysis.report import drawing
from mrl_jax.analysis.report import html
from mrl_jax.see import ledger

FILE = 'report.html'

MOST = 40  # Problems that are listed.
_LETTERS = 2_000  # Of a completion that are shown.


def write(workdir: str) -> str:
  """Writes the report of a run, as far as it has come; returns its path.

  Raises:
    InputError: there is nothing of a run in `workdir`.
  """
  path = os.path.join(workdir, FILE)
  files.write(path, render(run_lib.read(workdir)))
  return path


def render(run: run_lib.Run) -> str:
  """The page, as HTML that needs no other file."""
  found = results(run)
  return html.render(
    'page.html',
    run=run,
    title=name(run.folder),
    problems=run.problems[:MOST],
    more_problems=max(len(run.problems) - MOST, 0),
    legend=[(n, drawing.line_style(i)) for i, n in enumerate(run.names)],
    styles={n: drawing.line_style(i) for i, n in enumerate(run.names)},
    results=found,
    mean=mean(found),
    rows=[row for rows in run.rows.values() for row in rows],
    heldout=[charts.heldout(run)],
    learning=charts.of_rounds(run, learning(run)),
    updates=[
      *charts.of_rounds(run, charts.UPDATES),
      *charts.of_method(run),
      charts.histogram(run, 'own'),
      charts.histogram(run, 'peer'),
    ],
    exchange=[*charts.rescues(run), *charts.of_rounds(run, [charts.TAKEN])],
    thl=charts.residuals(run),
    time=[charts.phases(run), *charts.of_rounds(run, [charts.SPEED])],
    round_seconds=round_seconds(run),
    phases=stack(run.phases(), charts.PHASES),
    fates=[
      (pair, kind, counts, stack(ledger.befell(counts), charts.FATES))
      for pair, kinds in run.fates().items()
      for kind, counts in kinds.items()
    ],
    residuals=[
      (pair, one, stack(one.chunks, charts.CHUNKS))
      for pair, one in run.residuals().items()
    ],
    completions=completions(run),
    config=grouped(run.config),
    clip=clip,
    span=span,
  )


def name(folder: str, parts: int = 2) -> str:
  """The last parts of a path."""
  return '/'.join(os.path.abspath(folder).strip(os.sep).split(os.sep)[-parts:])


class Accuracy(NamedTuple):
  """Held-out accuracy of a family, and standard errors; None is not known."""

  family: str
  before: float | None
  before_error: float | None
  after: float | None
  after_error: float | None


class Result(NamedTuple):
  """What a policy could do when it began and at last.

  Attributes:
    policy: its name.
    began, ended: rounds that were done by then; None if there was but one
      evaluation.
    overall: of all prompts.
    families: of those of each.
  """

  policy: str
  began: int | None
  ended: int | None
  overall: Accuracy
  families: list[Accuracy]


def results(run: run_lib.Run) -> list[Result]:
  """Of each policy."""
  found = []
  for policy in run.policies:
    evaluations = run.evaluations.get(policy, [])
    first = evaluations[0] if evaluations else None
    last = evaluations[-1] if len(evaluations) > 1 else None
    both = [one for one in (first, last) if one]
    names = sorted({name for one in both for name in one.accuracy})
    accuracies = [
      Accuracy(
        name,
        *(
          getattr(one, field).get(name) if one else None
          for one in (first, last)
          for field in ('accuracy', 'error')
        ),
      )
      for name in [run_lib.OVERALL, *names]
    ]
    found.append(
      Result(
        policy,
        first and first.rounds,
        last and last.rounds,
        accuracies[0],
        [one for one in accuracies[1:] if one.family != run_lib.OVERALL],
      )
    )
  return found


def mean(found: Iterable[Result]) -> Accuracy:
  """Of all policies, where all are known.

  Policies meet the same prompts, so that their errors are not independent; the
  mean of the errors is the most that the error of the mean can be.
  """
  columns = zip(*(one.overall[1:] for one in found), strict=True)
  means = [mean_of_all(column) for column in columns]
  return Accuracy('mean', *(means or [None] * 4))


def mean_of_all(values: Collection[float | None]) -> float | None:
  """None if not all are known."""
  return None if None in values else statistics.fmean(values)


def learning(run: run_lib.Run) -> list[charts.Curve]:
  """The curves of learning, accuracy only where it is not the reward."""
  rows = [row for rows in run.rows.values() for row in rows]
  same = all(row.accuracy == row.reward for row in rows)
  return [c for c in charts.LEARNING if not (same and c.field == 'accuracy')]


def stack(counts: Mapping[str, float], order: Iterable[str]) -> list[tuple]:
  """Parts of a bar: names, counts, shares of the sum, and styles."""
  order = [*order, *sorted({*counts} - {*order})]
  total = sum(counts.values())
  return [
    (part, counts[part], counts[part] / total, drawing.area_style(i))
    for i, part in enumerate(order)
    if counts.get(part, 0) > 0
  ]


def round_seconds(run: run_lib.Run) -> float | None:
  """The median over the rounds."""
  seconds = [row.timing.seconds for row in run.process]
  seconds = [s for s in seconds if s is not None]
  return statistics.median(seconds) if seconds else None


def completions(run: run_lib.Run) -> list[tuple]:
  """The newest of each policy: its name, rounds done, best and worst."""
  found = []
  for policy, evaluations in run.evaluations.items():
    told = [one for one in evaluations if one.best or one.worst]
    if told:
      newest = told[-1]
      sides = [('Best', newest.best), ('Worst', newest.worst)]
      found.append((policy, newest.rounds, sides))
  return found


def span(places: Sequence[int]) -> str:
  """Numbers of devices: '0-3' where none is missing."""
  first, last = min(places, default=0), max(places, default=0)
  if len(places) > 1 and sorted(places) == [*range(first, last + 1)]:
    return f'{first}–{last}'
  return ', '.join(map(str, places)) or '–'


def clip(text: str) -> tuple[list[str], int]:
  """The lines for which there is room, and how many letters there are not."""
  return text[:_LETTERS].split('\n'), max(len(text) - _LETTERS, 0)


def grouped(config: Mapping[str, object]) -> dict[str, dict[str, object]]:
  """A flat config by the first part of its keys, or the first two."""
  groups = {}
  for key in sorted(config):
    parts = key.split('.')
    size = min(2 if parts[0] == 'policies' else 1, len(parts) - 1)
    group = '.'.join(parts[:size])
    groups.setdefault(group, {})['.'.join(parts[size:])] = config[key]
  return groups
