"""Figures of the methods on a bandit, from the numbers of `bandit/sweeps.py`.

Every method has the same line style in all figures that are drawn for the same
table of methods. The first method is the baseline, black and dotted.
"""

from collections.abc import Mapping

from matplotlib import figure as figure_lib
import numpy as np

from mrl_jax.analysis.figures import style
from mrl_jax.bandit import simulate
from mrl_jax.bandit import sweeps

_P = "p: the learner's success rate"
_SUPPORT = 'support: d log p / dη at η = 0'
_NOISE = 'noise: tr Cov g'
_SECOND = 'second moment: E |g|²'


def plane(
  by_learner: sweeps.Sweep, at: sweeps.Sweep, simulated: sweeps.Sweep
) -> figure_lib.Figure:
  """Support against noise, as the learner's success rate p falls.

  `by_learner`, where p varies, gives the curves, `at` the markers at a single p
  and `simulated`, from `sweeps.simulated`, the rings at that p.
  """
  figure, (axes,) = style.figure(
    'Stability and support',
    f'A curve is a method as p falls from {by_learner.x_X.max():g} to '
    f'{by_learner.x_X.min():g}. Marker: p = {at.x_X[0]:g}; ring: simulated\n'
    'there. Better is lower and further right. A change of the learning rate '
    'moves a method\nalong a grey line, where support²/noise is constant. '
    'Support below 0 is not drawn.',
  )
  for name, drawn in _styles(by_learner.moments).items():
    curve, marker, ring = (
      (_positive(sweep.curves('support')[name]), sweep.curves('noise')[name])
      for sweep in (by_learner, at, simulated)
    )
    axes.plot(*curve, **drawn.line)
    axes.plot(*marker, drawn.marker, color=drawn.color, ms=9, mec='w', mew=0.5)
    axes.plot(*ring, 'o', color='black', ms=14, mfc='none', mew=0.9)
    axes.plot([], [], marker=drawn.marker, label=name, **drawn.line)
  axes.set(xscale='log', yscale='log', xlabel=_SUPPORT, ylabel=_NOISE)
  # The lines of constant support²/noise do not change the limits.
  x_2, y_2 = np.array(axes.get_xlim()), np.array(axes.get_ylim())
  for power in range(-8, 5):
    axes.plot(x_2, x_2**2 / 10.0**power, color='0.8', lw=0.7, zorder=0)
  axes.set(xlim=x_2, ylim=y_2)
  style.legend(figure, axes)
  return figure


def support(
  by_learner: sweeps.Sweep, gate: float | None = None
) -> figure_lib.Figure:
  """Support of a learner that hardly ever succeeds, as p varies.

  `gate` marks the p below which HACPO and GRAFT drop every success.
  """
  figure, (axes,) = style.figure(
    'Support where the learner seldom succeeds',
    'How fast a small step raises log p, per unit of learning rate. Thin: '
    'minus the support,\nwhere a step lowers p.',
  )
  support, x_X = by_learner.curves('support'), by_learner.x_X
  _draw(axes, x_X, support, positive=True)
  for name, drawn in _styles(support).items():
    thin = {**drawn.line, 'linewidth': 0.7}
    axes.plot(x_X, _positive(-support[name]), **thin)
  axes.set(xscale='log', yscale='log', xlabel=_P, ylabel=_SUPPORT)
  if gate is not None:
    axes.axvline(gate, color='0.5', lw=0.8, zorder=0)
    axes.annotate(
      'gates of HACPO and GRAFT', (gate, 0), (4, 5), color='0.35',
      fontsize=style.SMALL, xycoords=('data', 'axes fraction'),
      textcoords='offset points',
    )  # fmt: skip
  style.legend(figure, axes)
  return figure


def context_weights(by_learner: sweeps.Sweep) -> figure_lib.Figure:
  """How much XGRPO weighs a prompt, from `sweeps.context_weights`."""
  figure, (axes,) = style.figure(
    'XGRPO keeps the direction and changes the weight',
    'E g = c(p, q) grad J: how much a prompt counts if the peer succeeds at '
    'rate q. In GRPO\nthe peer makes no difference.',
  )
  _draw(axes, by_learner.x_X, by_learner.curves('context_weight'))
  axes.set(xlim=(0, 1), xlabel=_P, ylabel='weight c of the prompt')
  style.legend(figure, axes)
  return figure


def peer(by_peer: sweeps.Sweep) -> figure_lib.Figure:
  """Support and noise as the peer's success rate varies."""
  figure, (left, right) = style.figure(
    'How good the peer is',
    "The learner's success rate p is fixed. The left axis is linear around 0 "
    'and logarithmic\nbeyond.',
    columns=2,
  )
  _support_and_noise(left, right, by_peer, "q: the peer's success rate")
  left.set_xlim(0, 1)
  right.set_xlim(0, 1)
  style.legend(figure, right)
  return figure


def divergence(by_divergence: sweeps.Sweep) -> figure_lib.Figure:
  """The second moment as the peer's policy moves away."""
  figure, (axes,) = style.figure(
    'The price of a ratio',
    'The second moment of g as the peer prefers what the learner seldom does. '
    "Grey: our\nbound on the peer's term of PRP.",
  )
  x_X = by_divergence.x_X
  _draw(axes, x_X, by_divergence.curves('second'))
  axes.plot(x_X, by_divergence.bound_X, color='0.6', lw=1.2, label='bound')
  axes.set(xscale='log', yscale='log', xlabel='χ²(π ‖ μ)', ylabel=_SECOND)
  style.legend(figure, axes)
  return figure


