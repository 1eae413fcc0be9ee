"""What a report draws of a run.

  for chart in charts.of_rounds(run, charts.LEARNING):
    ...  # A `drawing.Chart`, or why there is none.

Most charts are rows of tables: a number of a row of the metrics, and its unit.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import itertools
import operator
from typing import NamedTuple

import numpy as np

from mrl_jax.analysis import run as run_lib
from mrl_jax.analysis.report import drawing
from mrl_jax.training import metrics

# Parts of a whole, in their order; each has the colour of its place.
PHASES = ('start', 'sampling', 'verification', 'exchange', 'lessons',
          'updates', 'evaluation', 'checkpoints', 'other')  # fmt: skip
FATES = ('refused', 'used', 'acknowledged', 'stale', 'evicted', 'waiting',
         'published', 'duplicate')  # fmt: skip
CHUNKS = ('n:m', 'n:1', '1:1', '1:n')


class Absent(NamedTuple):
  """What is not drawn, and why."""

  title: str
  why: str


class Curve(NamedTuple):
  """A number of the rows over the rounds.

  Attributes:
    title, unit: of its chart.
    field: of a `Row`, with dots.
    factor: from the rows' unit to that of the chart.
    why: says why a run has none, where it is known.
    wide: as of a `Chart`.
  """

  title: str
  unit: str
  field: str
  factor: float = 1.0
  why: Callable[[run_lib.Run], str | None] = lambda run: None
  wide: bool = False

  def points(self, rows: Iterable[run_lib.Row]) -> list[tuple]:
    get = operator.attrgetter(self.field)
    return [(row.round, get(row), None) for row in rows]

  def chart(self, series: Sequence[drawing.Series]) -> drawing.Chart:
    return drawing.Chart(
      title=self.title, unit=self.unit, series=series, wide=self.wide
    )

  def absent(self, run: run_lib.Run) -> Absent:
    why = self.why(run) or f'{metrics.ROUNDS} has no {self.field}'
    return Absent(self.title, why)


def _no_kl(run) -> str | None:
  return 'method.kl_weight is 0' if run.settings.kl_weight == 0 else None


def _no_peers(run) -> str | None:
  rows = [row for rows in run.rows.values() for row in rows]
  if all(row.peer_rows == 0 for row in rows):
    return "no row of a peer's was trained on"
  return f"{run.settings.method} has no ratios of peers' rows"


def _no_likelihood(run) -> str | None:
  if any(row.peer.ess_fraction is not None for row in run.process):
    return f"{run.settings.method} takes peers' rows by ratios"
  return _no_peers(run)


HELDOUT = {
  'title': 'Held-out accuracy',
  'unit': '%',
  'kind': 'points',
  'label': 'rounds done',
}
_WHOSE = {'own': 'own', 'peer': "peers'"}
_TOKENS = '% of tokens'
LEARNING = (
  Curve('Reward', 'mean', 'reward'),
  Curve('Accuracy in training', '%', 'accuracy', 100),
  Curve('Prompts that no sample solves', '%', 'all_fail_groups', 100),
  Curve('Prompts with equal rewards', '%', 'zero_signal_groups', 100),
  Curve('KL to the policy at the start', 'nats a token', 'own.kl', why=_no_kl),
  Curve('Entropy', 'nats a token', 'entropy'),
  Curve('Response length', 'tokens', 'response_length'),
  Curve('Responses that end by themselves', '%', 'stopped', 100),
)
UPDATES = (
  Curve('Gradient norm', 'before clipping', 'grad_norm', wide=True),
  Curve('Own rows with a signal', '% of rows', 'rows_with_signal', 100),
  Curve('Own tokens clipped', _TOKENS, 'own.clip_fraction', 100),
  Curve('Largest ratio, own tokens', 'ratio', 'own.max_ratio', wide=True),
  Curve('Effective sample size, own', _TOKENS, 'own.ess_fraction', 100),
  Curve(
    "Peers' tokens clipped", _TOKENS, 'peer.clip_fraction', 100, _no_peers
  ),
  Curve(
    "Largest ratio, peers' tokens", 'ratio', 'peer.max_ratio', why=_no_peers,
    wide=True,
  ),
  Curve(
    'Effective sample size, peers', _TOKENS, 'peer.ess_fraction', 100, _no_peers
  ),
  Curve(
    "Log-probability of peers' tokens", 'nats a token', 'peer.logp',
    why=_no_likelihood,
  ),
  Curve('Sampler against trainer, KL', 'nats a token', 'mismatch.kl'),
)  # fmt: skip
OF_METHOD = (
  Curve("Peers' ratios at their bound", _TOKENS, 'peer.truncated', 100),
  Curve('Compatibility of what peers offer', 'median', 'compatibility'),
  Curve('What passes the gate', '% of rollouts', 'admitted', 100),
)
TAKEN = Curve("Peers' rows trained on", 'rows', 'peer_rows')
SPEED = Curve(
  'Tokens sampled', 'a second of the round', 'timing.tokens_per_second'
)


def heldout(run: run_lib.Run) -> drawing.Chart | Absent:
  """Held-out accuracy, with standard errors."""
  series = []
  for name, found in run.evaluations.items():
    points = [(one.rounds, *one.overall) for one in found]
    series += drawing.line(name, _style(run, name), points, 100)
  if not series:
    return Absent(HELDOUT['title'], 'there was no evaluation')
  return drawing.Chart(series=series, **HELDOUT)


def of_rounds(
  run: run_lib.Run, curves: Iterable[Curve]
) -> list[drawing.Chart | Absent]:
  """A chart for each of the curves, with a line for each policy."""
  charts = []
  for curve in curves:
    series = []
    for name, rows in run.rows.items():
      series += drawing.line(
        name, _style(run, name), curve.points(rows), curve.factor
      )
    charts.append(curve.chart(series) if series else curve.absent(run))
  return charts


def of_method(run: run_lib.Run) -> list[drawing.Chart]:
  """What is told of one method only: PRP, GRAFT or HACPO."""
  title = 'Capability of the learner'
  told = _of_pairs(run, title, 'peer = 1', lambda row: row.capability)
  curves = of_rounds(run, OF_METHOD)
  return [*told, *(c for c in curves if isinstance(c, drawing.Chart))]


def _style(run, name) -> drawing.Style:
  return drawing.line_style(run.names.index(name))


def rescues(run: run_lib.Run) -> list[drawing.Chart | Absent]:
  """Of the prompts that a whole group failed, the share that a peer solved."""
  title = 'Failed prompts that a peer solved'
  charts = _of_pairs(run, title, '%', lambda row: _percent(row.rescued_by))
  if not charts:  # Older rows tell of all peers together.
    charts = of_rounds(run, [Curve(title, '%', 'rescue_rate', 100)])
  return charts


def residuals(run: run_lib.Run) -> list[drawing.Chart | Absent]:
  """What THL could not carry, and how the number of tokens changed."""
  tables = {
    'Segmentation error': ('% of boundaries', _segmentation_error),
    'Tokens of the receiver': ('for 100 of the sender', _growth),
  }
  refused, absent = 'Rollouts refused', []
  if any(one.refused for one in run.residuals().values()):
    tables[refused] = ('%', _share_refused)
  elif run.residuals():
    absent = [Absent(refused, 'all could be carried')]
  charts = [
    _of_pairs(
      run,
      title,
      unit,
      lambda row, value=value: {
        sender: value(one) for sender, one in row.residuals.items()
      },
    )
    for title, (unit, value) in tables.items()
  ]
  return [*itertools.chain(*charts), *absent]


def _percent(shares):
  return {name: 100 * share for name, share in shares.items()}


def _segmentation_error(one) -> float | None:
  return 100 * one.segmentation_error if one.receiver_tokens else None


def _share_refused(one) -> float | None:
  refused = sum(one.refused.values())
  return 100 * refused / one.rollouts if one.rollouts else None


def _growth(one) -> float | None:
  tokens = one.sender_tokens
  return 100 * one.receiver_tokens / tokens if tokens else None


def _of_pairs(
  run: run_lib.Run,
  title: str,
  unit: str,
  values: Callable[[run_lib.Row], Mapping[str, float | None]],
) -> list[drawing.Chart]:
  """Lines have the style of the sender, and receivers each a chart.

  Where no sender has two receivers, one chart is enough.
  """
  points = {}
  for receiver, rows in run.rows.items():
    for row in rows:
      for sender, value in values(row).items():
        of_pair = points.setdefault((sender, receiver), [])
        of_pair.append((row.round, value, None))
  one_chart = len({sender for sender, _ in points}) == len(points)
  charts = {}
  for (sender, receiver), of_pair in points.items():
    name, place = sender, f'{title}, {receiver}'
    if one_chart:
      name, place = f'{sender} → {receiver}', title
    series = charts.setdefault(place, [])
    series += drawing.line(name, _style(run, sender), of_pair)
  return [
    drawing.Chart(title=place, unit=unit, series=series, own_legend=True)
    for place, series in charts.items()
    if series
  ]


def histogram(run: run_lib.Run, part: str) -> drawing.Chart | Absent:
  """Importance ratios of all tokens of 'own' or 'peer' rows of the run."""
  title = f'Importance ratios, {_WHOSE[part]} tokens'
  edges = metrics.LOG_RATIO_EDGES
  bin_width = edges[1] - edges[0]
  middles = np.append(edges, edges[-1] + bin_width) - bin_width / 2
  series = []
  for name, rows in run.rows.items():
    counts = [getattr(row, part).log_ratio_counts for row in rows]
    total = np.sum([c for c in counts if c], 0, dtype=np.float64)
    if np.sum(total):
      series += drawing.line(
        name,
        _style(run, name),
        zip(middles, total / total.sum(), itertools.repeat(None)),
        100,
      )
  if not series:
    known = _no_peers(run) if part == 'peer' else None
    why = known or f'{metrics.ROUNDS} has no {part}.log_ratio_counts'
    return Absent(title, why)
  low, high = run.settings.clip_low, run.settings.clip_high
  marks = [1 - low, 1 + high] if low is not None and high is not None else []
  return drawing.Chart(
    title=title,
    unit=_TOKENS,
    series=series,
    kind='histogram',
    marks=[float(np.log(mark)) for mark in marks if mark > 0],
    label='ratio; dotted: the clip' if marks else 'ratio',
  )


def phases(run: run_lib.Run) -> drawing.Chart | Absent:
  """Where the seconds of a round go."""
  title, rows = 'Time of a round', run.process
  told = {name for row in rows for name in row.timing.phases}
  names = [*PHASES, *sorted(told - {*PHASES})]
  series = []
  for i, name in enumerate(names):
    if name in told:
      seconds = [row.timing.phases.get(name) for row in rows]
      points = [
        (row.round, s if drawing.drawable(s) else 0.0, None)
        for row, s in zip(rows, seconds, strict=True)
      ]
      series += drawing.line(name, drawing.area_style(i), points)
  if series:
    return drawing.Chart(
      title=title, unit='seconds', series=series, kind='bars', own_legend=True
    )
  points = [(row.round, row.timing.seconds, None) for row in rows]
  series = drawing.line('all phases', drawing.Style('ink'), points)
  if not series:
    return Absent(title, f'{metrics.ROUNDS} has no timing.seconds')
  return drawing.Chart(title=title, unit='seconds', series=series)
