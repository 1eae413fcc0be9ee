"""Draws charts by matplotlib: as figures, or as SVG for a page.

  chart = drawing.Chart(title='Reward', unit='mean', series=...)
  figure = drawing.draw(chart)  # For a notebook.
  text = drawing.svg(chart, 'reward')  # For a page.

A chart is data; `charts` makes charts of a run.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import io
import re
from typing import NamedTuple
from xml.etree import ElementTree

import matplotlib
from matplotlib import figure as figure_lib
from matplotlib import ticker
import numpy as np

from mrl_jax import config as config_lib
from mrl_jax import texts
from mrl_jax.analysis.figures import style

# The variables of a page's style sheet, by colour on white.
VARIABLES = {
  white: f'var(--{name})' for name, (white, _) in style.COLORS.items()
}
_WIDTH, _HEIGHT = 360, 216  # Pixels of a chart on a page.
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 8, 24, 34  # Pixels around its axes.
_POINTS = 300  # Most points of a curve; those of longer ones are means.
_BARS = 30
_SMOOTHED = 20  # Curves of more points are smoothed.
_SPREAD = 100  # Highest over lowest value from which a scale is logarithmic.
_LETTERS = 48  # Of a name in a figure, at most.
_LARGEST = 1e30  # Larger numbers are not drawn.
_LARGE = ticker.EngFormatter(sep='')  # 100k
_SVG = {
  **style.PLAIN_TEXT,
  'svg.fonttype': 'none',  # Text stays text.
  'font.size': 11,
}


class Series(NamedTuple):
  """A line or an area of a chart."""

  name: str
  style: style.LineStyle
  x: np.ndarray  # f64 [n], finite; so is y.
  y: np.ndarray
  error: np.ndarray  # f64 [n], of y; NaN is unknown.


def line(
  name: str,
  line_style: style.LineStyle,
  points: Iterable[tuple[float, float | None, float | None]],
  factor: float = 1.0,
) -> list[Series]:
  """A series of the points that can be drawn, or no series without any.

  Points are x, y and the error of y; `factor` multiplies y and its error.
  """
  rows = [
    (x, factor * y, factor * e if drawable(e) and e > 0 else np.nan)
    for x, y, e in points
    if drawable(y)
  ]
  return [Series(name, line_style, *np.array(rows, float).T)] if rows else []


def drawable(value) -> bool:
  """Whether a value is a number of a size that a figure can show."""
  return isinstance(value, int | float) and abs(value) < _LARGEST


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
  """What is drawn."""

  title: str
  unit: str  # Of the vertical axis.
  series: Sequence[Series]  # At least one.
  kind: str = 'curves'  # A name in `KINDS`.
  marks: Sequence[float] = ()  # Positions on the horizontal axis.
  label: str = 'round'  # Of the horizontal axis.
  wide: bool = False  # Whether the scale is logarithmic if values differ much.
  own_legend: bool = False  # The legend of the page does not name the series.


@matplotlib.rc_context(style.PLAIN_TEXT)
def draw(chart: Chart) -> figure_lib.Figure:
  """A figure with a title and a legend."""
  title = style.label(chart.title, _LETTERS)
  figure, (axes,) = style.figure(title, chart.unit, height=3.5)
  _fill(axes, chart)
  style.legend(figure, axes)
  return figure


@matplotlib.rc_context(_SVG)
def draw_bare(chart: Chart) -> figure_lib.Figure:
  """A figure as it stands on a page, which has title and legend itself."""
  # An inch is 72 pixels, here and in SVG.
  figure = figure_lib.Figure(figsize=(_WIDTH / 72, _HEIGHT / 72), dpi=72)
  left, right = _LEFT / _WIDTH, 1 - _RIGHT / _WIDTH
  figure.subplots_adjust(left, _BOTTOM / _HEIGHT, right, 1 - _TOP / _HEIGHT)
  _fill(figure.add_subplot(), chart)
  figure.text(0, 1 - (_TOP - 10) / _HEIGHT, chart.unit, color=_ink('muted'))
  return figure


def _fill(axes, chart) -> None:
  """Draws the series, and rules to read heights by."""
  KINDS[chart.kind](axes, chart)
  axes.set_axisbelow(True)
  axes.grid(False)
  axes.yaxis.grid(color=_ink('rule'), lw=1, alpha=1)
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
    if low >= 0:  # Heights are in proportion if the scale starts at 0.
      axes.set_ylim(0, 1.06 * high or 1)


def _draw_curves(axes, chart) -> None:
  """Draws values; of many, also a moving mean, and the values faintly."""
  for series in chart.series:
    x, y, drawn = _thin(series.x), _thin(series.y), series.style
    marker = drawn.marker
    if len(y) > _SMOOTHED:
      axes.plot(x, y, color=drawn.color, lw=0.8, alpha=0.25)
      y, marker = style.smooth(y, style.window(len(y))), ''
    axes.plot(x, y, marker=marker, ms=4, label=_name(series), **drawn.line)
  low, high = axes.dataLim.intervaly
  if chart.wide and high > _SPREAD * low > 0:
    axes.set_yscale('log')


def _draw_points(axes, chart) -> None:
  for series in chart.series:
    style.points(
      axes, series.style, series.x, series.y, yerr=series.error,
      label=_name(series), **series.style.line,
    )  # fmt: skip


def _draw_bars(axes, chart) -> None:
  """Draws stacked bars, each the mean of some rounds."""
  x = chart.series[0].x
  edges = np.append(_thin(x, _BARS, np.min), x[-1] + 1)
  below = np.zeros(len(edges) - 1)
  for series in chart.series:
    above = below + _thin(series.y.clip(0), _BARS)
    axes.stairs(
      above, edges, baseline=below, fill=True, lw=0, color=series.style.color,
      label=_name(series),
    )  # fmt: skip
    below = above


def _draw_histogram(axes, chart) -> None:
  """Draws shares over ratios, both logarithmic: most ratios are near 1."""
  for mark in chart.marks:
    axes.axvline(mark, color=_ink('muted'), lw=1.2, ls=(0, (1.5, 2)))
  for series in chart.series:
    axes.step(
      series.x, series.y, where='mid', label=_name(series), **series.style.line
    )
  least = min(y for series in chart.series for y in series.y if y > 0)
  axes.set_yscale('log', nonpositive='clip')
  axes.set_ylim(10 ** np.floor(np.log10(least)), 200)
  ends = np.exp(config_lib.LOG_RATIO_EDGES[[0, -1]])
  x = chart.series[0].x
  axes.set_xticks(
    [x[0], *np.log([0.25, 0.5, 1, 2, 4]), x[-1]],
    [f'<{ends[0]:.2g}', '0.25', '0.5', '1', '2', '4', f'>{ends[1]:.2g}'],
  )


KINDS = {
  'curves': _draw_curves,
  'points': _draw_points,
  'bars': _draw_bars,
  'histogram': _draw_histogram,
}


def _ink(color: str) -> str:
  return style.COLORS[color][0]


def _name(series: Series) -> str:
  return style.label(series.name, _LETTERS)


def _number(value: float, place=None) -> str:
  """A number that fits to the left of the axes."""
  if abs(value) < 1e3:
    return f'{value:.4g}'.replace('e-0', 'e-')
  return f'{value:,.0f}' if abs(value) < 1e5 else _LARGE(value)


def _thin(values, most=_POINTS, function=np.mean) -> np.ndarray:
  """Reduces groups of neighbours by a function, to at most `most` values."""
  size = -(-len(values) // most)
  groups = np.split(values, range(size, len(values), size))
  return np.array([*map(function, groups)])


def svg(chart: Chart, name: str) -> str:
  """A chart without title and legend, as an element of a page.

  It has the page's colours and fonts; `name` is unique in the page, and salts
  the ids.
  """
  written = io.StringIO()
  with matplotlib.rc_context({**_SVG, 'svg.hashsalt': name}):
    draw_bare(chart).savefig(
      written,
      format='svg',
      transparent=True,
      metadata=dict.fromkeys(('Date', 'Creator', 'Format', 'Type')),
    )
  root = ElementTree.fromstring(written.getvalue())
  used = {element.get('id') for element in root.iterfind('.//{*}defs/*')}
  definitions = root.find('{*}defs')
  # The rules of this style element would apply to the whole page.
  definitions.remove(definitions.find('{*}style'))
  for element in root.iter():
    element.tag, element.tail = _local(element.tag), None
    element.text = (element.text or '').strip() and element.text
    element.attrib = {
      _local(key): _adapt(_local(key), value)
      for key, value in element.attrib.items()
      if key != 'id' or value in used
    }
  title = f'{texts.printable(chart.title)}, {chart.unit}'
  root.attrib = {
    'viewBox': root.get('viewBox'), 'role': 'img', 'aria-label': title,
  }  # fmt: skip
  return ElementTree.tostring(root, encoding='unicode')


def _local(name: str) -> str:
  """A name without its namespace."""
  return name.rpartition('}')[2]


def _adapt(name: str, value: str) -> str:
  """Replaces colours by variables, and drops fonts and needless digits."""
  if name in ('id', 'href', 'clip-path', 'viewBox'):
    return value
  if name == 'style':
    parts = [part for part in value.split('; ') if 'font-family' not in part]
    return re.sub(
      '#[0-9a-f]{6}', lambda match: VARIABLES[match[0]], '; '.join(parts)
    )
  return re.sub(r'(\.\d\d)\d+', r'\1', value.replace('\n', ' '))