def length(by_length: sweeps.Sweep, chi2: float) -> figure_lib.Figure:
  """The second moment as responses become longer; `chi2` is per position."""
  figure, (axes,) = style.figure(
    'A ratio of whole responses is exponential in their length',
    'Texts of two tokens, which the learner chooses with probability 1/2 each; '
    f'χ² = {chi2:g} at\nevery position.',
  )
  _draw(axes, by_length.x_X, by_length.curves('second'), marked=True)
  axes.set(yscale='log', xlabel='T: tokens of a response', ylabel=_SECOND)
  axes.xaxis.get_major_locator().set_params(integer=True)
  style.legend(figure, axes)
  return figure


def errors(
  by_truncation: sweeps.Sweep, by_thl_error: sweeps.Sweep
) -> figure_lib.Figure:
  """How far truncation and wrong ratios move PRP, beside the bounds."""
  figure, both = style.figure(
    'What PRP pays for stability, and for errors of THL',
    'Distance of E g from its value with exact ratios. Dashed: bound. Dotted: '
    'standard deviation\nof the gradient of one prompt.',
    columns=2,
  )
  labels = ('C: largest ratio', 'E: error of log π / μ, nats')
  sweeps_2 = (by_truncation, by_thl_error)
  for axes, sweep, label in zip(both, sweeps_2, labels, strict=True):
    distances, x_X = sweep.distances(), sweep.x_X
    for i, (name, distance_X) in enumerate(distances.items()):
      drawn = style.line_style(i)
      solid = {'color': drawn.color, 'marker': drawn.marker, 'lw': 1.6}
      axes.plot(x_X, distance_X, **solid, markevery=0.15, ms=5, label=name)
    axes.plot(x_X, sweep.bound_X, 'k--', lw=1.2, label='bound')
    deviation_X = np.sqrt(sweep.curves('noise')[next(iter(distances))])
    axes.plot(x_X, deviation_X, 'k:', lw=1.4, label='standard deviation')
    axes.set(xlabel=label, ylabel='|E g̃ − E g|', ylim=(0, None))
    below = {'loc': 'upper left', 'bbox_to_anchor': (0, -0.16)}
    axes.legend(**below, frameon=False, fontsize=style.SMALL)
  return figure


def groups(by_own: sweeps.Sweep, by_peer: sweeps.Sweep) -> figure_lib.Figure:
  """Support and noise as G (left) and H (right) vary."""
  figure, axes = style.figure(
    'Group sizes',
    'Left: the number of own samples varies, H is fixed. Right: the number of '
    'peer samples\nvaries, G is fixed. The upper axes are linear around 0 and '
    'logarithmic beyond.',
    rows=2,
    columns=2,
    height=7,
    sharex='col',
    sharey='row',
  )
  _support_and_noise(axes[0], axes[2], by_own, 'G: own samples')
  _support_and_noise(axes[1], axes[3], by_peer, 'H: peer samples')
  for each in axes:
    each.label_outer()
    each.xaxis.get_major_locator().set_params(integer=True)
  style.legend(figure, axes[0])
  return figure


def learning(curves: Mapping[str, simulate.Curves]) -> figure_lib.Figure:
  """Success rates over updates along expected and along sampled gradients."""
  seeds, times = next(iter(curves.values())).sampled_ST.shape
  figure, (left, right) = style.figure(
    'Learning where there was nothing to reinforce',
    f'Left: along E g. Right: along sampled g, median of {seeds} learners; '
    'bands: from the\nfirst to the third quartile.',
    columns=2,
  )
  x_T, medians = np.arange(times), {}
  for name, drawn in _styles(curves).items():
    low_T, medians[name], high_T = np.quantile(
      curves[name].sampled_ST, (0.25, 0.5, 0.75), axis=0
    )
    right.fill_between(x_T, low_T, high_T, color=drawn.color, alpha=0.12, lw=0)
  _draw(left, x_T, {name: c.expected_T for name, c in curves.items()})
  _draw(right, x_T, medians)
  for axes in (left, right):
    axes.set(xlabel='update', ylabel=_P, ylim=(-0.02, 1.02))
    axes.label_outer()
  style.legend(figure, right)
  return figure


def _support_and_noise(above, below, sweep: sweeps.Sweep, x: str) -> None:
  """Draws support on one pair of axes and noise on the other."""
  _draw(above, sweep.x_X, sweep.curves('support'))
  above.set(xlabel=x, ylabel=_SUPPORT)
  above.set_yscale('symlog', linthresh=1e-3)
  _draw(below, sweep.x_X, sweep.curves('noise'), positive=True)
  below.set(xlabel=x, ylabel=_NOISE, yscale='log')


def _draw(axes, x_X, curves, *, marked=False, positive=False) -> None:
  """Draws curves by name, the first as the baseline."""
  for name, drawn in _styles(curves).items():
    y_X = _positive(curves[name]) if positive else curves[name]
    marker = drawn.marker if marked else None
    axes.plot(x_X, y_X, marker=marker, ms=5, label=name, **drawn.line)


def _styles(names) -> dict[str, style.LineStyle]:
  return style.line_styles(names, baseline=next(iter(names)))


def _positive(x):
  """Replaces what a logarithmic axis cannot show by NaN."""
  return np.where(np.asarray(x) > 0, x, np.nan)
