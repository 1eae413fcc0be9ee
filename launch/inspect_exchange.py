"""Shows what the policies of a run gave each other, and what became of it.

python launch/inspect_exchange.py runs/mine --rounds=20 --show=4

Takes a work dir, or a folder of journals such as its see/, whether the run has
ended or not. What THL cannot carry is found anew, from the journals.
"""

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import json
import os
import pathlib
import sys

from absl import app
from absl import flags
import matplotlib
from matplotlib import axes as axes_lib
from matplotlib import figure as figure_lib
from rich import console as console_lib
from rich import table as table_lib

from mrl_jax import checks
from mrl_jax import files
from mrl_jax import texts
from mrl_jax.analysis import alignment as sides
from mrl_jax.analysis import exchange as inspection
from mrl_jax.see import ledger
from mrl_jax.thl import transfer

_ROUNDS = flags.DEFINE_integer(
  'rounds', 10, 'How many of the newest rounds THL looks at.', 1
)
_ROUND = flags.DEFINE_integer('round', None, 'The one it looks at instead.', 0)
_SHOW = flags.DEFINE_integer('show', 2, 'How many rollouts to show.', 0)
_POLICY = flags.DEFINE_string('policy', None, 'Whose rollouts to show.')
_PROMPT = flags.DEFINE_string('prompt', None, 'Of which prompt.')
_FIGURE = flags.DEFINE_string(
  'figure', None, 'Where to draw; by default exchange.png in the folder.'
)
_JSON = flags.DEFINE_string('json', None, 'A file to write all figures to.')

_MOST = 40  # Lines about one rollout, or about what could not be read.
_NUMBERS = ('records', 'MiB', 'mean\nreward', 'correct', 'stopped',
            'tokens\neach', 'rollouts', 'tokens', 'boundaries\nnot shared',
            'log-prob')  # fmt: skip
_MEANS = {
  'reward': '.3f',
  'successes': '.1%',
  'stopped': '.1%',
  'tokens': '.1f',
}
_NO_FATES = 'Records published; what became of them is not known'
_NO_WORK_DIR = (
  'there is\nneither a summary.json nor a metrics.jsonl, as in a work dir'
)
_NOTHING_GIVEN = 'Records published; none was given to a peer'
_NO_RESIDUAL = (
  'No THL residual: that takes rollouts of one policy and the tokenizer of\n'
  'another. With --config.see.journal=all a run writes rollouts, whatever its '
  'method.'
)
# Colours that the colour-blind tell apart, of Okabe and Ito and of Tol.
_FATES = {
  'used': '#009E73',
  'acknowledged': '#56B4E9',
  'published': '#56B4E9',
  'stale': '#E69F00',
  'refused': '#D55E00',
  'evicted': '#CC79A7',
  'duplicate': '#999999',
  'waiting': '#F0E442',
}
_LINES = (('#332288', '-'), ('#CC6677', '--'), ('#117733', '-.'), ('k', ':'))


def show(folder: str, console: console_lib.Console) -> None:
  """Prints what there is to say, and writes the figure and the JSON."""
  found = inspection.read(folder, _ROUNDS.value, _ROUND.value)
  limits = found.limits or _default_limits()
  residuals, tries = inspection.carry(found.journals, limits)
  chosen = choose(tries, _POLICY.value, _PROMPT.value)[: _SHOW.value]
  for problem in found.problems[:_MOST]:
    _say(console, f'Left out: {problem}')
  if len(found.problems) > _MOST:
    _say(console, f'Left out: {len(found.problems) - _MOST:,} more')
  show_published(found.journals, console)
  show_fates(found, console)
  show_residuals(found, residuals, limits, console)
  for one in chosen:
    show_rollout(one, found.journals, limits, console)
  if chosen:
    _say(
      console,
      f'{sides.SPACE} is a space, {sides.END} the end of sequence, '
      f'{sides.CONTROL} a token without bytes;\n'
      'log-probabilities are in nats.',
    )
  path = _FIGURE.value or os.path.join(folder, 'exchange.png')
  figure = draw(found, os.path.basename(os.path.abspath(folder)))
  formats = figure.canvas.get_supported_filetypes()
  checks.choose(pathlib.Path(path).suffix[1:], formats, 'format of --figure')
  figure.savefig(path)
  _say(console, f'Figure: {path}')
  if _JSON.value:
    values = figures(found, residuals, limits)
    files.write(_JSON.value, json.dumps(values, indent=1))


