"""What launch/study.py prints and writes: tables, notes, numbers, figures."""

from collections.abc import Sequence
import dataclasses
import json
import os
from typing import NamedTuple

from rich import console as console_lib

from mrl_jax import files
from mrl_jax.analysis import study
from mrl_jax.analysis.figures import study as figures
from mrl_jax.training import display

_MOST_CHANGES = 8  # Listed of an arm's config.


def write(
  out: str, found: study.Study, baseline: str, console: console_lib.Console
) -> None:
  """Prints tables and notes; writes them, all numbers and the figures."""
  compared = study.compare(found.runs, baseline)
  shown = tables(compared, baseline) if compared else []
  lines = notes(found, compared, baseline)
  for table in shown:
    console.print(display.table(*table, left=('arm',)))
  for line in lines:
    console.print(line, soft_wrap=True)
  values = numbers(found, compared, baseline)
  written = {
    'study.json': json.dumps(values, indent=1, default=lambda x: x.tolist()),
    'study.md': markdown(shown, lines),
  }
  for name, text in written.items():
    files.write(os.path.join(out, name), text)
  drawn = {}
  if compared:
    drawn = {
      'curves.png': figures.learning_curves(found.runs, compared, baseline),
      'stability_support.png': figures.stability_support(compared, baseline),
    }
  for name, figure in drawn.items():
    figure.savefig(os.path.join(out, name))
  console.print(f'Written to {out}: {", ".join([*written, *drawn])}')


def numbers(
  found: study.Study, compared: Sequence[study.Arm], baseline: str
) -> dict:
  """All numbers of a study, as plain values and arrays."""
  arms = {arm.name: dataclasses.asdict(arm) for arm in compared}
  for arm in compared:
    if arm.difference:
      arms[arm.name]['difference']['ratio'] = arm.difference.ratio
  return {
    'baseline': baseline,
    'arms': arms,
    'runs': {
      name: {seed: dataclasses.asdict(run) for seed, run in runs.items()}
      for name, runs in found.runs.items()
    },
    'missing': [
      {'arm': name, 'seed': seed, 'why': why}
      for (name, seed), why in found.missing.items()
    ],
  }


class Table(NamedTuple):
  """A table of the terminal and of study.md."""

  title: str
  columns: Sequence[str]
  rows: Sequence[Sequence[str]]


def tables(compared: Sequence[study.Arm], baseline: str) -> list[Table]:
  """All numbers in tables; a star marks arms without equal rollouts."""
  policies = list(dict.fromkeys(p for arm in compared for p in arm.policies))
  arms = [arm.name + ' *' * bool(arm.more_rollouts) for arm in compared]

  def table(title, columns, row):
    rows = [(name, *row(a)) for name, a in zip(arms, compared, strict=True)]
    return Table(title, ('arm', *columns), rows)

  return [
    table(
      'Held-out accuracy, mean of the policies, percent',
      ('n', 'before', 'after', 'difference', 'ratio'),
      lambda arm: (
        f'{len(arm.seeds)}',
        f'{100 * arm.before.mean:.1f}',
        _percent(arm.after),
        'baseline'
        if arm.name == baseline
        else _percent(arm.difference, '+.1f'),
        _shown(arm.difference and arm.difference.ratio, '+.1f'),
      ),
    ),
    table(
      'Held-out accuracy of each policy, after, percent',
      policies,
      lambda arm: [_percent(arm.policies.get(p)) for p in policies],
    ),
    table(
      'Learning',
      ('area', 'support', 'rescue', 'unsteadiness'),
      lambda arm: (
        _percent(arm.area),
        _percent(arm.fall, '+.1f'),
        _percent(arm.rescue),
        _shown(arm.unsteadiness, '.3f'),
      ),
    ),
    table(
      'Cost of a run',
      ('rollouts', 'more', 's a round', 'seconds', 'device-seconds'),
      lambda arm: (
        f'{arm.rollouts:,.0f}',
        f'{arm.more_rollouts:+.1%}' if arm.more_rollouts else '',
        _shown(arm.round_seconds, '.2f'),
        _shown(arm.seconds, ',.0f'),
        f'{arm.device_seconds.mean:,.0f}',
      ),
    ),
  ]


def _shown(value, form='.1f') -> str:
  """A number or an estimate; a dash if it is None."""
  return '-' if value is None else format(value, form)


def _percent(estimate: study.Estimate | None, form: str = '.1f') -> str:
  return _shown(estimate and estimate.percent, form)


def notes(
  found: study.Study, compared: Sequence[study.Arm], baseline: str
) -> list[str]:
  """Explains the tables; names what is missing and what is not comparable."""
  devices = sorted({arm.devices for arm in compared})
  lines = [
    'n: number of seeds. ±: standard error over seeds, unknown with one seed. '
    'before, after: at the start of the first round, at the end of the last.',
    f'difference: to {baseline} in points, paired by seed. ratio: difference '
    "divided by its standard error, Student's t. At 5 %, two-sided, it takes "
    '12.7 with 2 seeds, 4.3 with 3, 3.2 with 4, 2.8 with 5, 2.3 with 10, and '
    'more if many arms are compared.',
    'area: mean training accuracy, the area under the learning curve. support: '
    'decrease of the share of prompts that no sample solves, first tenth of '
    'the rounds to last, in points. rescue: mean rescue rate. unsteadiness: '
    'standard deviation of the gradient norm over rounds, divided by its mean.',
    's a round: median. seconds: of the whole run, with the warm start unless '
    'it was cached, on ' + ' or '.join(map(str, devices)) + ' emulated devices '
    'of this machine, which other runs may have shared.',
  ]  # fmt: skip
  for arm in compared:
    if arm.more_rollouts:
      lines.append(
        f'* NOT AT EQUAL ROLLOUTS: {arm.name} samples {arm.rollouts:,.0f} in a '
        f'run, {arm.more_rollouts:+.1%} against {baseline}.'
      )
    if arm.other_starts:
      lines.append(
        f'{arm.name} starts from another accuracy than {baseline} with seeds '
        f'{", ".join(map(str, arm.other_starts))}: these pairs do not share '
        'their warm starts or held-out prompts.'
      )
    if arm.changes.keys() - {'method.name'}:
      values = [f'{key}={value!r}' for key, value in arm.changes.items()]
      more = len(values) - _MOST_CHANGES
      values[_MOST_CHANGES:] = [f'{more:,} more, in study.json'] * (more > 0)
      lines.append(f'{arm.name} is {baseline} with {", ".join(values)}.')
  if not any(arm.name == baseline for arm in compared):
    lines.append(
      f'MISSING: the baseline {baseline}; rollouts are not compared.'
    )
  for (name, seed), why in found.missing.items():
    lines.append(f'MISSING: {name}, seed {seed}: {why}')
  return lines


def markdown(shown: Sequence[Table], lines: Sequence[str]) -> str:
  """Tables and notes as Markdown."""
  text = []
  for table in shown:
    sides = ['---', *['---:'] * (len(table.columns) - 1)]
    rows = (table.columns, sides, *table.rows)
    lines_of_table = [f'| {" | ".join(row)} |' for row in rows]
    text += [f'**{table.title}**', '', *lines_of_table, '']
  escaped = (line.replace('*', '\\*').replace('_', '\\_') for line in lines)
  return '\n'.join([*text, *(f'- {line}' for line in escaped), ''])
