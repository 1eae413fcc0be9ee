"""Figures of what THL does to rollouts.

sent, carried = sides.sides(rollout, receiver, limits)
figures.alignment(sent, carried, names=('llama', 'gemma'))
figures.residual({'llama to gemma': residuals})
"""

from collections.abc import Mapping, Sequence
import functools
import itertools
from typing import NamedTuple

from matplotlib import axes as axes_lib
from matplotlib import figure as figure_lib
from matplotlib import font_manager
from matplotlib import patches
import numpy as np

from mrl_jax import texts
from mrl_jax.analysis import alignment as sides
from mrl_jax.thl import transfer

# Colours that the colour-blind tell apart, of Okabe and Ito: lighter ones that
# can be written on, and those of lines.
_KINDS = {
  '1:1': '#DDDDDD',
  '1:n': '#9CCEEA',
  'n:1': '#F3C98B',
  'n:m': '#E3B5D0',
}
_COLORS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7')
_DASHES = ('-', '--', '-.', ':')
_LINE = 16  # Bytes.
_MOST = 8  # Lines.
_PITCH, _BAND = 3.4, 0.6  # From line to line, between the sides; a box has 1.
_INCHES = 7.6  # The width of the axes, about.
_FONT, _ADVANCE = 'DejaVu Sans Mono', 0.602  # Of matplotlib; width over size.
_LEAST = 6.0  # Points.


def kinds(sent: sides.Side, carried: sides.Side) -> list[str]:
  """By how many tokens of the two each chunk has, as in `transfer.Residual`."""
  names = {(1, 1): '1:1', (1, 2): '1:n', (2, 1): 'n:1', (2, 2): 'n:m'}
  counts = (np.bincount(side.chunk).clip(max=2) for side in (sent, carried))
  return [names[n, m] for n, m in zip(*counts, strict=True)]


def alignment(
  sent: sides.Side, carried: sides.Side, names: tuple[str, str]
) -> figure_lib.Figure:
  """A rollout in the tokens of both sides, over the bytes that they share.

  A box is a token, with its log-probability. What lies between two common
  boundaries, which are black, is a chunk: its colour says how many tokens of
  each side it has, and the number between the sides is the sum of their
  log-probabilities, which is that of both. Where a control token without bytes
  was sampled there is a mark above.

  No chunk is cut: lines have 16 bytes, or as many as the longest chunk. Of a
  long rollout the first lines are drawn. Text that would be too small is left
  out.

  Args:
    sent: what the sender sampled; not empty.
    carried: the same in the tokens of the receiver.
    names: of the two.
  """
  found, sums = kinds(sent, carried), np.bincount(sent.chunk, sent.logp)
  ends = np.bincount(sent.chunk, sent.lengths).cumsum().astype(int)
  starts = np.append(0, ends[:-1])
  width = max(_LINE, (ends - starts).max())
  line_of = _fill(ends, width)
  lines = min(line_of[-1] + 1, _MOST)
  figure = _figure('One rollout in two vocabularies', 1.7 + 1.35 * lines)
  pen = _Pen(figure.add_subplot(), width)
  for c in np.flatnonzero(line_of < lines):
    left, y = starts[np.searchsorted(line_of, line_of[c])], -_PITCH * line_of[c]
    edges = starts[c] - left, ends[c] - left
    pen.box(*edges, y - 2 - _BAND, 2 + _BAND, color=_KINDS[found[c]], lw=0)
    pen.text(*edges, y - 1 - _BAND / 2, _nats(sums[c]), 10)
    for x in edges:
      pen.axes.plot([x, x], [y + 0.1, y - 2.1 - _BAND], 'k', lw=1.8)
    pen.tokens(sent, c, left, y)
    pen.tokens(carried, c, left, y - 1 - _BAND)
  more = np.sum(line_of >= lines)
  pen.axes.set_title(
    f'Above: tokens of {texts.printable(names[0])}. Below: tokens of '
    f'{texts.printable(names[1])}. Numbers: log-probabilities,\nnats; between '
    'the two, their sum in a chunk. Black: common boundaries.'
    + (f' {more:,} more chunks follow.' if more else ''),
    loc='left',
    fontsize=9.5,
    parse_math=False,
  )
  pen.axes.set(xlim=(-0.1, width + 0.1), ylim=(0.6 - _PITCH * lines, 0.3))
  pen.axes.set_xlabel('byte of the line')
  pen.axes.set_yticks([])
  pen.axes.spines[['top', 'left', 'right']].set_visible(False)
  _legend(figure, [kind for kind in _KINDS if kind in found])
  return figure


def _fill(ends: np.ndarray, width: int) -> np.ndarray:
  """The line of every chunk, each as full as can be."""
  line_of, start = [0], 0
  for before, end in itertools.pairwise(ends):
    full = end - start > width
    start = before if full else start
    line_of.append(line_of[-1] + full)
  return np.array(line_of)


