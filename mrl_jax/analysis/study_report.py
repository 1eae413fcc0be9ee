"""What launch/study.py shows and writes: tables and figures."""

import collections
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import json
import os
import pathlib
from typing import NamedTuple

from matplotlib import axes as axes_lib
from matplotlib import figure as figure_lib
import numpy as np
from rich import box
from rich import console as console_lib
from rich import table as table_lib

from mrl_jax import files
from mrl_jax.analysis import study

_CURVES, _SUPPORT = 'curves.png', 'stability_support.png'
_WINDOWS = 15  # A learning curve has so many windows that do not overlap.
# Colours that the colour-blind tell apart, of Okabe and Ito, and two of Tol.
_COLORS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9',
           '#882255', '#999933')  # fmt: skip
_MARKERS = 'sD^v<>ph'
_DASHES = ('-', '--', '-.')
_ROOM = 20  # Letters of an arm's name in a figure.
# Families of questions, by who was shown them before the rounds.
_KINDS = ('formulas', 'own words', "peer's words")
_MOST = 8  # Changes of a config that are listed.


def write(
  out: str,
  found: study.Study,
  baseline: str,
  console: console_lib.Console,
) -> None:
  """Shows the tables, and writes them, the numbers and the figures."""
  compared = study.compare(found.runs, baseline)
  told = notes(found, compared, baseline)
  shown = tables(compared, baseline) if compared else []
  for table in shown:
    _print_table(console, table)
  for note in told:
    console.print(note, soft_wrap=True)
  written = {
    'study.json': json.dumps(numbers(found, compared, baseline), indent=1),
    'study.md': markdown(shown, told),
  }
  for name, text in written.items():
    files.write(os.path.join(out, name), text)
  drawn = {}
  if compared:
    drawn = {
      _CURVES: draw_curves(found, compared, baseline),
      _SUPPORT: draw_support(compared, baseline),
    }
  for name, figure in drawn.items():
    figure.savefig(os.path.join(out, name))
  console.print(f'Written to {out}: {", ".join([*written, *drawn])}')


def numbers(
  found: study.Study, compared: Sequence[study.Arm], baseline: str
) -> dict:
  """All numbers, as plain values."""
  arms = {arm.name: dataclasses.asdict(arm) for arm in compared}
  for arm in compared:
    if arm.difference:
      arms[arm.name]['difference']['ratio'] = arm.difference.ratio
  runs = {
    name: {seed: dataclasses.asdict(run) for seed, run in of_arm.items()}
    for name, of_arm in found.runs.items()
  }
  for of_arm in runs.values():
    for run in of_arm.values():
      run['accuracy_R'] = run['accuracy_R'].tolist()
  missing = [
    {'arm': name, 'seed': seed, 'why': why}
    for (name, seed), why in found.missing.items()
  ]
  return {
    'baseline': baseline,
    'arms': arms,
    'runs': runs,
    'missing': missing,
  }


class Style(NamedTuple):
  """How an arm is drawn, in both figures."""

  color: str
  marker: str
  dashes: str