def _default_limits() -> transfer.Limits:
  # Config files are not installed.
  sys.path.insert(0, os.fspath(pathlib.Path(__file__).resolve().parents[1]))
  from configs import base

  return transfer.Limits(**base.get_config().thl)


def choose(
  tries: Sequence[inspection.Try], policy: str | None, prompt: str | None
) -> Sequence[inspection.Try]:
  """Those of a policy and of a prompt, if they are given."""
  chosen = [
    t
    for t in tries
    if policy in (None, t.sender) and prompt in (None, t.rollout.header.prompt)
  ]
  if tries and not chosen:
    first = tries[0]
    raise checks.InputError(
      'no rollout of that policy and prompt among those looked at; there is '
      f'--policy={first.sender} --prompt={first.rollout.header.prompt}, say'
    )
  return chosen


def show_published(
  journals: Mapping[str, inspection.Journal], console: console_lib.Console
) -> None:
  rows = []
  for policy, journal in journals.items():
    empty = sum(not by_kind for by_kind in journal.rounds.values())
    without = f', {empty:,} of them without records' if empty else ''
    state = 'finished' if journal.finished else 'not finished'
    _say(console, f'{policy}: {_span(journal.rounds)}{without}, {state}')
    for kind, sums in journal.totals().items():
      means = [
        format(sums[name] / sums['samples'], form) if name in sums else ''
        for name, form in _MEANS.items()
      ]
      size = f'{sums["bytes"] / 2**20:,.2f}'
      rows.append((policy, kind, f'{sums["records"]:,}', size, *means))
  columns = ('policy', 'kind', 'records', 'MiB', 'mean\nreward', 'correct',
             'stopped', 'tokens\neach')  # fmt: skip
  _print_table(console, 'Published', columns, rows)


def show_fates(
  found: inspection.Exchange, console: console_lib.Console
) -> None:
  rows, pairs = [], found.fates()
  reasons = found.summary.refusals if found.summary else {}
  for pair, kinds in (pairs or {}).items():
    for kind, counts in kinds.items():
      fates = _counts(ledger.befell(counts))
      rows.append((pair, kind, f'{counts.get("published", 0):,}', fates))
    if pair in reasons:
      rows.append((pair, 'refused as', '', _counts(reasons[pair])))
  columns = ('pair', 'kind', 'records', 'what became\nof them')
  _print_table(console, 'Who gave what to whom', columns, rows)
  if pairs is None:
    _say(console, f'{_NO_FATES}: {_NO_WORK_DIR}.')
  elif not pairs:
    _say(console, f'{_NOTHING_GIVEN}.')


def show_residuals(
  found: inspection.Exchange,
  residuals: Mapping[str, transfer.Residual],
  limits: transfer.Limits,
  console: console_lib.Console,
) -> None:
  rows = []
  for pair, r in residuals.items():
    cut = max(sum(r.chunks.values()), 1)
    growth = r.receiver_tokens / max(r.sender_tokens, 1) - 1
    rows.append(
      (
        pair.replace('->', '->\n'),
        f'{r.rollouts:,}',
        _counts(r.refused).replace(', ', '\n'),
        f'{r.sender_tokens:,} to\n{r.receiver_tokens:,}\n{growth:+.1%}',
        '\n'.join(f'{n / cut:.2%} {k}' for k, n in r.chunks.items() if n),
        f'{r.segmentation_error:.1%}',
      )
    )
  journals = found.journals.values()
  there = {round for j in journals for round in j.rounds}
  looked_at = {round for j in journals for round in j.looked_at}
  source = 'config.json' if found.limits else 'by default'
  title = (
    f'THL residual of all rollouts in {_span(looked_at)}, of {len(there):,}\n'
    f'max_tokens {limits.max_tokens:,}, max_residual {limits.max_residual:g} '
    f'({source})'
  )
  columns = ('pair', 'rollouts', 'refused', 'tokens', 'chunks',
             'boundaries\nnot shared')  # fmt: skip
  _print_table(console, title, columns, rows)
  if not rows:
    rollouts = sum(len(j.rollouts) for j in journals)
    _say(
      console,
      f'{_NO_RESIDUAL}\nFound: {rollouts:,} rollouts in {_span(looked_at)}.',
    )


