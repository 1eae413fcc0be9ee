"""What a person sees of a run."""

from collections.abc import Mapping

from rich import console as console_lib
from rich import progress
from rich import table as table_lib

from mrl_jax.thl import transfer
from mrl_jax.training import metrics

_LINE_EVERY = 10  # Rounds between lines where there is no terminal.


def show_start(
  console: console_lib.Console,
  workdir: str,
  overview: Mapping,
) -> None:
  """Where the run writes, and which policy is where."""
  console.print(f'Writing to {workdir}', highlight=False, markup=False)
  table = table_lib.Table(
    title=f'Plan for {overview["devices"]}', title_justify='left'
  )
  for column in ('policy', 'parameters', 'vocabulary', 'devices', 'mesh',
                 'memory each', 'load'):  # fmt: skip
    left = column == 'policy'
    table.add_column(column, justify='left' if left else 'right', no_wrap=True)
  for name, policy in overview['policies'].items():
    axes = [f'{axis} {n}' for axis, n in policy['mesh'].items() if n > 1]
    adapters = policy['adapters']
    table.add_row(
      name,
      f'{policy["parameters"]:,}' + (f' + {adapters:,}' if adapters else ''),
      f'{policy["vocabulary"]:,}',
      f'{policy["devices"][0]}-{policy["devices"][-1]}',
      ', '.join(axes) or 'one device',
      f'{policy["memory_bytes"] / 2**20:,.1f} MiB',
      f'{policy["load"]:.0%}',
    )
  console.print(table)
  for name, place in overview['elsewhere'].items():
    console.print(f'{name} is not trained here: {place}', markup=False)
  if overview['prompts_skipped']:
    skipped = overview['prompts_skipped']
    console.print(f'{skipped:,} prompts are too long and were skipped.')


def show_end(
  console: console_lib.Console,
  summary: Mapping,
  residuals: Mapping[str, transfer.Residual],
  workdir: str,
) -> None:
  """What came of the run, and where it is."""
  console.print(_accuracy_table(summary['policies']))
  for title, pairs in (
    ('Exchange, records offered', summary['exchange']),
    ('Exchange, records sent to other processes', summary['sent']),
  ):
    if pairs:
      console.print(
        _exchange_table(
          title, pairs, summary['refusals'], summary[metrics.TIMING]['waited']
        )
      )
  if residuals:
    console.print(_residual_table(residuals))
  console.print(
    f'{summary["rounds"]} rounds of {summary["method"]}; '
    f'{summary[metrics.TIMING]["seconds"]:.0f} s in all. In {workdir}:\n'
    '  summary.json, metrics.jsonl, evaluations.jsonl, config.json\n'
    '  checkpoints/, tensorboard/, see/',
    highlight=False,
    markup=False,
  )


def note(row: Mapping) -> str:
  """A policy's round in a line."""
  return (
    f'reward {row["reward"]:.2f}  '
    f'{row[metrics.TIMING]["tokens_per_second"]:,.0f} tok/s  '
    f'{row["peer_records"]} from peers'
  )


def _accuracy_table(policies: Mapping[str, Mapping]) -> table_lib.Table:
  table = table_lib.Table(
    title='Held-out accuracy, percent', title_justify='left'
  )
  table.add_column('policy')
  for column in ('before', 'after', 'change'):
    table.add_column(column, justify='right')
  rows = [
    (name, *(100 * p['heldout_accuracy'][at] for at in ('before', 'after')))
    for name, p in policies.items()
  ]
  mean = [sum(r[i] for r in rows) / len(rows) for i in (1, 2)]
  for name, start, end in [*rows, ('mean', *mean)]:
    table.add_row(name, f'{start:.1f}', f'{end:.1f}', f'{end - start:+.1f}')
  return table


def _exchange_table(
  title: str,
  pairs: Mapping[str, Mapping[str, Mapping[str, int]]],
  refusals: Mapping[str, Mapping[str, int]],
  waited: Mapping[str, float],
) -> table_lib.Table:
  table = table_lib.Table(title=title, title_justify='left')
  for column in ('pair', 'kind', 'records', 'MiB', 'fate', 'waited'):
    left = column in ('pair', 'kind', 'fate')
    table.add_column(column, justify='left' if left else 'right')
  for pair, kinds in pairs.items():
    for i, (kind, row) in enumerate(kinds.items()):
      fates = {
        f: n for f, n in row.items() if n and f not in ('published', 'bytes')
      }
      table.add_row(
        pair if i == 0 else '',
        kind,
        f'{row["published"]:,}',
        f'{row["bytes"] / 2**20:,.1f}',
        _counts(fates),
        f'{waited.get(pair, 0):.1f} s' if i == 0 else '',
      )
    if pair in refusals:
      table.add_row('', 'refused as', '', '', _counts(refusals[pair]), '')
  return table


def _residual_table(
  residuals: Mapping[str, transfer.Residual],
) -> table_lib.Table:
  table = table_lib.Table(title='THL residual', title_justify='left')
  for column in ('direction', 'rollouts', 'refused', 'tokens', 'chunks',
                 'boundaries\nnot shared'):  # fmt: skip
    left = column in ('direction', 'refused', 'chunks')
    table.add_column(column, justify='left' if left else 'right')
  for direction, residual in residuals.items():
    total = max(sum(residual.chunks.values()), 1)
    chunks = ', '.join(
      f'{n / total:.0%} {kind}'
      for kind, n in residual.chunks.items()
      if n / total > 0.005
    )
    table.add_row(
      direction,
      f'{residual.rollouts:,}',
      _counts(residual.refused),
      *(
        (
          f'{residual.sender_tokens:,} to\n{residual.receiver_tokens:,}',
          chunks,
          f'{residual.segmentation_error:.1%}',
        )
        if residual.sender_tokens
        else ('texts only', '', '')
      ),
    )
  return table


def _counts(counts: Mapping[str, int]) -> str:
  return ', '.join(f'{n:,} {name}' for name, n in counts.items()) or 'none'


class Live:
  """Progress of every policy; lines now and then where there is no terminal.

  with Live(console, 'Round', {'llama': 150}, done=0) as live:
    live.advance('llama', 'reward 0.50')
  """

  def __init__(
    self,
    console: console_lib.Console,
    title: str,
    totals: Mapping[str, int],
    done: int = 0,
  ):
    self._console, self._title = console, title
    self._bars = progress.Progress(
      progress.TextColumn('{task.description}'),
      progress.BarColumn(bar_width=8),
      progress.MofNCompleteColumn(),
      progress.TextColumn('{task.fields[note]}'),
      progress.TimeRemainingColumn(compact=True),
      console=console,
      disable=not console.is_terminal,
    )
    self._tasks = {
      name: self._bars.add_task(
        f'{title} {name}', total=total, completed=done, note=''
      )
      for name, total in totals.items()
    }

  def advance(self, name: str, note: str) -> None:
    task = self._tasks[name]
    self._bars.update(task, advance=1, note=note)
    state = self._bars.tasks[task]
    if not self._console.is_terminal and (
      state.completed % _LINE_EVERY == 0 or state.finished
    ):
      self._console.print(
        f'{self._title} {name} {state.completed:.0f}/{state.total:.0f} {note}',
        highlight=False,
      )

  def __enter__(self):
    self._bars.start()
    return self

  def __exit__(self, *exc):
    self._bars.stop()
