"""What a run shows in the terminal."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import statistics

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
  show_plan(console, plan)
  if plan.prompts_skipped:
    console.print(
      f'{plan.prompts_skipped:,} prompts are too long and were skipped.'
    )
  if plan.answers_faulty:
    console.print(
      f'{plan.answers_faulty:,} gold answers could never be rewarded; the log '
      'has examples.'
    )


def show_plan(console: console_lib.Console, plan: workdir.Plan) -> None:
  """Shows the devices of every policy."""
  devices = [
    (
      name,
      f'{part.parameters:,}' + f' + {part.adapters:,}' * bool(part.adapters),
      f'{part.vocabulary:,}',
      part.span,
      f'{part.memory_bytes / 2**20:,.1f} MiB',
      f'{part.load:.0%}',
    )
    for name, part in plan.policies.items()
  ]
  columns = ('policy', 'parameters', 'vocabulary', 'devices', 'memory each',
             'load')  # fmt: skip
  console.print(table(f'Plan for {plan.devices}', columns, devices))
  ways = [
    (
      name,
      _mesh(part.mesh),
      f'{part.micro_rows:,}',
      part.remat,
      _mesh(part.decode_mesh),
      f'{part.sample_batch:,}',
    )
    for name, part in plan.policies.items()
  ]
  columns = ('policy', 'update on', 'rows at a time', 'recomputed',
             'sampling on', 'prompts at a time')  # fmt: skip
  console.print(table('How they run', columns, ways))
  for name, part in plan.policies.items():
    console.print(f'{name}: {part.reason}', markup=False, highlight=False)
  for name, place in plan.elsewhere.items():
    console.print(f'{name} is not trained here: {place}', markup=False)


def _mesh(sizes):
  return (
    ', '.join(f'{a} {n}' for a, n in sizes.items() if n > 1) or 'one device'
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


def note(row: workdir.RoundMetrics) -> str:
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

  `pairs` counts records as a ledger does, `refusals` by reason. `waited` has the
  seconds that the receiver waited for the sender.
  """
  rows = []
  for pair, kinds in pairs.items():
    for i, (kind, counts) in enumerate(kinds.items()):
      name, seconds = ('', '') if i else (pair, f'{waited.get(pair, 0):.1f} s')
      number = f'{counts.get("published", 0):,}'
      size = f'{counts.get("bytes", 0) / 2**20:,.1f}'
      fates = _counts(ledger.fates(counts))
      rows.append((name, kind, number, size, fates, seconds))
    if pair in refusals:
      rows.append(('', 'refused as', '', '', _counts(refusals[pair]), ''))
  columns = ('pair', 'kind', 'records', 'MiB', 'fate', 'waited')
  return table(title, columns, rows)


def residual_table(title: str, residuals: workdir.Residuals) -> table_lib.Table:
  """What THL could not carry, by pair of policies."""
  rows = []
  for pair, residual in residuals.items():
    total = max(sum(residual.chunks.values()), 1)
    shares = {kind: n / total for kind, n in residual.chunks.items()}
    chunks = [f'{n:.0%} {kind}' for kind, n in shares.items() if n > 0.005]
    tokens = ('texts only', '', '')
    if residual.sender_tokens:
      tokens = (
        f'{residual.sender_tokens:,} to\n{residual.receiver_tokens:,}',
        ', '.join(chunks),
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
  rows: Sequence[Sequence[str]],
  left: Sequence[str] = _TEXTS,
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
    (name, 100 * p.heldout_accuracy.before, 100 * p.heldout_accuracy.after)
    for name, p in policies.items()
  ]
  _, *columns = zip(*rows, strict=True)
  means = map(statistics.fmean, columns)
  shown = [
    (name, f'{before:.1f}', f'{after:.1f}', f'{after - before:+.1f}')
    for name, before, after in [*rows, ('mean', *means)]
  ]
  columns = ('policy', 'before', 'after', 'change')
  return table('Held-out accuracy, percent', columns, shown)


def _counts(counts: Mapping[str, int]) -> str:
  return ', '.join(f'{n:,} {name}' for name, n in counts.items()) or 'none'


@contextlib.contextmanager
def live(
  console: console_lib.Console,
  title: str,
  totals: Mapping[str, int],
  done: int = 0,
) -> Iterator[Callable[[str, str], None]]:
  """A progress bar for every policy; without a terminal, a line now and then.

  with live(console, 'round', {'llama': 150}, done=0) as advance:
    advance('llama', 'reward 0.50')
  """
  bars = progress.Progress(
    progress.TextColumn('{task.description}'),
    progress.BarColumn(bar_width=8),
    progress.MofNCompleteColumn(),
    progress.TextColumn('{task.fields[note]}'),
    progress.TimeRemainingColumn(compact=True),
    console=console,
    disable=not console.is_terminal,
  )
  tasks = {
    name: bars.add_task(f'{title} {name}', total=n, completed=done, note='')
    for name, n in totals.items()
  }

  def advance(name, note):
    bars.update(tasks[name], advance=1, note=note)
    state = bars.tasks[tasks[name]]
    is_due = state.completed % _LINE_EVERY == 0 or state.finished
    if is_due and not console.is_terminal:
      place = f'{state.completed:.0f}/{state.total:.0f}'
      console.print(f'{title} {name} {place} {note}', highlight=False)

  with bars:
    yield advance