class _Pen(NamedTuple):
  """Draws into lines of `width` bytes."""

  axes: axes_lib.Axes
  width: int

  def box(self, left, right, y, height, **style) -> None:
    self.axes.add_patch(
      patches.Rectangle((left, y), right - left, height, **style)
    )

  def text(self, left, right, y, text, size, **style) -> None:
    """Text between two bytes, of this size or what there is room for."""
    points = 72 * _INCHES * (right - left) / self.width
    size = min(size, 0.86 * points / (_ADVANCE * len(text)))
    if size >= _LEAST:
      self.axes.text(
        (left + right) / 2, y, text, fontsize=size, family=_FONT,
        parse_math=False, ha='center', va='center', **style,
      )  # fmt: skip

  def tokens(self, side, c, left, y) -> None:
    """The tokens of a chunk, below `y`."""
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
  """Few letters, whatever the size; a sure token's is not told as -0.00."""
  if abs(value) >= 0.005:
    return f'{value:.2f}'
  return f'{value:.0e}'.replace('e-0', 'e-') if value else '0'


def _drawable(text: str) -> str:
  """Escapes what the font lacks."""
  return ''.join(c if _has_glyph(c) else f'\\u{ord(c):04x}' for c in text)


@functools.cache
def _has_glyph(c: str) -> bool:
  font = font_manager.get_font(font_manager.findfont(_FONT))
  return font.get_char_index(ord(c)) > 0


def carried_share(
  residuals: Sequence[transfer.Residual],
) -> tuple[np.ndarray, np.ndarray]:
  """How many rollouts a limit on e_seg takes.

  Args:
    residuals: one for each rollout, as found with a `max_residual` of 1.

  Returns:
    Every e_seg that there is, f64 [n], increasing, and the share of all
    rollouts that is carried if that is the limit, f64 [n].
  """
  errors = [r.segmentation_error for r in residuals if not r.refused]
  limits, counts = np.unique(np.array(errors, np.float64), return_counts=True)
  return limits, np.cumsum(counts) / max(len(residuals), 1)


def chunk_shares(residuals: Sequence[transfer.Residual]) -> dict[str, float]:
  """The share of each kind of chunk, over all rollouts; 0 without any."""
  total = transfer.Residual()
  for one in residuals:
    total.add(one)
  count = max(sum(total.chunks.values()), 1)
  return {kind: total.chunks.get(kind, 0) / count for kind in _KINDS}


def residual(
  found: Mapping[str, Sequence[transfer.Residual]],
) -> figure_lib.Figure:
  """What a limit on e_seg takes in each direction, and the kinds of chunks.

  Args:
    found: by direction, a residual for each rollout, as found with a
      `max_residual` of 1.
  """
  title = 'What differs between two vocabularies'
  figure = _figure(title, 4.8 + 0.75 * len(found))
  top, bottom = figure.subplots(2, height_ratios=(5, 0.5 + len(found)))
  for i, (name, residuals) in enumerate(found.items()):
    name, color = texts.printable(name), _COLORS[i % len(_COLORS)]
    limits, shares = carried_share(residuals)
    whole = 100 * shares[-1:] if len(shares) else [0]
    top.step(
      [0, *limits, 1],
      [0, *100 * shares, *whole],
      _DASHES[i % len(_DASHES)],
      where='post',
      color=color,
      lw=2,
      label=name,
    )
    bottom.text(0, i - 0.3, name, va='bottom', fontsize=10, parse_math=False)
    _draw_shares(bottom, i, chunk_shares(residuals))
  top.set(xlim=(0, 1), ylim=(-2, 104), ylabel='rollouts carried, percent')
  top.set_xlabel(
    'max_residual: the largest e_seg that is taken, the share of the\n'
    "receiver's boundaries that the sender does not have"
  )
  top.grid(alpha=0.25)
  legend = top.legend(
    frameon=False, fontsize=10, loc='lower left', bbox_to_anchor=(0, 1)
  )
  for text in legend.get_texts():
    text.set_parse_math(False)
  bottom.set(xlim=(0, 100), ylim=(len(found) - 0.6, -0.8), yticks=[])
  bottom.set_xlabel('chunks, percent')
  for axes in (top, bottom):
    axes.spines[['top', 'right']].set_visible(False)
  bottom.spines['left'].set_visible(False)
  _legend(figure, _KINDS)
  return figure


def _draw_shares(axes, y, shares) -> None:
  """A bar of all kinds, with the percentages for which there is room."""
  start = 0.0
  for kind, share in shares.items():
    axes.barh(y, 100 * share, 0.5, 100 * start, color=_KINDS[kind])
    if share > 0.05:
      middle = 100 * (start + share / 2)
      axes.text(middle, y, f'{share:.0%}', ha='center', va='center')
    start += share


def _figure(title: str, height: float) -> figure_lib.Figure:
  """At a width of 800 pixels, letters are 11 pixels high or more."""
  figure = figure_lib.Figure(figsize=(8, height), dpi=150, layout='constrained')
  figure.suptitle(title, x=0.01, ha='left', fontsize=13, weight='bold')
  return figure


def _legend(figure, found) -> None:
  """Which colour a kind of chunks has."""
  figure.legend(
    handles=[patches.Patch(color=_KINDS[kind], label=kind) for kind in found],
    title='tokens of the sender : of the receiver, in a chunk',
    loc='outside lower center',
    ncols=len(_KINDS),
    frameon=False,
    fontsize=9.5,
    title_fontsize=9.5,
  )
