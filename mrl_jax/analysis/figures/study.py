"""Figures of a study.

figures.learning_curves(found.runs, compared, baseline='grpo')
figures.stability_support(compared, baseline='grpo')
figures.gains(compared, baseline='grpo')

An arm has the same line style in all figures of the same arms. The baseline is
black and dotted.
"""

from collections.abc import Collection, Mapping, Sequence

from matplotlib import figure as figure_lib
import numpy as np

from mrl_jax.analysis import study
from mrl_jax.analysis.figures import style

_LETTERS = 20  # Of an arm's name in a figure.


def learning_curves(
  runs: Mapping[str, Mapping[int, study.CompleteRun]],
  compared: Sequence[study.Arm],
  baseline: str,
) -> figure_lib.Figure:
  """Training accuracy over the rounds, and held-out accuracy at some."""
  rounds = max(len(r.accuracy_R) for arm in runs.values() for r in arm.values())
  width = style.window(rounds)
  figure, (axes,) = style.figure(
    'Learning curves',
    f'Lines: training accuracy, moving mean over {width} rounds. Points: '
    'held-out\naccuracy, side by side. Mean of policies and seeds; bands and '
    'bars: one\nstandard error over seeds.',
  )
  for i, (arm, drawn) in enumerate(_ranked(compared, baseline)):
    runs_of_arm = runs[arm.name].values()
    mean_R, error_R = curve(runs_of_arm, width)
    x_R = np.arange(1, len(mean_R) + 1)
    axes.plot(x_R, mean_R, **drawn.line)
    if error_R is not None:
      low_R, high_R = mean_R - error_R, mean_R + error_R
      axes.fill_between(x_R, low_R, high_R, color=drawn.color, alpha=0.1, lw=0)
    shift = (i - (len(compared) - 1) / 2) * rounds / 90
    for done in sorted({n for run in runs_of_arm for n in run.heldout}):
      y = study.estimate(r.heldout.get(done) for r in runs_of_arm).percent
      x = done + shift if done else 0  # All arms start at the same point.
      style.points(axes, drawn, x, y.mean, yerr=y.error)
    label = f'{_label(arm)}\n{arm.after.percent:.1f}'
    axes.plot([], [], marker=drawn.marker, label=label, **drawn.line)
  axes.set(xlabel='round', ylabel='accuracy, percent')
  axes.xaxis.get_major_locator().set_params(integer=True)
  style.legend(figure, axes, title='held-out, after', alignment='left')
  return figure


def curve(
  runs: Collection[study.CompleteRun], width: int
) -> tuple[np.ndarray, np.ndarray | None]:
  """The smoothed learning curve in percent, and its standard error over seeds.

  They are f64 [R] each; the error is None with one seed.
  """
  curves = [style.smooth(run.accuracy_R, width) for run in runs]
  curves_SR, error_R = 100 * np.array(curves), None
  if len(runs) > 1:
    error_R = curves_SR.std(0, ddof=1) / np.sqrt(len(runs))
  return curves_SR.mean(0), error_R


def stability_support(
  compared: Sequence[study.Arm], baseline: str
) -> figure_lib.Figure:
  """How steadily each arm learns, against what it learns to solve at all."""
  has_rescues = all(arm.rescue for arm in compared)
  figure, (axes,) = style.figure(
    'Stability against support',
    'Better is lower (steadier) and further right (more prompts came into\n'
    'reach). Mean of policies and seeds; bars: one standard error over seeds.',
  )
  for arm, drawn in _ranked(compared, baseline):
    if arm.unsteadiness is None:
      continue
    x = (arm.rescue if has_rescues else arm.fall).percent
    y = arm.unsteadiness
    style.points(axes, drawn, x.mean, y.mean, xerr=x.error, yerr=y.error, ms=8)
    axes.plot([], [], drawn.marker, color=drawn.color, label=_label(arm))
  axes.set_xlabel(
    'support: mean rescue rate, percent'
    if has_rescues
    else 'support: decrease of the share of prompts that no sample solves,\n'
    'first tenth of the rounds to last, percentage points'
  )
  axes.set_ylabel(
    'unsteadiness: standard deviation of the\ngradient norm over rounds, '
    'divided by its mean'
  )
  style.legend(figure, axes)
  return figure


def gains(compared: Sequence[study.Arm], baseline: str) -> figure_lib.Figure:
  """Held-out accuracy by `study.KINDS`, of the start and of every arm."""
  figure, (axes,) = style.figure(
    'Where the gain is',
    'Held-out accuracy on prompts that the warm start demonstrated to all\n'
    'policies, to the policy itself, or only to a peer. Mean of families,\n'
    'policies and seeds; lines: one standard error over seeds.',
  )
  ranked = _ranked(compared, baseline)
  start = next((a for a in compared if a.name == baseline), compared[0])
  bars = [('before', start.kinds_before, '0.75')]
  bars += [(_label(a), a.kinds_after, drawn.color) for a, drawn in ranked]
  width = 0.84 / len(bars)
  for i, (label, kinds, color) in enumerate(bars):
    for x, kind in enumerate(study.KINDS):
      if kind in kinds:
        y = kinds[kind].percent
        axes.bar(
          x - 0.42 + i * width, y.mean, width, align='edge', color=color,
          ec='w', lw=0.5, yerr=y.error,
          error_kw={'elinewidth': 1.3, 'capsize': 2.5, 'ecolor': '0.4'},
        )  # fmt: skip
    axes.bar(0, 0, color=color, label=label)
  axes.set_xticks(range(len(study.KINDS)), study.KINDS)
  axes.tick_params(axis='x', length=0, labelsize=11)
  axes.set(ylabel='accuracy, percent', axisbelow=True)
  axes.xaxis.grid(False)
  style.legend(figure, axes)
  return figure


def _ranked(compared, baseline) -> list[tuple[study.Arm, style.LineStyle]]:
  """Arms and their styles, the most accurate arm first."""
  styles = style.line_styles([arm.name for arm in compared], baseline)
  ranked = sorted(compared, key=lambda arm: -arm.after.mean)
  return [(arm, styles[arm.name]) for arm in ranked]


def _label(arm) -> str:
  more = f'\n{arm.more_rollouts:+.1%} rollouts' if arm.more_rollouts else ''
  return style.label(arm.name, _LETTERS) + more
