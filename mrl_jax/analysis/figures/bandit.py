"""Figures of what the methods do on a bandit; their numbers are of `sweeps.py`.

Every method keeps its colour, marker and dashes in all figures that are drawn
of the same table of methods. The first one is the baseline, black and dotted.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from matplotlib import axes as axes_lib
from matplotlib import figure as figure_lib
import numpy as np

from mrl_jax.bandit import simulate
from mrl_jax.bandit import sweeps

# Colours that the colour-blind tell apart, of Okabe and Ito, and one of Tol.
_COLORS = (
  *('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9'),
  '#882255',
)
_MARKERS = 'sD^v<>p'
_DASHES = ('-', '--', '-.', (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))
_SUCCESS = 'p: how often the learner succeeds'
_SUPPORT = 'support: d log p / dη at η = 0'
_NOISE = 'noise: tr Cov g'
_SECOND = 'second moment: E |g|²'


class Style(NamedTuple):
  """How a method is drawn."""

  color: str
  marker: str
  dashes: str | tuple


def styles(names: Iterable[str]) -> dict[str, Style]:
  """Black and dotted for the first; of 35 others no two are drawn alike."""
  first, *others = names
  return {first: Style('k', 'o', ':')} | {
    name: Style(
      _COLORS[i % len(_COLORS)],
      _MARKERS[i % len(_MARKERS)],
      _DASHES[(i + i // len(_COLORS)) % len(_DASHES)],
    )
    for i, name in enumerate(others)
  }


def plane(
  by_learner: sweeps.Sweep,
  at: sweeps.Sweep,
  simulated: sweeps.Sweep,
) -> figure_lib.Figure:
  """Support against noise, as the learner's success rate falls.

  Args:
    by_learner: the curves, `sweeps.by_learner`.
    at: the same, of one value, where the markers are.
    simulated: `sweeps.simulated` at that value.
  """
  figure, (axes,) = _figure(
    'Stability and support',
    f'A curve: a method as p falls from {by_learner.x_X.max():g} to '
    f'{by_learner.x_X.min():g}. Marker: at p = {at.x_X[0]:g}; ring: simulated\n'
    'there. Better is lower and further right. Along a grey line, '
    'support²/noise is the\nsame: no learning rate changes it. What is not '
    'positive is not drawn.',
  )
  drawn = styles(by_learner.lines)
  for name, line in by_learner.lines.items():
    style, marked, found = drawn[name], at.lines[name], simulated.lines[name]
    axes.plot(
      _positive(line.support_X), line.noise_X, ls=style.dashes,
      color=style.color, lw=1.6,
    )  # fmt: skip
    axes.plot(
      _positive(marked.support_X), marked.noise_X, style.marker,
      color=style.color, ms=9, mec='w', mew=0.5,
    )  # fmt: skip
    axes.plot(
      _positive(found.support_X), found.noise_X, 'o', color='k', ms=14,
      mfc='none', mew=0.9,
    )  # fmt: skip
    _entry(axes, name, style)
  axes.set(xscale='log', yscale='log', xlabel=_SUPPORT, ylabel=_NOISE)
  _diagonals(axes)
  _legend(figure, axes)
  return figure


def _diagonals(axes) -> None:
  """Lines of equal support²/noise, across what is drawn."""
  x_2, y_2 = np.array(axes.get_xlim()), np.array(axes.get_ylim())
  for power in range(-8, 5):
    axes.plot(x_2, x_2**2 / 10.0**power, color='0.8', lw=0.7, zorder=0)
  axes.set(xlim=x_2, ylim=y_2)


def support(
  by_learner: sweeps.Sweep, gate: float | None = None
) -> figure_lib.Figure:
  """What a step does for a learner that hardly ever succeeds.

  Args:
    by_learner: `sweeps.by_learner`.
    gate: a success rate to mark, below which the gates of HACPO and GRAFT let
      no success in; None for none.
  """
  figure, (axes,) = _figure(
    'Support where the learner seldom succeeds',
    'By how much a small step raises log p, for a unit of learning rate. '
    'Thin: minus the\nsupport, where a step lowers p.',
  )
  drawn = styles(by_learner.lines)
  for name, line in by_learner.lines.items():
    _signed(axes, by_learner.x_X, line.support_X, drawn[name])
    _entry(axes, name, drawn[name], marker=False)
  axes.set(xscale='log', yscale='log', xlabel=_SUCCESS, ylabel=_SUPPORT)
  if gate is not None:
    axes.axvline(gate, color='0.5', lw=0.8, zorder=0)
    axes.annotate(
      'gates of HACPO and GRAFT', (gate, 0), (4, 5), color='0.35', fontsize=9.5,
      xycoords=('data', 'axes fraction'), textcoords='offset points',
    )  # fmt: skip
  _legend(figure, axes)
  return figure


def context_weights(weights: sweeps.ContextWeights) -> figure_lib.Figure:
  """How XGRPO weighs prompts, by how hard they are for either."""
  figure, (axes,) = _figure(
    'XGRPO keeps the direction and changes the weight',
    'E g = c(p, q) grad J: what a prompt counts where the peer succeeds with '
    'q. In GRPO,\nthe peer makes no difference.',
  )
  shown = {'GRPO': weights.grpo_X} | {
    f'XGRPO, q = {q:g}': weight_X
    for q, weight_X in zip(weights.q_Y, weights.xgrpo_YX, strict=True)
  }
  for (name, weight_X), style in zip(
    shown.items(), styles(shown).values(), strict=True
  ):
    axes.plot(
      weights.p_X, weight_X, ls=style.dashes, color=style.color, lw=1.6,
      label=name,
    )  # fmt: skip
  axes.set(xlim=(0, 1), xlabel=_SUCCESS, ylabel='weight c of the prompt')
  _legend(figure, axes)
  return figure


def peer(by_peer: sweeps.Sweep) -> figure_lib.Figure:
  """Support and noise as the peer's success rate varies."""
  figure, (left, right) = _figure(
    'How good the peer is',
    'At a fixed success rate p of the learner. The left axis is linear around '
    '0 and\nlogarithmic beyond.',
    columns=2,
  )
  _lines(left, by_peer, lambda line: line.support_X)
  left.set_yscale('symlog', linthresh=1e-3)
  _lines(right, by_peer, lambda line: line.noise_X)
  right.set_yscale('log')
  for axes, label in ((left, _SUPPORT), (right, _NOISE)):
    axes.set(xlim=(0, 1), xlabel='q: how often the peer succeeds', ylabel=label)
  _legend(figure, right)
  return figure