def styles(labels: Sequence[str], baseline: str) -> dict[str, Style]:
  """Black for the baseline; markers tell apart what has the same colour."""
  found, others = {}, [label for label in labels if label != baseline]
  for i, label in enumerate(others):
    found[label] = Style(
      _COLORS[i % len(_COLORS)],
      _MARKERS[i % len(_MARKERS)],
      _DASHES[i // len(_COLORS) % len(_DASHES)],
    )
  return {baseline: Style('k', 'o', ':'), **found}


class Table(NamedTuple):
  """What is shown in the terminal and in study.md."""

  title: str
  columns: Sequence[str]
  rows: Sequence[Sequence[str]]


def tables(compared: Sequence[study.Arm], baseline: str) -> list[Table]:
  """All figures; a star marks what is not at equal rollouts."""
  policies = list(dict.fromkeys(p for arm in compared for p in arm.policies))
  found = [
    Table(
      'Held-out accuracy, mean of the policies, percent',
      ('arm', 'n', 'before', 'after', 'difference', 'ratio'),
      [
        (
          f'{len(arm.seeds)}',
          f'{100 * arm.before.mean:.1f}',
          _percent(arm.after),
          'baseline'
          if arm.name == baseline
          else _percent(arm.difference, '+.1f'),
          _number(arm.difference.ratio if arm.difference else None, '+.1f'),
        )
        for arm in compared
      ],
    ),
    Table(
      'Held-out accuracy of each policy, after, percent',
      ('arm', *policies),
      [[_percent(arm.policies.get(p)) for p in policies] for arm in compared],
    ),
    Table(
      'Learning',
      ('arm', 'area', 'support', 'rescue', 'unsteadiness'),
      [
        (
          _percent(arm.area),
          _percent(arm.fall, '+.1f'),
          _percent(arm.rescue),
          _estimate(arm.unsteadiness, '.3f'),
        )
        for arm in compared
      ],
    ),
    Table(
      'What a run took',
      ('arm', 'rollouts', 'more', 's a round', 'seconds', 'device-seconds'),
      [
        (
          f'{arm.rollouts:,.0f}',
          f'{arm.more_rollouts:+.1%}' if arm.more_rollouts else '',
          _estimate(arm.round_seconds, '.2f'),
          _estimate(arm.seconds, ',.0f'),
          f'{arm.device_seconds.mean:,.0f}',
        )
        for arm in compared
      ],
    ),
  ]
  names = [arm.name + ' *' * bool(arm.more_rollouts) for arm in compared]
  return [
    table._replace(
      rows=[(n, *row) for n, row in zip(names, table.rows, strict=True)]
    )
    for table in found
  ]


def _percent(estimate: study.Estimate | None, form: str = '.1f') -> str:
  return _estimate(estimate, form, 100)


def _estimate(estimate, form, factor=1) -> str:
  if estimate is None:
    return '-'
  error = None if estimate.error is None else factor * estimate.error
  return f'{factor * estimate.mean:{form}} ± {_number(error, form.lstrip("+"))}'


def _number(value, form) -> str:
  return '-' if value is None else format(value, form)


def notes(
  found: study.Study, compared: Sequence[study.Arm], baseline: str
) -> list[str]:
  """What the tables mean, and what is not as it should be."""
  told = [
    'n: seeds. ±: standard error over seeds, unknown for one seed. before, '
    'after: the rounds.',
    f'difference: to {baseline} in points, paired by seed; ratio: over its '
    "standard error, Student's t. At 5 %, two-sided, it takes 12.7 with 2 "
    'seeds, 4.3 with 3, 3.2 with 4, 2.8 with 5, 2.3 with 10, and more where '
    'many arms are compared.',
    'area: under the learning curve, which is mean training accuracy. support: '
    'fall of the share of prompts that none of the samples solves, first '
    'tenth of the rounds to last, in points. rescue: mean rescue rate. '
    "unsteadiness: standard deviation of the gradient's norm over rounds, over "
    'its mean.',
    's a round: median. seconds: of the whole run, with the warm start unless '
    'it was cached, on '
    + ' or '.join(f'{n}' for n in sorted({arm.devices for arm in compared}))
    + ' emulated devices of this machine, which other runs may share.',
  ]  # fmt: skip
  for arm in compared:
    if arm.more_rollouts:
      told.append(
        f'* NOT AT EQUAL ROLLOUTS: {arm.name} samples {arm.rollouts:,.0f} in a '
        f'run, {arm.more_rollouts:+.1%} against {baseline}.'
      )
    if arm.other_starts:
      told.append(
        f'{arm.name} starts from another accuracy than {baseline} with seeds '
        f'{", ".join(map(str, arm.other_starts))}: the pairs do not share '
        'their warm starts or held-out prompts.'
      )
    if arm.changes.keys() - {'method.name'}:
      values = [f'{key}={value!r}' for key, value in arm.changes.items()]
      more = len(values) - _MOST
      values[_MOST:] = [f'{more:,} more, in study.json'] if more > 0 else []
      told.append(f'{arm.name} is {baseline} with {", ".join(values)}.')
  if not any(arm.name == baseline for arm in compared):
    told.append(f'MISSING: the baseline {baseline}; rollouts not compared.')
  for (label, seed), why in found.missing.items():
    told.append(f'MISSING: {label}, seed {seed}: {why}')
  return told


def markdown(shown: Sequence[Table], told: Sequence[str]) -> str:
  lines = []
  for table in shown:
    sides = ['---', *['---:'] * (len(table.columns) - 1)]
    rows = (table.columns, sides, *table.rows)
    lines += [f'**{table.title}**', '']
    lines += [f'| {" | ".join(row)} |' for row in rows]
    lines.append('')
  escaped = (note.replace('*', '\\*').replace('_', '\\_') for note in told)
  return '\n'.join([*lines, *(f'- {note}' for note in escaped), ''])


def draw_curves(
  found: study.Study, compared: Sequence[study.Arm], baseline: str
) -> figure_lib.Figure:
  """Training accuracy over the rounds, and held-out accuracy at some."""
  drawn = styles([arm.name for arm in compared], baseline)
  rounds = max(
    len(r.accuracy_R) for n in found.runs.values() for r in n.values()
  )
  width = max(rounds // _WINDOWS, 1) | 1  # Odd: as many before as after.
  figure, axes = _figure(
    'Learning curves',
    f'Lines: training accuracy, moving mean, window {width}. Points: '
    'held-out accuracy,\nside by side. Mean of policies and seeds; bands and '
    'bars: one standard error over seeds.',
  )
  for i, arm in enumerate(_ranked(compared)):
    style, runs = drawn[arm.name], found.runs[arm.name].values()
    mean_R, error_R = study.curve(runs, width)
    mean_R, x_R = 100 * mean_R, np.arange(1, len(mean_R) + 1)
    axes.plot(x_R, mean_R, style.dashes, color=style.color, lw=1.6)
    if error_R is not None:
      low_R, high_R = mean_R - 100 * error_R, mean_R + 100 * error_R
      axes.fill_between(x_R, low_R, high_R, color=style.color, alpha=0.1, lw=0)
    shift = (i - (len(compared) - 1) / 2) * rounds / 90
    for done, one in study.heldout(runs).items():
      x = done + shift if done else 0  # All start at the same.
      _point(axes, style, x, 100 * one.mean, yerr=_error(one, 100))
    axes.plot(
      [], [], style.dashes, color=style.color, marker=style.marker,
      label=f'{_label(arm)}\n{_percent(arm.after)}',
    )  # fmt: skip
  axes.set_xlabel('round')
  axes.set_ylabel('accuracy, percent')
  axes.xaxis.get_major_locator().set_params(integer=True)
  _finish(axes, 'held-out, after')
  return figure


def draw_support(
  compared: Sequence[study.Arm], baseline: str
) -> figure_lib.Figure:
  """How steadily an arm learns, against what came into reach meanwhile."""
  drawn = styles([arm.name for arm in compared], baseline)
  rescues = all(arm.rescue for arm in compared)
  figure, axes = _figure(
    'Stability against support',
    'Better is lower, which is steadier, and further right, as more came into\n'
    'reach. Mean of policies and seeds; bars: one standard error over seeds.',
  )
  for arm in _ranked(compared):
    x, y = arm.rescue if rescues else arm.fall, arm.unsteadiness
    if y is None:
      continue
    style = drawn[arm.name]
    errors = {'xerr': _error(x, 100), 'yerr': _error(y)}
    _point(axes, style, 100 * x.mean, y.mean, 8, **errors)
    axes.plot([], [], style.marker, color=style.color, label=_label(arm))
  axes.set_xlabel(
    'support: mean rescue rate, percent'
    if rescues
    else 'support: fall of the share of prompts that no sample solves,\n'
    'first tenth of the rounds to last, percentage points'
  )
  axes.set_ylabel(
    "unsteadiness: standard deviation of the\ngradient's norm over rounds, over "
    'its mean'
  )
  _finish(axes, None)
  return figure


Kinds = Mapping[str, study.Estimate]  # By who was shown them.


def by_kind(out: str, arm: str, seeds: Iterable[int], when: str) -> Kinds:
  """Held-out accuracy, by who was shown how to answer before the rounds.

  Args:
    out: the folder of the study.
    arm: of which there is a whole run with every one of `seeds`.
    seeds: of the arm.
    when: 'before' or 'after'.

  Returns:
    The mean over families and policies, from 0 to 1, of each kind that there
    is: 'formulas', which all policies were shown; 'own words', which the policy
    itself was; and "peer's words", which it was not.
  """
  means = [_by_kind(study.workdir(out, arm, seed), when) for seed in seeds]
  estimates = {k: study.estimate(m.get(k) for m in means) for k in _KINDS}
  return {kind: one for kind, one in estimates.items() if one}


def _by_kind(folder, when) -> dict[str, float]:
  """Of a run."""
  config, summary = (
    json.loads(pathlib.Path(folder, name).read_text(encoding='utf-8'))
    for name in ('config.json', 'summary.json')
  )
  found = collections.defaultdict(list)
  for name, policy in summary['policies'].items():
    shown = config[f'policies.{name}.warm_start_families']
    families = policy['heldout_accuracy_by_family'][when]
    for family, accuracy in families.items():
      found[_kind(family, shown)].append(accuracy)
  return {kind: float(np.mean(values)) for kind, values in found.items()}


def _kind(family, shown) -> str | None:
  surface, slash, _ = family.partition('/')
  if not slash:
    return None  # All families together, or other data.
  formulas, own, others = _KINDS
  if surface == 'formula':
    return formulas
  return own if family in shown else others


def draw_kinds(
  before: Kinds,
  after: Mapping[str, Kinds],
  compared: Sequence[study.Arm],
  baseline: str,
) -> figure_lib.Figure:
  """What `by_kind` tells of every arm, beside what they start from."""
  drawn = styles([arm.name for arm in compared], baseline)
  bars = [('before', before, '0.75')]
  for arm in _ranked(compared):
    bars.append((_label(arm), after[arm.name], drawn[arm.name].color))
  figure, axes = _figure(
    'Where the gain is',
    'Held-out accuracy, by who was shown how to answer before the rounds. Mean '
    'of\nfamilies, policies and seeds; lines: one standard error over seeds.',
  )
  width = 0.84 / len(bars)
  for i, (label, found, color) in enumerate(bars):
    there = [(x, found[k]) for x, k in enumerate(_KINDS) if k in found]
    for x, one in there:
      axes.bar(
        x - 0.42 + i * width, 100 * one.mean, width, align='edge', color=color,
        ec='w', lw=0.5, yerr=_error(one, 100),
        error_kw={'elinewidth': 1.2, 'capsize': 2, 'ecolor': '0.4'},
      )  # fmt: skip
    axes.bar(0, 0, color=color, label=label)
  axes.set_xticks(range(len(_KINDS)), _KINDS)
  axes.tick_params(axis='x', length=0, labelsize=11)
  axes.set_ylabel('accuracy, percent')
  axes.set_axisbelow(True)
  _finish(axes, None)
  axes.xaxis.grid(False)
  return figure


def _ranked(compared) -> list[study.Arm]:
  return sorted(compared, key=lambda arm: -arm.after.mean)


def _figure(title, text) -> tuple[figure_lib.Figure, axes_lib.Axes]:
  """At a width of 800 pixels, letters are 11 pixels high or more."""
  figure = figure_lib.Figure(figsize=(8, 5), dpi=150, layout='constrained')
  figure.suptitle(title, x=0.01, ha='left', fontsize=13, weight='bold')
  axes = figure.add_subplot()
  axes.set_title(text, loc='left', fontsize=9.5)
  return figure, axes


def _point(axes, style, x, y, size=6, **errors) -> None:
  axes.errorbar(
    x, y, fmt=style.marker, color=style.color, ms=size, mec='w', mew=0.4,
    elinewidth=1.2, capsize=2, **errors,
  )  # fmt: skip


def _error(estimate, factor=1) -> float | None:
  return None if estimate.error is None else factor * estimate.error


def _label(arm) -> str:
  """Its name, as far as there is room, and whether it sampled more."""
  name = arm.name if len(arm.name) <= _ROOM else f'{arm.name[: _ROOM - 1]}…'
  more = f'\n{arm.more_rollouts:+.1%} rollouts' if arm.more_rollouts else ''
  return name + more


def _finish(axes, title) -> None:
  """A legend beside what is drawn, never on it."""
  if axes.get_legend_handles_labels()[0]:
    axes.legend(
      title=title, loc='upper left', bbox_to_anchor=(1, 1), frameon=False,
      alignment='left', labelspacing=0.6, fontsize=9.5,
    )  # fmt: skip
  axes.grid(alpha=0.25)
  axes.spines[['top', 'right']].set_visible(False)


def _print_table(console, table) -> None:
  console.print(f'\n{table.title}')
  shown = table_lib.Table(box=box.SIMPLE_HEAD, pad_edge=False)
  for i, column in enumerate(table.columns):
    shown.add_column(column, justify='right' if i else 'left')
  for row in table.rows:
    shown.add_row(*row)
  console.print(shown)
