"""What a person sees of a run."""

from collections.abc import Mapping

from rich import console as console_lib
from rich import progress
from rich import table as table_lib

from mrl_jax.mwra import planner
from mrl_jax.thl import transfer

_LINE_EVERY = 10  # Rounds between lines where there is no terminal.


def show_plan(
  console: console_lib.Console,
  plan: planner.Plan,
  devices: str,
  skipped: int,
) -> None:
  """Which policy runs where."""
  table = table_lib.Table(title=f'Plan for {devices}', title_justify='left')
  for column in ('policy', 'parameters', 'vocabulary', 'devices',
                 'data x fsdp x tensor', 'MiB a device', 'load'):  # fmt: skip
    table.add_column(column, justify='left' if column == 'policy' else 'right')
  for name, part in plan.items():
    table.add_row(
      name,
      f'{part.model.num_params:,}',
      f'{part.model.vocab_size:,}',
      f'{part.devices[0]}-{part.devices[-1]}',
      ' x '.join(map(str, part.shape)),
      f'{part.cost.peak_bytes / len(part.devices) / 2**20:,.1f}',
      f'{part.load:.0%}',
    )
  console.print(table)
  if skipped:
    console.print(f'{skipped:,} prompts are too long and were skipped.')


def show_end(
  console: console_lib.Console,
  summary: Mapping,
  residuals: Mapping[str, transfer.Residual],
  workdir: str,
) -> None:
  """What came of the run, and where it is."""
  console.print(_accuracy_table(summary['policies']))
  if summary['exchange']:
    console.print(_exchange_table(summary['exchange']))
  if residuals:
    console.print(_residual_table(residuals))
  console.print(
    f'{summary["rounds"]} rounds of {summary["method"]} in '
    f'{summary["seconds"]:.0f} s. In {workdir}:\n'
    '  summary.json, metrics.jsonl, config.json\n'
    '  checkpoints/, tensorboard/',
    highlight=False,
  )


def note(row: Mapping) -> str:
  """A policy's round in a line."""
  return (
    f'reward {row["reward"]:.2f}  '
    f'{row["timing"]["tokens_per_second"]:,.0f} tokens/s  '
    f'{row["peer_records"]} peer records'
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
  exchange: Mapping[str, Mapping[str, Mapping[str, int]]],
) -> table_lib.Table:
  """What passed through SEE, by pair and kind."""
  table = table_lib.Table(title='Exchange, records', title_justify='left')
  fates = sorted(
    {f for kinds in exchange.values() for row in kinds.values() for f in row}
  )
  for column in ('pair', 'kind', *fates):
    table.add_column(column, justify='right' if column in fates else 'left')
  for pair, kinds in exchange.items():
    for kind, row in kinds.items():
      table.add_row(pair, kind, *(f'{row.get(fate, 0):,}' for fate in fates))
  return table


def _residual_table(
  residuals: Mapping[str, transfer.Residual],
) -> table_lib.Table:
  """What THL carried and could not carry, by direction."""
  table = table_lib.Table(title='THL residual', title_justify='left')
  for column in ('direction', 'rollouts', 'refused', 'tokens sent',
                 'tokens received', '1:1', '1:n', 'n:1', 'n:m',
                 'boundaries lost'):  # fmt: skip
    table.add_column(
      column, justify='right' if column != 'direction' else 'left'
    )
  for direction, residual in residuals.items():
    reasons = [f'{n:,} {reason}' for reason, n in residual.refused.items()]
    chunks = residual.chunks
    total = max(sum(chunks.values()), 1)
    table.add_row(
      direction,
      f'{residual.rollouts:,}',
      ', '.join(reasons) or '0',
      f'{residual.sender_tokens:,}',
      f'{residual.receiver_tokens:,}',
      *(
        f'{chunks.get(kind, 0) / total:.1%}'
        for kind in ('1:1', '1:n', 'n:1', 'n:m')
      ),
      f'{residual.segmentation_error:.1%}',
    )
  return table


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
      progress.BarColumn(),
      progress.MofNCompleteColumn(),
      progress.TextColumn('{task.fields[note]}'),
      progress.TextColumn('left'),
      progress.TimeRemainingColumn(),
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
