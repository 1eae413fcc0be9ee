"""Figures of charts, by matplotlib, and SVG of them for a page.

  chart = drawing.Chart(title='Reward', unit='mean', series=...)
  figure = drawing.draw(chart)  # For a notebook.
  text = drawing.svg(chart, 'reward')  # For a page.

What is drawn is data; `charts` makes it of a run.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import io
import re
from typing import NamedTuple
from xml.etree import ElementTree

import matplotlib
from matplotlib import figure as figure_lib
from matplotlib import ticker
import numpy as np

from mrl_jax import texts
from mrl_jax.training import metrics

# By name, the colour on white and the one on black. A page has a CSS variable
# for each; figures are drawn with the first. Those of lines and of areas can be
# told apart by the colour-blind, after Okabe and Ito, and Tol.
COLORS = {
  'ink': ('#1f2328', '#e6e9ed'),
  'muted': ('#59636e', '#9aa5b1'),
  'rule': ('#d5dae0', '#363d47'),
  'card': ('#ffffff', '#171c22'),
  'paper': ('#f4f6f8', '#0d1117'),
  'line0': ('#0072b2', '#56b4e9'),
  'line1': ('#d55e00', '#ff8f45'),
  'line2': ('#009e73', '#2fcf9f'),
  'line3': ('#b8598f', '#e79cc8'),
  'line4': ('#8a6a00', '#e3c12f'),
  'line5': ('#6a4c93', '#b79ced'),
  'line6': ('#5b6068', '#b4bcc6'),
  'line7': ('#8c2d19', '#e2856e'),
  'area0': ('#332288', '#8d7ff0'),
  'area1': ('#88ccee', '#88ccef'),
  'area2': ('#44aa99', '#44ab99'),
  'area3': ('#ddcc77', '#ddcc78'),
  'area4': ('#cc6677', '#dd7788'),
  'area5': ('#117733', '#3fa863'),
  'area6': ('#aa4499', '#cc66bb'),
  'area7': ('#999933', '#aaaa44'),
  'area8': ('#bbbbbb', '#777777'),
}

_VARIABLES = {light: f'var(--{name})' for name, (light, _) in COLORS.items()}
_WIDTH, _HEIGHT = 360, 216  # Pixels of a chart, of which letters are 11 high.
_LINE = 17  # Pixels of a line above it.
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 8, 24, 34  # Around the axes.
_POINTS = 300  # Of a curve, at most; of longer ones these are means.
_BARS = 30
_WINDOWS = 15  # A smooth curve has so many windows that do not overlap.
_FEW = 20  # Rounds that are not smoothed.
_SPREAD = 100  # From which on a scale is logarithmic.
_ROOM = 48  # Letters of a name in a figure.
_LARGEST = 1e30  # Beyond it, a number is not drawn.
_LARGE = ticker.EngFormatter(sep='')  # 100k
_SETTINGS = {
  'svg.fonttype': 'none',  # Text is text.
  'svg.hashsalt': 'report',
  'text.parse_math': False,
  'font.size': 11,
}


class Style(NamedTuple):
  """How a line looks; `dashes` are pixels, on and off, and () is solid."""

  color: str
  dashes: tuple[int, ...] = ()
  marker: str = 'o'

  @property
  def pattern(self):
    """The dashes, as matplotlib has them."""
    return (0, self.dashes) if self.dashes else '-'


_DASHES = ((), (6, 2), (6, 2, 1.5, 2), (2, 1.5))


def line_style(i: int) -> Style:
  """Of the policy, or run, at place `i`; the same in all charts of a page."""
  return Style(
    f'line{i % 8}', _DASHES[(i + i // 8) % len(_DASHES)], 'osD^vPX*'[i % 8]
  )


def area_style(i: int) -> Style:
  return Style(f'area{i % 9}')


class Series(NamedTuple):
  """A line, or an area, of a chart.

  Attributes:
    name: in the legend.
    style: of it.
    x, y: numbers that can be drawn.
    error: of each `y`, NaN where it is not known.
  """

  name: str
  style: Style
  x: np.ndarray
  y: np.ndarray
  error: np.ndarray


def line(
  name: str,
  style: Style,
  points: Iterable[tuple[float, float | None, float | None]],
  factor: float = 1.0,
) -> list[Series]:
  """A line through the points that can be drawn; nothing if there are none.

  A point is x, y and the error of y; the factor is of the last two.
  """
  points = [
    (
      x,
      factor * y,
      factor * error if drawable(error) and error > 0 else np.nan,
    )
    for x, y, error in points
    if drawable(y)
  ]
  columns = np.array(points, np.float64).T
  return [Series(name, style, *columns)] if points else []


def drawable(value: float | None) -> bool:
  """Whether it is a number of a size that a figure can have."""
  return value is not None and abs(value) < _LARGEST


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
  """What is drawn.

  Attributes:
    title: of it.
    unit: of the vertical axis.
    series: at least one.
    kind: a name in `KINDS`.
    marks: where something is marked on the horizontal axis.
    label: of the horizontal axis.
    wide: whether heights are on a logarithmic scale if they differ much.
    own_legend: whether series are anything else than what a page is about.
  """

  title: str
  unit: str
  series: Sequence[Series]
  kind: str = 'curves'
  marks: Sequence[float] = ()
  label: str = 'round'
  wide: bool = False
  own_legend: bool = False


def draw(chart: Chart, legend: bool = True) -> figure_lib.Figure:
  """A figure; with title and legend, unless a page gives them."""
  lines = 1 + len(chart.series) if legend else 0
  above = _TOP + _LINE * lines
  height = above + _HEIGHT - _TOP
  with matplotlib.rc_context(_SETTINGS):
    # An inch is 72 pixels, here and in SVG.
    figure = figure_lib.Figure(figsize=(_WIDTH / 72, height / 72), dpi=72)
    axes = figure.add_axes(
      (
        _LEFT / _WIDTH,
        _BOTTOM / height,
        1 - (_LEFT + _RIGHT) / _WIDTH,
        1 - (above + _BOTTOM) / height,
      )
    )
    KINDS[chart.kind](axes, chart)
    _frame(axes, chart)
    place = {'ha': 'left', 'va': 'baseline'}
    figure.text(
      0, 1 - (above - 10) / height, chart.unit, color=_ink('muted'), **place
    )
    if legend:
      figure.text(
        0, 1 - 13 / height, _name(chart.title), weight='bold', **place
      )
      figure.legend(
        *axes.get_legend_handles_labels(), loc='upper left', frameon=False,
        bbox_to_anchor=(0, 1 - 18 / height), borderaxespad=0, borderpad=0,
        labelspacing=0.3, fontsize=10,
      )  # fmt: skip
  return figure


def _frame(axes, chart) -> None:
  """Rules to read heights by, and as little as possible of all else."""
  axes.set_axisbelow(True)
  axes.yaxis.grid(color=_ink('rule'), lw=1)
  axes.spines[:].set_visible(False)
  axes.minorticks_off()
  axes.tick_params(bottom=False, left=False, labelcolor=_ink('muted'))
  axes.yaxis.set_major_formatter(_number)
  axes.set_xlabel(chart.label, loc='right', color=_ink('muted'), labelpad=2)
  if chart.kind != 'histogram':
    axes.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
  if axes.get_yscale() == 'linear':
    axes.yaxis.set_major_locator(
      ticker.MaxNLocator(4, steps=[1, 2, 2.5, 5, 10])
    )
    low, high = axes.dataLim.intervaly
    if low >= 0:  # Heights are then in proportion.
      axes.set_ylim(0, 1.06 * high or 1)


def _draw_curves(axes, chart) -> None:
  """What there is faintly, and what it comes to smoothly."""
  for one in chart.series:
    x, y, color = _thin(one.x), _thin(one.y), _ink(one.style.color)
    marker = one.style.marker
    if len(y) > _FEW:
      axes.plot(x, y, color=color, lw=0.8, alpha=0.25)
      y, marker = _smooth(y, max(len(y) // _WINDOWS, 1) | 1), ''
    axes.plot(
      x, y, color=color, lw=1.8, ls=one.style.pattern, marker=marker, ms=4,
      label=_name(one.name),
    )  # fmt: skip
  low, high = axes.dataLim.intervaly
  if chart.wide and high > _SPREAD * low > 0:
    axes.set_yscale('log')


def _draw_points(axes, chart) -> None:
  for one in chart.series:
    axes.errorbar(
      one.x, one.y, one.error, color=_ink(one.style.color), lw=1.8,
      ls=one.style.pattern, marker=one.style.marker, ms=6, mec=_ink('card'),
      mew=0.8, elinewidth=1.4, capsize=3, label=_name(one.name),
    )  # fmt: skip


def _draw_bars(axes, chart) -> None:
  """Stacked; each is the mean of some rounds."""
  x = chart.series[0].x
  edges = np.append(_thin(x, _BARS, np.min), x[-1] + 1)
  below = np.zeros(len(edges) - 1)
  for one in chart.series:
    above = below + _thin(one.y.clip(0), _BARS)
    axes.stairs(
      above, edges, baseline=below, fill=True, lw=0,
      color=_ink(one.style.color), label=_name(one.name),
    )  # fmt: skip
    below = above


def _draw_histogram(axes, chart) -> None:
  """Logarithmic both ways, as nearly all tokens have a ratio near 1."""
  for mark in chart.marks:
    axes.axvline(mark, color=_ink('muted'), lw=1.2, ls=(0, (1.5, 2)))
  for one in chart.series:
    axes.step(
      one.x, one.y, where='mid', lw=1.8, ls=one.style.pattern,
      color=_ink(one.style.color), label=_name(one.name),
    )  # fmt: skip
  least = min(y for one in chart.series for y in one.y if y > 0)
  axes.set_yscale('log', nonpositive='clip')
  axes.set_ylim(10 ** np.floor(np.log10(least)), 200)
  ends = np.exp(metrics.LOG_RATIO_EDGES[[0, -1]])
  axes.set_xticks(
    [one.x[0], *np.log([0.25, 0.5, 1, 2, 4]), one.x[-1]],
    [f'<{ends[0]:.2g}', '0.25', '0.5', '1', '2', '4', f'>{ends[1]:.2g}'],
  )


KINDS = {
  'curves': _draw_curves,
  'points': _draw_points,
  'bars': _draw_bars,
  'histogram': _draw_histogram,
}


def _ink(color: str) -> str:
  return COLORS[color][0]


def _name(text: str) -> str:
  text = texts.printable(text)
  return text if len(text) <= _ROOM else f'{text[: _ROOM - 1]}…'


def _number(value: float, place=None) -> str:
  """A label that fits to the left of the axes."""
  if abs(value) < 1e3:
    return f'{value:.4g}'
  return f'{value:,.0f}' if abs(value) < 1e5 else _LARGE(value)


def _thin(values, most=_POINTS, function=np.mean) -> np.ndarray:
  """At most so many values, each of as many as there must be."""
  size = -(-len(values) // most)
  if size < 2:
    return values
  return np.array(
    [function(values[i : i + size]) for i in range(0, len(values), size)]
  )


def _smooth(values, width) -> np.ndarray:
  """Means over a window around each value, narrower towards the ends."""
  box = np.ones(width)
  return np.convolve(values, box, 'same') / np.convolve(
    np.ones(len(values)), box, 'same'
  )


def svg(chart: Chart, name: str) -> str:
  """A chart as an element of a page, in its colours and letters.

  Args:
    chart: without title and legend, which the page gives.
    name: that no other chart of the page has.
  """
  written = io.StringIO()
  with matplotlib.rc_context(_SETTINGS):
    draw(chart, legend=False).savefig(
      written,
      format='svg',
      transparent=True,
      metadata=dict.fromkeys(('Date', 'Creator', 'Format', 'Type')),
    )
  root = ElementTree.fromstring(written.getvalue())
  kept = {
    element.get('id'): f'{name}-{i}'
    for i, element in enumerate(root.iterfind('.//{*}defs/*[@id]'))
  }
  definitions = root.find('{*}defs')
  # Its rules would be for the whole page.
  definitions.remove(definitions.find('{*}style'))
  for element in root.iter():
    _fit(element, kept)
  title = f'{texts.printable(chart.title)}, {chart.unit}'
  root.attrib = {
    'viewBox': root.get('viewBox'), 'role': 'img', 'aria-label': title,
  }  # fmt: skip
  return ElementTree.tostring(root, encoding='unicode')


def _fit(element, kept: Mapping[str, str]) -> None:
  """Makes an element of matplotlib's fit for a page; `kept` are new ids."""
  element.tag = _local(element.tag)
  if not (element.text or '').strip():
    element.text = None
  element.tail = None
  attributes = {_local(key): value for key, value in element.attrib.items()}
  if attributes.get('id') not in kept:
    attributes.pop('id', None)
  for key, value in attributes.items():
    if key == 'id':
      value = kept[value]
    elif key in ('href', 'clip-path'):
      value = re.sub('(?<=#)[^)]+', lambda match: kept[match[0]], value)
    elif key == 'style':
      parts = [part for part in value.split('; ') if 'font-family' not in part]
      value = re.sub(
        '#[0-9a-f]{6}', lambda match: _VARIABLES[match[0]], '; '.join(parts)
      )
    elif key != 'viewBox':
      value = re.sub(r'(\.\d\d)\d+', r'\1', value.replace('\n', ' '))
    attributes[key] = value
  element.attrib = attributes


def _local(name: str) -> str:
  return name.rpartition('}')[2]
