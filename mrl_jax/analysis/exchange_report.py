"""What launch/inspect_exchange.py prints and writes about an exchange.

  exchange = exchange_lib.read('runs/mine', newest=10)
  residuals, offers = exchange_lib.transfer_all(exchange)
  exchange_report.show(exchange, residuals, offers[:2], console)

Names and texts of a run are untrusted: all are printed as printable text. The
console must not interpret markup.
"""

from collections.abc import Collection, Mapping, Sequence
import dataclasses

from rich import console as console_lib

from mrl_jax.analysis import alignment
from mrl_jax.analysis import exchange as exchange_lib
from mrl_jax.thl import transfer
from mrl_jax.training import display

_MOST = 40  # Lines of one rollout, and problems.
_MEANS = {
  'reward': '.3f',
  'successes': '.1%',
  'stopped': '.1%',
  'tokens': '.1f',
}


def show(
  exchange: exchange_lib.Exchange,
  residuals: Mapping[str, transfer.Residual],
  offers: Sequence[exchange_lib.Offer],
  console: console_lib.Console,
) -> None:
  """Prints problems, all tables, and the rollouts in `offers`."""
  if exchange.problems:
    lines = [f'  {problem}' for problem in exchange.problems]
    _say(console, '\n'.join(['Missing or left out:', *lines[:_MOST]]))
    if len(lines) > _MOST:
      _say(console, f'  and {len(lines) - _MOST:,} more')
  show_published(exchange.journals, console)
  show_fates(exchange, console)
  show_residuals(exchange, residuals, console)
  for offer in offers:
    show_rollout(offer, exchange, console)
  if offers:
    _say(
      console,
      f'{alignment.SPACE} is a space, {alignment.END} end-of-sequence, '
      f'{alignment.CONTROL} a token without bytes;\n'
      'log-probabilities are in nats.',
    )


def show_published(
  journals: Mapping[str, exchange_lib.Journal], console: console_lib.Console
) -> None:
  """Prints how far each journal is, and a table of its records by kind."""
  rows = []
  for policy, journal in journals.items():
    empty = sum(not by_kind for by_kind in journal.rounds.values())
    without = f', {empty:,} of them without records' * bool(empty)
    state = 'not ' * (not journal.finished) + 'finished'
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
  if rows:
    console.print(display.table('Published', columns, rows))


def show_fates(
  exchange: exchange_lib.Exchange, console: console_lib.Console
) -> None:
  """Prints who gave what to whom, with the fates of the records."""
  run = exchange.run
  if not run.all_rows and not run.summary:
    _say(
      console,
      'The fates of the records are unknown: the folder has neither a '
      'summary.json nor a\nmetrics.jsonl. Give the work dir of the run.',
    )
  elif not run.fates():
    _say(console, 'No policy received records of a peer.')
  else:
    title, totals = 'Who gave what to whom', run.totals
    waited = totals.timing.waited
    console.print(
      display.exchange_table(title, run.fates(), totals.refusals, waited)
    )


def show_residuals(
  exchange: exchange_lib.Exchange,
  residuals: Mapping[str, transfer.Residual],
  console: console_lib.Console,
) -> None:
  """Prints what THL cannot transfer of the rollouts in the journals."""
  journals, limits = exchange.journals.values(), exchange.limits
  stored = {round for journal in journals for round in journal.rounds}
  chosen = {round for journal in journals for round in journal.chosen}
  if not residuals:
    rollouts = sum(len(journal.rollouts) for journal in journals)
    _say(
      console,
      'No THL residual: it takes rollouts of one policy and the tokenizer of '
      'another. With\n--config.see.journal=all a run writes rollouts, whatever '
      f'its method. Found: {rollouts:,} rollouts\nin {_span(chosen)}.',
    )
    return
  source = 'config.json' if exchange.run.config else 'by default'
  title = (
    f'THL residual of all rollouts in {_span(chosen)}, of {len(stored):,}\n'
    f'max_tokens {limits.max_tokens:,}, max_residual {limits.max_residual:g} '
    f'({source})'
  )
  console.print(display.residual_table(title, residuals))


def show_rollout(
  offer: exchange_lib.Offer,
  exchange: exchange_lib.Exchange,
  console: console_lib.Console,
) -> None:
  """Prints a rollout in the tokens of both sides, a line for each chunk."""
  rollout, header = offer.rollout, offer.rollout.header
  _say(
    console,
    f'\n{offer.sender}->{offer.receiver}, round {header.round}, '
    f'{header.prompt}, sample {header.sample}: {rollout.verdict}, reward '
    f'{rollout.reward:g}',
  )
  if offer.residual.refused:
    tokens = alignment.visible(rollout, rollout.byte_lengths)
    more = f' and {len(tokens) - _MOST:,} more' if len(tokens) > _MOST else ''
    _say(console, f'  refused as {", ".join(offer.residual.refused)}:')
    _say(console, f'  {" ".join(tokens[:_MOST])}{more}')
    return
  receiver = exchange.journals[offer.receiver].tokenizer
  chunks = alignment.chunks(rollout, receiver, exchange.limits)
  rows = [
    (' '.join(c.sent), c.text, ' '.join(c.carried), f'{c.sent_logp:.4f}')
    for c in chunks
  ]
  if len(rows) > _MOST:
    rows[_MOST:] = [(f'{len(rows) - _MOST:,} more', '', '', '')]
  rows += [
    ('', '', 'all, as sent', f'{sum(c.sent_logp for c in chunks):.4f}'),
    ('', '', 'all, as carried', f'{sum(c.carried_logp for c in chunks):.4f}'),
  ]
  texts = (f'tokens of {offer.sender}', 'chunk', f'tokens of {offer.receiver}')
  console.print(display.table('', (*texts, 'log-prob'), rows, left=texts))


def values(
  exchange: exchange_lib.Exchange, residuals: Mapping[str, transfer.Residual]
) -> dict:
  """All printed numbers as plain values, without the rollouts."""
  run, journals = exchange.run, exchange.journals.items()
  return {
    'published': {policy: journal.totals() for policy, journal in journals},
    'rewards': {policy: journal.rewards() for policy, journal in journals},
    'fates': run.fates() if run.all_rows or run.summary else None,
    'refusals': run.totals.refusals,
    'not_learned_from': exchange.unlearned(),
    'limits': dataclasses.asdict(exchange.limits),
    'residuals': {p: dataclasses.asdict(r) for p, r in residuals.items()},
    'problems': exchange.problems,
  }


def _span(rounds: Collection[int]) -> str:
  if len(rounds) < 2:
    return f'round {min(rounds)}' if rounds else 'no rounds'
  return f'{len(rounds):,} rounds, {min(rounds)} to {max(rounds)}'


def _say(console, text) -> None:
  console.print(display.printable(text), soft_wrap=True)
