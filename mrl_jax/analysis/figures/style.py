"""Palette, line styles and layout that all figures of the project share."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from matplotlib import artist as artist_lib
from matplotlib import axes as axes_lib
from matplotlib import figure as figure_lib
import numpy as np

from mrl_jax import texts

# Of lines, each colour on white and the one that replaces it on black. On white
# they are six of Okabe and Ito, one of Tol, and a violet. Under simulated
# protanopia, deuteranopia and tritanopia (Machado et al. 2009) no two of either
# column come closer than 16 units of CIE L*a*b*.
_LINES = (
  ('#0072b2', '#3f9be0'),
  ('#d55e00', '#e8641c'),
  ('#009e73', '#1fd6a3'),
  ('#cc79a7', '#e79cc8'),
  ('#e69f00', '#ffd24d'),
  ('#56b4e9', '#a8dcff'),
  ('#882255', '#c7487e'),
  ('#7722cc', '#a56bff'),
)
# The same of areas, after Tol.
_AREAS = (
  ('#332288', '#8d7ff0'),
  ('#88ccee', '#88ccef'),
  ('#44aa99', '#44ab99'),
  ('#ddcc77', '#ddcc78'),
  ('#cc6677', '#dd7788'),
  ('#882256', '#c2557f'),
  ('#117733', '#3fa863'),
  ('#aa4499', '#cc66bb'),
  ('#999933', '#aaaa44'),
  ('#bbbbbb', '#777777'),
)
# By name, the colour on white and the one on black; no colour on white has two
# names.
COLORS = {
  'ink': ('#1f2328', '#e6e9ed'),
  'muted': ('#59636e', '#9aa5b1'),
  'rule': ('#d5dae0', '#363d47'),
  'card': ('#ffffff', '#171c22'),
  'paper': ('#f4f6f8', '#0d1117'),
  **{f'line{i}': pair for i, pair in enumerate(_LINES)},
  **{f'area{i}': pair for i, pair in enumerate(_AREAS)},
}
LINES = tuple(white for white, _ in _LINES)
AREAS = tuple(white for white, _ in _AREAS)
PALE = ('#dddddd', '#9cceea', '#f3c98b', '#e3b5d0')  # Areas behind text.
_MARKERS = 'sD^v<>ph'
# Lengths on and off, in line widths; () is solid.
_DASHES = ((), (4, 1.6), (6, 1.6, 1, 1.6), (6, 1.6, 1, 1.6, 1, 1.6), (8, 2))
SMALL = 9.5  # Points; 11 pixels if a figure is shown 800 pixels wide.
# A setting of matplotlib for names that anybody may have chosen.
PLAIN_TEXT = {'text.parse_math': False}
_WINDOWS = 15  # Windows of a moving mean that fit side by side in a curve.


class LineStyle(NamedTuple):
  """How the line of a method, run or policy is drawn."""

  color: str
  dashes: tuple[float, ...]  # Lengths on and off, in line widths; () is solid.
  marker: str

  @property
  def line(self) -> dict:
    """Arguments of `Axes.plot` for a line without markers."""
    pattern = (0, self.dashes) if self.dashes else '-'
    return {'color': self.color, 'linestyle': pattern, 'linewidth': 1.6}


BASELINE = LineStyle('black', (1, 1.65), 'o')


def line_style(i: int) -> LineStyle:
  """The style of the line at place `i`; the first 40 differ."""
  n = len(LINES)
  dashes = _DASHES[(i + i // n) % len(_DASHES)]
  return LineStyle(LINES[i % n], dashes, _MARKERS[i % n])


def line_styles(names: Iterable[str], baseline: str) -> dict[str, LineStyle]:
  """Styles by name, in order; the baseline is black, dotted and first."""
  others = [name for name in names if name != baseline]
  numbered = {name: line_style(i) for i, name in enumerate(others)}
  return {baseline: BASELINE, **numbered}


def area_style(i: int) -> LineStyle:
  """The style of the area at place `i` of a stack."""
  return LineStyle(AREAS[i % len(AREAS)], (), '')


def label(name: str, letters: int) -> str:
  """A name that may come from anywhere, printable and cut to a length."""
  name = texts.printable(name)
  return name if len(name) <= letters else f'{name[: letters - 1]}…'


def window(rounds: int) -> int:
  """Width of the moving mean of a curve; odd: as many before as after."""
  return max(rounds // _WINDOWS, 1) | 1


def smooth(values_R: np.ndarray, width: int) -> np.ndarray:
  """The moving mean; its window is cut off at the ends of the curve, f64 [R].

  With a width of 3, [0, 3, 6, 0] becomes [1.5, 3, 3, 3].
  """
  box = np.ones(min(width, len(values_R)))
  counts = np.convolve(np.ones(len(values_R)), box, 'same')
  return np.convolve(values_R, box, 'same') / counts


def points(axes: axes_lib.Axes, drawn: LineStyle, x, y, **settings) -> None:
  """Draws markers, with error bars if `xerr` or `yerr` is given."""
  defaults = {
    'marker': drawn.marker, 'linestyle': 'none', 'color': drawn.color, 'ms': 6,
    'mec': 'white', 'mew': 0.5, 'elinewidth': 1.3, 'capsize': 2.5,
  }  # fmt: skip
  axes.errorbar(x, y, **{**defaults, **settings})


def figure(
  title: str,
  text: str = '',
  *,
  rows: int = 1,
  columns: int = 1,
  height: float = 5.0,
  **subplots,
) -> tuple[figure_lib.Figure, list[axes_lib.Axes]]:
  """A figure of 8 by `height` inches, and its axes from left to right.

  It has a title of one line, and below it a text of how to read the figure.
  `subplots` are further arguments of `Figure.subplots`, e.g. `sharey`.
  """
  drawn = figure_lib.Figure(figsize=(8, height), dpi=150, layout='constrained')
  # The layout reserves space for the title only. Blank lines after it reserve
  # space for the text, whose size and weight differ.
  blank = '\n' * (1 + text.count('\n')) if text else ''
  drawn.suptitle(
    f'{title}{blank}', x=0.01, ha='left', fontsize=13, weight='bold'
  )
  drawn.text(0.01, 0.98 - 0.26 / height, text, va='top', fontsize=SMALL)
  all_axes = drawn.subplots(rows, columns, squeeze=False, **subplots).ravel()
  for axes in all_axes:
    axes.grid(alpha=0.25)
    axes.spines[['top', 'right']].set_visible(False)
  return drawn, [*all_axes]


def legend(
  drawn: figure_lib.Figure,
  axes: axes_lib.Axes | None = None,
  handles: Sequence[artist_lib.Artist] = (),
  **settings,
) -> None:
  """Names the lines of some axes, or `handles`, beside all axes of a figure.

  `settings` are of `Figure.legend`; by default the legend is at the right.
  """
  if axes is not None:
    handles, _ = axes.get_legend_handles_labels()
  defaults = {
    'loc': 'outside right upper', 'frameon': False, 'labelspacing': 0.7,
    'handlelength': 3, 'fontsize': SMALL,
  }  # fmt: skip
  drawn.legend(handles=handles, **{**defaults, **settings})