def show_rollout(
  one: inspection.Try,
  journals: Mapping[str, inspection.Journal],
  limits: transfer.Limits,
  console: console_lib.Console,
) -> None:
  """A rollout in the tokens of both sides, a line for each chunk."""
  rollout, header = one.rollout, one.rollout.header
  prompt = texts.printable(header.prompt)
  _say(
    console,
    f'\n{one.sender}->{one.receiver}, round {header.round}, {prompt}, sample '
    f'{header.sample}: {rollout.verdict}, reward {rollout.reward:g}',
  )
  if one.residual.refused:
    tokens = sides.visible(rollout, rollout.byte_lengths)
    more = f' and {len(tokens) - _MOST:,} more' if len(tokens) > _MOST else ''
    _say(console, f'  refused as {", ".join(one.residual.refused)}:')
    _say(console, f'  {" ".join(tokens[:_MOST])}{more}')
    return
  receiver = journals[one.receiver].tokenizer
  chunks = inspection.chunks(rollout, receiver, limits)
  rows = [
    (' '.join(c.sent), c.text, ' '.join(c.carried), f'{c.sent_logp:.4f}')
    for c in chunks[:_MOST]
  ]
  if len(chunks) > _MOST:
    rows.append((f'{len(chunks) - _MOST:,} more', '', '', ''))
  rows += [
    ('', '', 'all, as sent', f'{sum(c.sent_logp for c in chunks):.4f}'),
    ('', '', 'all, as carried', f'{sum(c.carried_logp for c in chunks):.4f}'),
  ]
  columns = (f'tokens of {one.sender}', 'chunk', f'tokens of {one.receiver}',
             'log-prob')  # fmt: skip
  _print_table(console, '', columns, rows)


def draw(found: inspection.Exchange, name: str) -> figure_lib.Figure:
  """Who gave what to whom; and over the rounds, what it was worth."""
  bars, what = _bars(found)
  rewards = {p: journal.rewards() for p, journal in found.journals.items()}
  curves = {
    'Mean reward of what a policy published': rewards,
    "Peers' rollouts that a policy did not learn from": found.unlearned(),
  }
  curves = {title: c for title, c in curves.items() if any(c.values())}
  with matplotlib.rc_context({'text.parse_math': False}):
    size = (12, max(6, 1.5 + 0.4 * len(bars)))
    figure = figure_lib.Figure(figsize=size, dpi=100, layout='constrained')
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    title = f'Who gave what to whom in {_short(name, 60)}'
    figure.suptitle(title, fontsize=15)
    grid = figure.add_gridspec(max(len(curves), 1), 5)
    _draw_bars(figure.add_subplot(grid[:, : 3 if curves else 5]), what, bars)
    for i, (title, by_policy) in enumerate(curves.items()):
      axes = figure.add_subplot(grid[i, 3:])
      _draw_curves(axes, title, by_policy)
      if by_policy is not rewards:
        axes.set_ylim(-0.04, 1.04)
        axes.yaxis.set_major_formatter('{x:.0%}')
    return figure


def _bars(found) -> tuple[list[tuple[str, dict[str, int]]], str]:
  """For each pair and kind, a name and its records by fate; and their title."""
  pairs, title = found.fates(), 'Records, by what became of them'
  if not pairs:
    title = _NO_FATES if pairs is None else _NOTHING_GIVEN
    pairs = {
      policy: {k: {'published': n['records']} for k, n in j.totals().items()}
      for policy, j in found.journals.items()
    }
  bars = []
  for pair, kinds in pairs.items():
    name = ' → '.join(map(_short, pair.split('->')))
    for kind, counts in kinds.items():
      counts = ledger.befell(counts) or counts
      counts = {fate: counts[fate] for fate in _FATES if fate in counts}
      text = _short(f'{name}, {kind}: {_counts(counts)}', 100)
      bars.append((text, counts))
  return bars, title


