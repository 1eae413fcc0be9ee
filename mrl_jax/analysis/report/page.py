"""The report of a run: `report.html` in its work dir."""

from collections.abc import Collection, Iterable, Mapping, Sequence
import os
import statistics
from typing import NamedTuple

from mrl_jax import files
from mrl_jax import workdir
from mrl_jax.analysis import run as run_lib
from mrl_jax.analysis.figures import style
from mrl_jax.analysis.report import charts
from mrl_jax.analysis.report import html
from mrl_jax.see import ledger

_LETTERS = 2_000  # Shown of a completion.


def write(folder: str, path: str = '') -> str:
  """Writes the report of a run, finished or not; returns its path.

  By default, it is in the folder. Raises InputError if `folder` is not the work
  dir of a run.
  """
  path = path or os.path.join(folder, workdir.REPORT)
  files.write(path, render(run_lib.read(folder)))
  return path


def render(run: run_lib.Run) -> str:
  """The page, as HTML that needs no other file."""
  policies = results(run)
  return html.render(
    'page.html',
    run=run,
    title='/'.join(os.path.abspath(run.folder).split(os.sep)[1:][-2:]),
    styles={name: style.line_style(i) for i, name in enumerate(run.names)},
    results=policies,
    mean=mean(policies),
    rows=run.all_rows,
    fates=run.fates(),
    heldout=charts.over_rounds(run, [charts.HELDOUT]),
    learning=charts.over_rounds(run, learning(run)),
    updates=[
      *charts.over_rounds(run, charts.UPDATES),
      *charts.of_method(run),
      charts.histogram(run, 'own'),
      charts.histogram(run, 'peer'),
    ],
    exchange=[
      *charts.rescues(run),
      *charts.over_rounds(run, [charts.PEER_ROWS]),
    ],
    thl=charts.residuals(run),
    time=[
      charts.phases(run),
      *charts.over_rounds(run, [charts.SPEED, *charts.SLOTS]),
    ],
    phases=stack(run.phases(), charts.PHASES),
    fate_parts=lambda counts: stack(ledger.fates(counts), charts.FATES),
    chunk_parts=lambda residual: stack(residual.chunks, charts.CHUNKS),
    completions=completions(run),
    config=grouped(run.config),
    clip=clip,
  )


class Accuracy(NamedTuple):
  """Held-out accuracy of a family, and standard errors; None is unknown."""

  family: str
  before: float | None
  before_error: float | None
  after: float | None
  after_error: float | None


def results(run: run_lib.Run) -> dict[str, list[Accuracy]]:
  """By policy, the overall accuracy, and then the accuracy of each family.

  They are of the first evaluation and of the last. With one evaluation, the
  accuracy after it is unknown.
  """
  none = workdir.Evaluation(rounds=0, policy='', accuracy={})
  by_policy = {}
  for policy in run.policies:
    first, *later = run.evaluations.get(policy) or [none]
    last = [none, *later][-1]
    columns = (first.accuracy, first.error, last.accuracy, last.error)
    families = sorted({*columns[0], *columns[2]} - {workdir.OVERALL})
    by_policy[policy] = [
      Accuracy(family, *(column.get(family) for column in columns))
      for family in (workdir.OVERALL, *families)
    ]
  return by_policy


def mean(policies: Mapping[str, Sequence[Accuracy]]) -> Accuracy:
  """The mean of all policies; values that one of them lacks are unknown.

  Policies answer the same prompts, so that their errors are not independent:
  the mean of the errors is an upper bound of the error of the mean.
  """
  overall = [values[1:] for values, *_ in policies.values()] or [[None] * 4]
  return Accuracy('mean', *map(mean_of_all, zip(*overall, strict=True)))


def mean_of_all(values: Collection[float | None]) -> float | None:
  """The mean; None if one of the values is unknown."""
  return None if None in values else statistics.fmean(values)


def learning(run: run_lib.Run) -> list[charts.Curve]:
  """The curves of learning, with accuracy only if it is not the reward."""
  same = all(row.accuracy == row.reward for row in run.all_rows)
  return [c for c in charts.LEARNING if not (same and c.field == 'accuracy')]


def stack(counts: Mapping[str, float], order: Iterable[str]) -> list[tuple]:
  """The parts of a bar: name, count, share of the sum, and style of each.

  A part keeps the style of its place in `order`; other parts follow.
  """
  order = [*order, *sorted({*counts} - {*order})]
  total = sum(counts.values())
  return [
    (part, counts[part], counts[part] / total, style.area_style(i))
    for i, part in enumerate(order)
    if counts.get(part, 0) > 0
  ]


def completions(run: run_lib.Run) -> list[tuple]:
  """Each policy's name, rounds done, and newest best and worst completions."""
  newest = {
    policy: evaluation
    for policy, evaluations in run.evaluations.items()
    for evaluation in evaluations
    if evaluation.best or evaluation.worst
  }
  return [
    (policy, e.rounds, [('Best', e.best), ('Worst', e.worst)])
    for policy, e in newest.items()
  ]


def clip(text: str) -> tuple[list[str], int]:
  """Lines of the first letters of a text, and the number of letters left."""
  return text[:_LETTERS].split('\n'), max(len(text) - _LETTERS, 0)


def grouped(config: Mapping[str, object]) -> dict[str, dict[str, object]]:
  """Groups a flat config by the first part of its keys, or the first two.

  'policies.llama.lora.rank' is 'lora.rank' of the group 'policies.llama'.
  """
  groups = {}
  for key in sorted(config):
    parts = key.split('.')
    size = min(2 if parts[0] == 'policies' else 1, len(parts) - 1)
    group = '.'.join(parts[:size])
    groups.setdefault(group, {})['.'.join(parts[size:])] = config[key]
  return groups
