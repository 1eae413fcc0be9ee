"""The charts of a report, made of a run.

  for chart in charts.over_rounds(run, charts.LEARNING):
    ...  # A `drawing.Chart`, or an `Absent` with the reason.

Most charts are rows of tables: a field of the metrics, its title and its unit.
"""

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
import functools
import itertools
from typing import NamedTuple

import numpy as np

from mrl_jax import config as config_lib
from mrl_jax import workdir
from mrl_jax.analysis import run as run_lib
from mrl_jax.analysis.figures import style
from mrl_jax.analysis.report import drawing

# Parts of stacks; each has the colour of its place here.
PHASES = ('start', 'sampling', 'verification', 'exchange', 'batches',
          'scoring', 'updates', 'evaluation', 'checkpoints', 'other')  # fmt: skip
FATES = ('refused', 'used', 'acknowledged', 'stale', 'evicted', 'waiting',
         'published', 'duplicate')  # fmt: skip
CHUNKS = ('n:m', 'n:1', '1:1', '1:n')


class Absent(NamedTuple):
  """A chart that cannot be drawn, and the reason."""

  title: str
  why: str


class Curve(NamedTuple):
  """A number of each policy over the rounds."""

  title: str
  unit: str  # Starts with '%' if the field is a share from 0 to 1.
  field: (
    str  # Of `workdir.RoundMetrics`, with dots; or 'heldout', of evaluations.
  )
  # Returns why a run lacks the field, if the reason is known.
  why: Callable[[run_lib.Run], str | None] = lambda run: None
  wide: bool = False  # As in `drawing.Chart`.

  @property
  def factor(self) -> float:
    return 100.0 if self.unit.startswith('%') else 1.0

  def points(self, run: run_lib.Run, policy: str) -> list[tuple]:
    """The round, the number and its error, or None, for each round."""
    if self.field == 'heldout':
      evaluations = run.evaluations.get(policy, ())
      return [(e.rounds, *e.overall) for e in evaluations]
    rows, names = run.rows.get(policy, ()), self.field.split('.')
    return [
      (row.round, functools.reduce(_get, names, row), None) for row in rows
    ]

  def chart(self, series: Sequence[drawing.Series]) -> drawing.Chart:
    layout = {'wide': self.wide}
    if self.field == 'heldout':
      layout = {'kind': 'points', 'label': 'rounds done'}
    return drawing.Chart(
      title=self.title, unit=self.unit, series=series, **layout
    )

  def absent(self, run: run_lib.Run) -> Absent:
    why = self.why(run) or f'{workdir.ROUNDS} has no {self.field}'
    return Absent(self.title, why)


def _get(part, name):
  return part.get(name) if isinstance(part, Mapping) else getattr(part, name)


def _no_kl(run) -> str | None:
  return 'method.kl_weight is 0' if run.settings.kl_weight == 0 else None


def _no_peers(run) -> str | None:
  if all(row.peer_rows == 0 for row in run.all_rows):
    return 'no rows of peers were trained on'
  return f"{run.settings.method} has no importance ratios for peers' rows"


def _no_likelihood(run) -> str | None:
  if any(row.peer.ess_fraction is not None for row in run.process):
    return f"{run.settings.method} weighs peers' rows by importance ratios"
  return _no_peers(run)


_TOKENS = '% of tokens'
HELDOUT = Curve(
  'Held-out accuracy', '%', 'heldout', lambda run: 'nothing was evaluated'
)
LEARNING = (
  Curve('Reward', 'mean', 'reward'),
  Curve('Accuracy in training', '%', 'accuracy'),
  Curve('Prompts that no sample solves', '%', 'all_fail_groups'),
  Curve('Prompts with equal rewards', '%', 'zero_signal_groups'),
  Curve('KL to the initial policy', 'nats a token', 'own.kl', _no_kl),
  Curve('Entropy', 'nats a token', 'entropy'),
  Curve('Response length', 'tokens', 'response_length'),
  Curve('Responses that were not cut off', '%', 'stopped'),
)
UPDATES = (
  Curve('Gradient norm', 'before clipping', 'grad_norm', wide=True),
  Curve('Own rows with an advantage', '% of rows', 'rows_with_signal'),
  Curve('Own tokens clipped', _TOKENS, 'own.clip_fraction'),
  Curve('Largest ratio, own tokens', 'ratio', 'own.max_ratio', wide=True),
  Curve('Effective sample size, own', _TOKENS, 'own.ess_fraction'),
  Curve("Peers' tokens clipped", _TOKENS, 'peer.clip_fraction', _no_peers),
  Curve(
    "Largest ratio, peers' tokens",
    'ratio',
    'peer.max_ratio',
    _no_peers,
    wide=True,
  ),
  Curve(
    'Effective sample size, peers', _TOKENS, 'peer.ess_fraction', _no_peers
  ),
  Curve(
    "Log-probability of peers' tokens",
    'nats a token',
    'peer.logp',
    _no_likelihood,
  ),
  Curve('KL of sampler to trainer', 'nats a token', 'mismatch.kl'),
)
OF_METHOD = (
  Curve("Peers' ratios at their bound", _TOKENS, 'peer.truncated'),
  Curve("Compatibility of peers' responses", 'median', 'method.compatibility'),
  Curve("Peers' responses admitted", '%', 'method.admitted'),
)
PEER_ROWS = Curve("Peers' rows trained on", 'rows', 'peer_rows')
SLOTS = (
  Curve('Sampling slots with a token', '% of slots', 'slots.sampling'),
  Curve('Own update slots with a token', '% of slots', 'slots.own'),
  Curve(
    "Peers' update slots with a token",
    '% of slots',
    'slots.peer',
    _no_peers,
  ),
)
SPEED = Curve(
  'Tokens sampled', 'a second of the round', 'timing.tokens_per_second'
)