def _draw_bars(axes: axes_lib.Axes, title, bars) -> None:
  """Bars, each under a line that says the same."""
  for y, (text, counts) in enumerate(bars):
    axes.text(0, y - 0.25, text, va='bottom', fontsize=9)
    start = 0
    for fate, n in counts.items():
      axes.barh(y, n, 0.4, start, color=_FATES[fate], label=fate)
      start += n
  middle, half = (len(bars) - 1) / 2, max(len(bars), 4) / 2
  axes.set_ylim(middle + half, middle - half - 0.2)
  axes.set_yticks([])
  axes.spines['left'].set_visible(False)
  axes.set_xlabel('records')
  axes.xaxis.set_major_formatter('{x:,.0f}')
  _finish(axes, title)


def _draw_curves(axes, title, by_policy) -> None:
  for i, (policy, values) in enumerate(by_policy.items()):
    color, dashes = _LINES[i % len(_LINES)]
    rounds = sorted(values)
    heights = [values[round] for round in rounds]
    dots = '.' if len(rounds) <= _MOST else ''
    label = _short(policy)
    axes.plot(rounds, heights, dashes, color=color, marker=dots, label=label)
  axes.set_xlabel('round')
  axes.xaxis.get_major_locator().set_params(integer=True)
  axes.yaxis.grid(alpha=0.3)
  _finish(axes, title)


def _finish(axes, title) -> None:
  """A title, and under it a legend, clear of what is drawn."""
  axes.set_title(title, loc='left', pad=26)
  handles, labels = axes.get_legend_handles_labels()
  handles = dict(zip(labels, handles, strict=True))
  axes.legend(
    handles.values(),
    handles.keys(),
    loc='lower left',
    bbox_to_anchor=(0, 1),
    ncols=max(len(handles), 1),
    frameon=False,
    borderaxespad=0.3,
    borderpad=0,
  )
  axes.spines[['top', 'right']].set_visible(False)


def figures(
  found: inspection.Exchange,
  residuals: Mapping[str, transfer.Residual],
  limits: transfer.Limits,
) -> dict:
  """All that is shown but the rollouts, as plain values."""
  return {
    'published': {p: j.totals() for p, j in found.journals.items()},
    'rewards': {p: j.rewards() for p, j in found.journals.items()},
    'fates': found.fates(),
    'refusals': found.summary.refusals if found.summary else {},
    'not_learned_from': found.unlearned(),
    'limits': dataclasses.asdict(limits),
    'residuals': {p: dataclasses.asdict(r) for p, r in residuals.items()},
    'problems': found.problems,
  }


def _short(text: str, most: int = 16) -> str:
  """Text for which there is room in the figure."""
  text = texts.printable(text)
  return text if len(text) <= most else f'{text[: most - 1]}…'


def _span(rounds: Collection[int]) -> str:
  if len(rounds) < 2:
    return f'round {min(rounds)}' if rounds else 'no rounds'
  return f'{len(rounds):,} rounds, {min(rounds)} to {max(rounds)}'


def _counts(counts: Mapping[str, int]) -> str:
  return ', '.join(f'{n:,} {name}' for name, n in counts.items()) or 'none'


def _print_table(console, title, columns, rows) -> None:
  if not rows:
    return
  if title:
    _say(console, f'\n{title}')
  table = table_lib.Table()
  for column in columns:
    side = 'right' if column in _NUMBERS else 'left'
    table.add_column(_shown(column), justify=side, overflow='fold')
  for row in rows:
    table.add_row(*map(_shown, row))
  console.print(table)


def _say(console: console_lib.Console, text: str) -> None:
  console.print(_shown(text), soft_wrap=True)


def _shown(text: str) -> str:
  """Text that may come from anywhere, made fit for a terminal."""
  return '\n'.join(map(texts.printable, text.split('\n')))


def main(argv):
  if len(argv) != 2:
    sys.exit('name one folder: the work dir of a run, or its see/')
  # A terminal without ␣ shows its number.
  sys.stdout.reconfigure(errors='backslashreplace')
  console = console_lib.Console(markup=False, emoji=False, highlight=False)
  try:
    show(argv[1], console)
  except (checks.InputError, OSError) as error:
    sys.exit(_shown(f'{error}'))


if __name__ == '__main__':
  app.run(main)
