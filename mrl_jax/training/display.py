"""What a run shows in the terminal."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from rich import console as console_lib
from rich import progress
from rich import table as table_lib

from mrl_jax import texts
from mrl_jax import workdir
from mrl_jax.see import ledger

_LINE_EVERY = 10  # Rounds between lines of output that is no terminal.


def show_start(
  console: console_lib.Console, folder: str, plan: workdir.Plan
) -> None:
  """Shows the work dir, and the devices of every policy."""
  console.print(f'Writing to {folder}', highlight=False, markup=False)
  rows = []
  for name, part in plan.policies.items():
    axes = [f'{axis} {n}' for axis, n in part.mesh.items() if n > 1]
    adapters = f' + {part.adapters:,}' if part.adapters else ''
    rows.append(
      (
        name,
        f'{part.parameters:,}{adapters}',
        f'{part.vocabulary:,}',
        f'{part.devices[0]}-{part.devices[-1]}',
        ', '.join(axes) or 'one device',
        f'{part.memory_bytes / 2**20:,.1f} MiB',
        f'{part.load:.0%}',
      )
    )
  columns = ('policy', 'parameters', 'vocabulary', 'devices', 'mesh',
             'memory each', 'load')  # fmt: skip
  console.print(table(f'Plan for {plan.devices}', columns, rows))
  for name, place in plan.elsewhere.items():
    console.print(f'{name} is not trained here: {place}', markup=False)
  if plan.prompts_skipped:
    console.print(
      f'{plan.prompts_skipped:,} prompts are too long and were skipped.'
    )


def show_end(
  console: console_lib.Console, summary: workdir.Summary, folder: str
) -> None:
  """Shows the results of a run, its exchange, and where it wrote them."""
  console.print(_accuracy_table(summary.policies))
  for title, pairs in (
    ('Exchange, records offered', summary.exchange),
    ('Exchange, records sent to other processes', summary.sent),
  ):
    if pairs:
      waited = summary.timing.waited
      console.print(exchange_table(title, pairs, summary.refusals, waited))
  if summary.residuals:
    console.print(residual_table('THL residual', summary.residuals))
  console.print(
    f'{summary.rounds} rounds of {summary.method}; '
    f'{summary.timing.seconds:.0f} s in all. In {folder}:\n'
    '  summary.json, metrics.jsonl, evaluations.jsonl, config.json\n'
    '  checkpoints/, tensorboard/, see/',
    highlight=False,
    markup=False,
  )


def note(row: workdir.Row) -> str:
  """A policy's round in a few words."""
  return (
    f'reward {row.reward:.2f}  {row.timing.tokens_per_second:,.0f} tok/s  '
    f'{row.peer_records} from peers'
  )


def exchange_table(
  title: str,
  pairs: workdir.Pairs,
  refusals: Mapping[str, Mapping[str, int]],
  waited: Mapping[str, float],
) -> table_lib.Table:
  """Records of each pair of policies by kind and fate.

  Args:
    title: of the table.
    pairs: counts of records, as in a ledger.
    refusals: counts of refused records by pair and reason.
    waited: seconds that the receiver waited for the sender, by pair.
  """
  rows = []
  for pair, kinds in pairs.items():
    for i, (kind, counts) in enumerate(kinds.items()):
      rows.append(
        (
          pair if i == 0 else '',
          kind,
          f'{counts.get("published", 0):,}',
          f'{counts.get("bytes", 0) / 2**20:,.1f}',
          _counts(ledger.fates(counts)),
          f'{waited.get(pair, 0):.1f} s' if i == 0 else '',
        )
      )
    if pair in refusals:
      rows.append(('', 'refused as', '', '', _counts(refusals[pair]), ''))
  return table(
    title, ('pair', 'kind', 'records', 'MiB', 'fate', 'waited'), rows
  )


def residual_table(title: str, residuals: workdir.Residuals) -> table_lib.Table:
  """What THL could not carry, by pair of policies."""
  rows = []
  for pair, residual in residuals.items():
    total = max(sum(residual.chunks.values()), 1)
    chunks = ', '.join(
      f'{n / total:.0%} {kind}'
      for kind, n in residual.chunks.items()
      if n / total > 0.005
    )
    tokens = ('texts only', '', '')
    if residual.sender_tokens:
      tokens = (
        f'{residual.sender_tokens:,} to\n{residual.receiver_tokens:,}',
        chunks,
        f'{residual.segmentation_error:.1%}',
      )
    refused = _counts(residual.refused)
    rows.append((pair, f'{residual.rollouts:,}', refused, *tokens))
  columns = ('direction', 'rollouts', 'refused', 'tokens', 'chunks',
             'boundaries\nnot shared')  # fmt: skip
  return table(title, columns, rows)


_TEXTS = ('policy', 'pair', 'kind', 'fate', 'direction', 'refused', 'chunks')


def table(
  title: str,
  columns: Sequence[str],
  rows: Iterable[Sequence[str]],
  left: Collection[str] = _TEXTS,
) -> table_lib.Table:
  """A table whose texts are printable, wherever they come from.

  Columns named in `left` are aligned to the left, all others to the right.
  """
  shown = table_lib.Table(title=title, title_justify='left')
  for column in columns:
    shown.add_column(
      printable(column),
      justify='left' if column in left else 'right',
      no_wrap=column == 'policy',
      overflow='fold',
    )
  for row in rows:
    shown.add_row(*map(printable, row))
  return shown


def printable(text: str) -> str:
  """Text of several lines, each made printable."""
  return '\n'.join(map(texts.printable, text.split('\n')))


def _accuracy_table(policies: Mapping[str, workdir.PolicySummary]):
  rows = [
    (name, p.heldout_accuracy.before, p.heldout_accuracy.after)
    for name, p in policies.items()
  ]
  mean = [sum(row[i] for row in rows) / len(rows) for i in (1, 2)]
  shown = []
  for name, *accuracies in [*rows, ('mean', *mean)]:
    before, after = (100 * accuracy for accuracy in accuracies)
    shown.append(
      (name, f'{before:.1f}', f'{after:.1f}', f'{after - before:+.1f}')
    )
  return table(
    'Held-out accuracy, percent',
    ('policy', 'before', 'after', 'change'),
    shown,
  )


def _counts(counts: Mapping[str, int]) -> str:
  return ', '.join(f'{n:,} {name}' for name, n in counts.items()) or 'none'


class Live:
  """A progress bar for every policy; without a terminal, a line now and then.

  with Live(console, 'round', {'llama': 150}, done=0) as live:
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