def divergence(by_divergence: sweeps.Divergence) -> figure_lib.Figure:
  """The second moment as the peer's policy moves away."""
  figure, (axes,) = _figure(
    'The price of a ratio',
    'The second moment of g as the peer prefers what the learner seldom does. '
    'Grey: our\nbound on the part of it that the peer has in PRP.',
  )
  x_X = by_divergence.x_X
  _lines(axes, by_divergence, lambda line: line.second_X)
  axes.plot(x_X, by_divergence.bound_X, color='0.6', lw=1.2, label='bound')
  axes.set(xscale='log', yscale='log', xlabel='χ²(π ‖ μ)', ylabel=_SECOND)
  _legend(figure, axes)
  return figure


def length(by_length: sweeps.Sweep, chi2: float) -> figure_lib.Figure:
  """The second moment as texts become longer.

  Args:
    by_length: `sweeps.by_length`.
    chi2: of one token.
  """
  figure, (axes,) = _figure(
    'A ratio of whole responses is exponential in their length',
    f'Texts of two tokens, whose chance is 1/2 for the learner; χ² = {chi2:g} '
    'at every position.',
  )
  _lines(axes, by_length, lambda line: line.second_X, marked=True)
  axes.set(yscale='log', xlabel='T: tokens of a response', ylabel=_SECOND)
  axes.xaxis.get_major_locator().set_params(integer=True)
  _legend(figure, axes)
  return figure


def errors(
  by_truncation: sweeps.Errors, by_thl_error: sweeps.Errors
) -> figure_lib.Figure:
  """What truncation and wrong ratios do to PRP, beside what bounds it."""
  figure, all_axes = _figure(
    'What PRP pays for stability, and for errors of THL',
    'How far E g is from that of exact ratios. Dashed: bound. Dotted: standard '
    'deviation of\nthe gradient of one group.',
    columns=2,
  )
  sides = (
    (by_truncation, 'C: largest ratio'),
    (by_thl_error, 'E: error of log π / μ, nats'),
  )
  for axes, (found, label) in zip(all_axes, sides, strict=True):
    for i, (name, off_X) in enumerate(found.off.items()):
      axes.plot(
        found.x_X, off_X, color=_COLORS[i], marker=_MARKERS[i], markevery=0.15,
        ms=5, lw=1.6, label=name,
      )  # fmt: skip
    axes.plot(found.x_X, found.bound_X, 'k--', lw=1.2, label='bound')
    axes.plot(
      found.x_X, found.deviation_X, 'k:', lw=1.4, label='standard deviation'
    )
    axes.set(xlabel=label, ylabel='|E g̃ − E g|')
    axes.set_ylim(bottom=0)
    axes.legend(
      loc='upper left', bbox_to_anchor=(0, -0.16), frameon=False, fontsize=9.5
    )
  return figure


