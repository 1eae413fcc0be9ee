"""Figures of what THL does to rollouts.

sent, carried = alignment.sides(rollout, receiver, limits)
figures.alignment(sent, carried, names=('llama', 'gemma'))
figures.residual({'llama to gemma': residuals})
"""

from collections.abc import Iterable, Mapping, Sequence
import functools
import itertools
from typing import NamedTuple

import matplotlib
from matplotlib import axes as axes_lib
from matplotlib import figure as figure_lib
from matplotlib import font_manager
from matplotlib import patches
import numpy as np

from mrl_jax import texts
from mrl_jax.analysis import alignment as alignment_lib
from mrl_jax.analysis import run as run_lib
from mrl_jax.analysis.figures import style
from mrl_jax.thl import transfer

_KINDS = dict(zip(('1:1', '1:n', 'n:1', 'n:m'), style.PALE, strict=True))
_LINE_BYTES = 16
_MOST_LINES = 8
# Heights, where a token has 1: from one line to the next, and of the band
# between sender and receiver.
_PITCH, _BAND = 3.4, 0.6
_INCHES = 7.6  # Width of the axes, about.
_FONT, _ADVANCE = 'DejaVu Sans Mono', 0.602  # Of matplotlib; width over size.
_SMALLEST = 6.0  # Points.


def kinds(sent: alignment_lib.Side, carried: alignment_lib.Side) -> list[str]:
  """The kind of each chunk: its number of tokens on both sides.

  '1:n' is one token of the sender and several of the receiver, as in
  `transfer.Residual`.
  """
  names = {(1, 1): '1:1', (1, 2): '1:n', (2, 1): 'n:1', (2, 2): 'n:m'}
  counts = (np.bincount(side.chunk).clip(max=2) for side in (sent, carried))
  return [names[pair] for pair in zip(*counts, strict=True)]


@matplotlib.rc_context(style.PLAIN_TEXT)
def alignment(
  sent: alignment_lib.Side,
  carried: alignment_lib.Side,
  names: tuple[str, str],
) -> figure_lib.Figure:
  """Draws a rollout in the tokens of both sides, over their common bytes.

  A box is a token with its log-probability. Black lines are common boundaries;
  a chunk lies between two of them. Its colour is its kind, and the number in
  its middle is the sum of its log-probabilities, equal on both sides. A
  triangle marks where a control token without bytes was sampled.

  A line has 16 bytes, or as many as the longest chunk, so that no chunk is cut.
  The first 8 lines are drawn. Text that would be too small is left out. `sent`
  is not empty; `names` are those of sender and receiver.
  """
  kind_of, sums = kinds(sent, carried), np.bincount(sent.chunk, sent.logp)
  ends = np.bincount(sent.chunk, sent.lengths).cumsum().astype(int)
  starts = np.append(0, ends[:-1])
  width = max(_LINE_BYTES, (ends - starts).max())
  line_of = _fill(ends, width)
  lines = min(line_of[-1] + 1, _MOST_LINES)
  more = np.sum(line_of >= lines)
  figure, (axes,) = style.figure(
    'One rollout in two vocabularies',
    f'Above: tokens of {texts.printable(names[0])}. Below: tokens of '
    f'{texts.printable(names[1])}. Numbers: log-probabilities,\nnats; between '
    'the two, their sum in a chunk. Black: common boundaries.'
    + (f' {more:,} more chunks follow.' if more else ''),
    height=1.7 + 1.35 * lines,
  )
  pen = _Pen(axes, width)
  for c in np.flatnonzero(line_of < lines):
    left, y = starts[np.searchsorted(line_of, line_of[c])], -_PITCH * line_of[c]
    edges = starts[c] - left, ends[c] - left
    pen.box(*edges, y - 2 - _BAND, 2 + _BAND, color=_KINDS[kind_of[c]], lw=0)
    pen.text(*edges, y - 1 - _BAND / 2, _nats(sums[c]), 10)
    for x in edges:
      axes.plot([x, x], [y + 0.1, y - 2.1 - _BAND], 'k', lw=1.8)
    pen.tokens(sent, c, left, y)
    pen.tokens(carried, c, left, y - 1 - _BAND)
  axes.set(xlim=(-0.1, width + 0.1), ylim=(0.6 - _PITCH * lines, 0.3))
  axes.set(xlabel='byte of the line', yticks=[])
  axes.grid(False)
  axes.spines['left'].set_visible(False)
  _name_kinds(figure, [kind for kind in _KINDS if kind in kind_of])
  return figure


def _fill(ends: np.ndarray, width: int) -> np.ndarray:
  """The line of every chunk, as many chunks to a line as fit.

  Chunks that end at bytes 10, 15, 19 have lines 0, 0, 1 of 16 bytes.
  """
  line_of, start = [0], 0
  for before, end in itertools.pairwise(ends):
    is_full = end - start > width
    start = before if is_full else start
    line_of.append(line_of[-1] + is_full)
  return np.array(line_of)