def over_rounds(
  run: run_lib.Run, curves: Iterable[Curve]
) -> list[drawing.Chart | Absent]:
  """A chart for each curve, with a line for each policy."""
  charts = []
  for curve in curves:
    series = []
    for name in run.policies:
      points = curve.points(run, name)
      series += drawing.line(name, _style(run, name), points, curve.factor)
    charts.append(curve.chart(series) if series else curve.absent(run))
  return charts


def of_method(run: run_lib.Run) -> list[drawing.Chart]:
  """Charts of metrics that only PRP, GRAFT or HACPO have."""

  def capability(row):
    values = row.method.get('capability')
    return values if isinstance(values, Mapping) else {}

  return [
    *_of_pairs(run, 'Capability of the peer', 'learner = 1', capability),
    *(c for c in over_rounds(run, OF_METHOD) if not isinstance(c, Absent)),
  ]


def rescues(run: run_lib.Run) -> list[drawing.Chart]:
  """The share of a policy's failed prompts that each peer solved."""
  title = 'Failed prompts that a peer solved'
  return _of_pairs(run, title, '%', lambda row: row.rescued_by, factor=100)


_REFUSED = 'Rollouts refused'
# What is drawn of a THL residual: a unit, and two counts whose ratio is drawn
# in percent.
_RESIDUALS = {
  'Segmentation error': (
    '% of boundaries',
    lambda r: (r.receiver_tokens - sum(r.chunks.values()), r.receiver_tokens),
  ),
  'Tokens of the receiver': (
    'for 100 of the sender',
    lambda r: (r.receiver_tokens, r.sender_tokens),
  ),
  _REFUSED: ('%', lambda r: (sum(r.refused.values()), r.rollouts)),
}


def residuals(run: run_lib.Run) -> list[drawing.Chart | Absent]:
  """What THL could not carry, and the growth of the number of tokens."""
  totals, charts = run.totals.residuals.values(), []
  for title, (unit, counts) in _RESIDUALS.items():

    def values(row, counts=counts):
      pairs = {name: counts(r) for name, r in row.residuals.items()}
      return {name: 100 * n / of for name, (n, of) in pairs.items() if of}

    if title != _REFUSED or any(total.refused for total in totals):
      charts += _of_pairs(run, title, unit, values)
    elif totals:
      charts.append(Absent(title, 'all were carried'))
  return charts


def _style(run, name) -> style.LineStyle:
  return style.line_style(run.names.index(name))


def _of_pairs(
  run: run_lib.Run,
  title: str,
  unit: str,
  values: Callable[[workdir.RoundMetrics], Mapping[str, float]],
  factor: float = 1.0,
) -> list[drawing.Chart]:
  """Charts of a number of each sender and receiver.

  A line has the style of the sender. Each receiver has a chart, unless no
  sender has two receivers: then one chart is enough. `values` returns a
  receiver's numbers in a round, by sender.
  """
  points = collections.defaultdict(list)
  for row in run.all_rows:
    for sender, value in values(row).items():
      points[sender, row.policy].append((row.round, value, None))
  one_chart = len({sender for sender, _ in points}) == len(points)
  charts = collections.defaultdict(list)
  for (sender, receiver), of_pair in points.items():
    name, place = sender, f'{title}, {receiver}'
    if one_chart:
      name, place = f'{sender} → {receiver}', title
    charts[place] += drawing.line(name, _style(run, sender), of_pair, factor)
  return [
    drawing.Chart(title=place, unit=unit, series=series, own_legend=True)
    for place, series in charts.items()
    if series
  ]


def histogram(run: run_lib.Run, part: str) -> drawing.Chart | Absent:
  """Importance ratios of all tokens of 'own' or 'peer' rows of the run."""
  whose = 'own tokens' if part == 'own' else "peers' tokens"
  title = f'Importance ratios, {whose}'
  edges = config_lib.LOG_RATIO_EDGES
  width = edges[1] - edges[0]
  middles = np.append(edges, edges[-1] + width) - width / 2
  series = []
  for name, rows in run.rows.items():
    counts = [getattr(row, part).log_ratio_counts for row in rows]
    total = np.sum([c for c in counts if c], 0, dtype=np.float64)
    if np.sum(total):
      shares = zip(middles, total / total.sum(), itertools.repeat(None))
      series += drawing.line(name, _style(run, name), shares, 100)
  if not series:
    missing = f'{workdir.ROUNDS} has no {part}.log_ratio_counts'
    return Absent(title, _no_peers(run) if part == 'peer' else missing)
  low, high = run.settings.clip_low, run.settings.clip_high
  marks = [] if None in (low, high) else [1 - low, 1 + high]
  return drawing.Chart(
    title=title,
    unit=_TOKENS,
    series=series,
    kind='histogram',
    marks=[float(np.log(mark)) for mark in marks if mark > 0],
    label='ratio; dotted: the clip range' if marks else 'ratio',
  )


def phases(run: run_lib.Run) -> drawing.Chart | Absent:
  """Seconds of each round by phase."""
  title, rows = 'Time of a round', run.process
  known = {name for row in rows for name in row.timing.phases}
  series = []
  for i, name in enumerate([*PHASES, *sorted(known - {*PHASES})]):
    if name in known:
      points = [
        (row.round, seconds if drawing.drawable(seconds) else 0.0, None)
        for row in rows
        for seconds in [row.timing.phases.get(name)]
      ]
      series += drawing.line(name, style.area_style(i), points)
  if not series:
    return Absent(title, f'{workdir.ROUNDS} has no timing.phases')
  return drawing.Chart(
    title=title, unit='seconds', series=series, kind='bars', own_legend=True
  )