def groups(by_group: sweeps.Sweep, by_peers: sweeps.Sweep) -> figure_lib.Figure:
  """Support and noise by the number of own and of peer samples."""
  figure, axes = _figure(
    'Group sizes',
    'Left: own samples, of a fixed number of the peer’s. Right: the reverse.',
    columns=2,
    rows=2,
  )
  for column, (found, label) in enumerate(
    ((by_group, 'G: own samples'), (by_peers, 'H: samples of the peer'))
  ):
    top, bottom = axes[column], axes[2 + column]
    _lines(top, found, lambda line: line.support_X)
    _lines(bottom, found, lambda line: _positive(line.noise_X))
    top.set_yscale('symlog', linthresh=1e-3)
    bottom.set_yscale('log')
    bottom.set_xlabel(label)
    for one in (top, bottom):
      one.xaxis.get_major_locator().set_params(integer=True)
  axes[0].set_ylabel(_SUPPORT)
  axes[2].set_ylabel(_NOISE)
  _legend(figure, axes[0])
  return figure


def learning(curves: Mapping[str, simulate.Curves]) -> figure_lib.Figure:
  """Success rates over updates, expected and sampled."""
  seeds = len(next(iter(curves.values())).sampled_ST)
  figure, (left, right) = _figure(
    'Learning where there was nothing to reinforce',
    f'Left: along E g. Right: along sampled g, median of {seeds} learners; '
    'bands: from the\nfirst to the third quartile.',
    columns=2,
  )
  drawn = styles(curves)
  for name, found in curves.items():
    style, x_T = drawn[name], np.arange(len(found.expected_T))
    low_T, middle_T, high_T = np.quantile(
      found.sampled_ST, (0.25, 0.5, 0.75), axis=0
    )
    right.fill_between(x_T, low_T, high_T, color=style.color, alpha=0.12, lw=0)
    for axes, y_T in ((left, found.expected_T), (right, middle_T)):
      axes.plot(x_T, y_T, ls=style.dashes, color=style.color, lw=1.6)
    _entry(right, name, style, marker=False)
  for axes in (left, right):
    axes.set(xlabel='update', ylim=(-0.02, 1.02))
  left.set_ylabel(_SUCCESS)
  right.tick_params(labelleft=False)
  _legend(figure, right)
  return figure


def _lines(
  axes,
  found: sweeps.Sweep,
  of: Callable[[sweeps.Line], np.ndarray],
  marked: bool = False,
) -> None:
  drawn = styles(found.lines)
  for name, line in found.lines.items():
    style = drawn[name]
    axes.plot(
      found.x_X, of(line), ls=style.dashes, color=style.color, lw=1.6,
      marker=style.marker if marked else None, ms=5, label=name,
    )  # fmt: skip


def _signed(axes, x_X, y_X, style) -> None:
  """On a logarithmic axis: what is negative has thin lines, without its sign."""
  for sign, width in ((1, 1.8), (-1, 0.8)):
    axes.plot(
      x_X, _positive(sign * y_X), ls=style.dashes, color=style.color, lw=width
    )


def _positive(x):
  """Itself, or not a number, which is not drawn."""
  return np.where(np.asarray(x) > 0, x, np.nan)


def _entry(axes, name, style, *, marker=True) -> None:
  axes.plot(
    [], [], ls=style.dashes, color=style.color, lw=1.6, label=name,
    marker=style.marker if marker else None,
  )  # fmt: skip


def _figure(
  title: str, text: str, *, rows: int = 1, columns: int = 1
) -> tuple[figure_lib.Figure, list[axes_lib.Axes]]:
  """At a width of 800 pixels, letters are 11 pixels high or more."""
  height = 5 if rows == 1 else 7
  figure = figure_lib.Figure(figsize=(8, height), dpi=150, layout='constrained')
  # Empty lines keep the place for the text, which is of another size.
  room = '\n' * (1 + text.count('\n'))
  figure.suptitle(
    f'{title}{room}', x=0.01, ha='left', fontsize=13, weight='bold'
  )
  figure.text(0.01, 0.98 - 0.26 / height, text, va='top', fontsize=9.5)
  share = 'row' if rows > 1 else False
  axes = figure.subplots(rows, columns, sharey=share, squeeze=False).ravel()
  for one in axes:
    one.grid(alpha=0.25)
    one.spines[['top', 'right']].set_visible(False)
  return figure, [*axes]


def _legend(figure, axes) -> None:
  """Beside what is drawn, never on it."""
  figure.legend(
    *axes.get_legend_handles_labels(), loc='outside right upper',
    frameon=False, labelspacing=0.7, handlelength=3, fontsize=9.5,
  )  # fmt: skip