class _Pen(NamedTuple):
  """Draws into lines of `width` bytes."""

  axes: axes_lib.Axes
  width: int

  def box(self, left, right, y, height, **settings) -> None:
    self.axes.add_patch(
      patches.Rectangle((left, y), right - left, height, **settings)
    )

  def text(self, left, right, y, text, size, **settings) -> None:
    """Writes text between two bytes, smaller than `size` if it must be."""
    points = 72 * _INCHES * (right - left) / self.width
    size = min(size, 0.86 * points / (_ADVANCE * len(text)))
    if size >= _SMALLEST:
      self.axes.text(
        (left + right) / 2, y, text, fontsize=size, family=_FONT, ha='center',
        va='center', **settings,
      )  # fmt: skip

  def tokens(self, side, c, left, y) -> None:
    """Draws the tokens of chunk `c` below `y`; the line starts at `left`."""
    ends = np.cumsum(side.lengths) - left
    for i in np.flatnonzero(side.chunk == c):
      start, end = ends[i] - side.lengths[i], ends[i]
      if start == end:
        self.axes.plot(end, y + 0.15, 'kv', ms=6, zorder=3)
        continue
      self.box(
        start + 0.06, end - 0.06, y - 0.94, 0.88, fc='w', ec='0.4', lw=0.8
      )
      self.text(start, end, y - 0.34, _drawable(side.tokens[i]), 12)
      self.text(start, end, y - 0.73, _nats(side.logp[i]), 9, color='0.25')


def _nats(value: float) -> str:
  """A log-probability in few letters; small ones do not become -0.00."""
  if abs(value) >= 0.005:
    return f'{value:.2f}'
  return f'{value:.0e}'.replace('e-0', 'e-') if value else '0'


def _drawable(text: str) -> str:
  """Escapes characters that the font lacks."""
  return ''.join(c if _has_glyph(c) else f'\\u{ord(c):04x}' for c in text)


@functools.cache
def _has_glyph(c: str) -> bool:
  font = font_manager.get_font(font_manager.findfont(_FONT))
  return font.get_char_index(ord(c)) > 0


def carried_share(
  residuals: Sequence[transfer.Residual],
) -> tuple[np.ndarray, np.ndarray]:
  """The share of rollouts that each limit on e_seg lets through.

  Takes a residual for each rollout, computed with a `max_residual` of 1.
  Returns every value of e_seg among the rollouts, increasing, f64 [n]; and the
  share of all rollouts that is carried if it is the limit, f64 [n].
  """
  errors = [r.segmentation_error for r in residuals if not r.refused]
  limits, counts = np.unique(np.array(errors, np.float64), return_counts=True)
  return limits, np.cumsum(counts) / max(len(residuals), 1)


def chunk_shares(residuals: Iterable[transfer.Residual]) -> dict[str, float]:
  """The share of each kind of chunk over all rollouts; 0 without chunks."""
  chunks = run_lib.total(residuals).chunks
  count = max(sum(chunks.values()), 1)
  return {kind: chunks.get(kind, 0) / count for kind in _KINDS}


@matplotlib.rc_context(style.PLAIN_TEXT)
def residual(
  by_direction: Mapping[str, Sequence[transfer.Residual]],
) -> figure_lib.Figure:
  """Draws the effect of a limit on e_seg, and the kinds of chunks.

  Each direction has a residual for each rollout, computed with a `max_residual`
  of 1.
  """
  count = len(by_direction)
  figure, (top, bottom) = style.figure(
    'What differs between two vocabularies',
    rows=2,
    height=4.8 + 0.75 * count,
    height_ratios=(5, 0.5 + count),
  )
  for i, (name, residuals) in enumerate(by_direction.items()):
    name, drawn = texts.printable(name), style.line_style(i)
    limits, shares = carried_share(residuals)
    x, y = [0, *limits, 1], [0, *100 * shares]
    top.step(x, [*y, y[-1]], where='post', label=name, **drawn.line)
    bottom.text(0, i - 0.3, name, va='bottom', fontsize=10)
    start = 0.0
    for kind, share in chunk_shares(residuals).items():
      bottom.barh(i, 100 * share, 0.5, 100 * start, color=_KINDS[kind])
      if share > 0.05:  # There is room for the number.
        middle = 100 * (start + share / 2)
        bottom.text(middle, i, f'{share:.0%}', ha='center', va='center')
      start += share
  top.set(xlim=(0, 1), ylim=(-2, 104), ylabel='rollouts carried, percent')
  top.set_xlabel(
    'max_residual: the largest e_seg that is carried, the share of the\n'
    "receiver's boundaries that the sender lacks"
  )
  style.legend(figure, top)
  bottom.set(xlim=(0, 100), ylim=(count - 0.6, -0.8), yticks=[])
  bottom.set_xlabel('chunks, percent')
  bottom.grid(False)
  bottom.spines['left'].set_visible(False)
  _name_kinds(figure, _KINDS)
  return figure


def _name_kinds(figure, kinds_drawn: Iterable[str]) -> None:
  """Adds a legend with the colour of each kind of chunk."""
  style.legend(
    figure,
    handles=[patches.Patch(color=_KINDS[k], label=k) for k in kinds_drawn],
    title='tokens of the sender : of the receiver, in a chunk',
    title_fontsize=style.SMALL,
    loc='outside lower center',
    ncols=len(_KINDS),
  )
