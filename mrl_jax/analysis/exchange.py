"""Reads the exchange of a run: its journals, beside what `run` reads.

  exchange = exchange_lib.read('runs/mine', newest=10)
  residuals, offers = exchange_lib.transfer_all(exchange)

The run may still be writing, and files may be damaged: `problems` names what is
missing or left out, and the rest is read.
"""

import collections
from collections.abc import Collection, Mapping, Sequence
import dataclasses
import itertools
import os
import pathlib
from typing import NamedTuple

import msgspec

from mrl_jax import checks
from mrl_jax import records
from mrl_jax import workdir
from mrl_jax.analysis import run as run_lib
from mrl_jax.see import journal as journal_lib
from mrl_jax.see import ledger
from mrl_jax.see import wire
from mrl_jax.thl import byte_tokenizer
from mrl_jax.thl import transfer


class Journal(NamedTuple):
  """The journal of a policy: the records that it published."""

  finished: bool  # Whether no round will follow.
  # By round and kind of record: the number of 'records', their 'bytes' and sums
  # over the samples that they are about.
  rounds: Mapping[int, Mapping[str, collections.Counter]]
  chosen: Collection[int]  # The rounds whose rollouts are kept.
  rollouts: Sequence[records.Rollout]  # Of the chosen rounds.
  tokenizer: byte_tokenizer.ByteTokenizer | None  # None if it cannot be read.

  def totals(self) -> dict[str, collections.Counter]:
    """Sums over all rounds, by kind of record."""
    totals = collections.defaultdict(collections.Counter)
    for by_kind in self.rounds.values():
      for kind, sums in by_kind.items():
        totals[kind].update(sums)
    return dict(totals)

  def rewards(self) -> dict[int, float]:
    """The mean reward of every round that has records with rewards."""
    return {
      round: sums['reward'] / sums['samples']
      for round, by_kind in self.rounds.items()
      for sums in by_kind.values()
      if 'reward' in sums
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
  """The exchange of a run."""

  run: run_lib.Run  # Other files of the work dir; empty for journals alone.
  journals: Mapping[str, Journal]  # By policy.
  limits: transfer.Limits  # Of THL; defaults if the config is unknown.
  problems: Sequence[str]  # What is missing or was left out, and why.

  def unlearned(self) -> dict[str, dict[int, float]]:
    """By policy and round, the share of peers' rollouts not trained on."""
    shares = {}
    for row in self.run.all_rows:
      counts = [kinds.get('rollout', {}) for kinds in row.exchange.values()]
      settled = sum(sum(ledger.fates(c).values()) for c in counts)
      if settled:
        share = 1 - (row.peer_rows or 0) / settled
        shares.setdefault(row.policy, {})[row.round] = share
    return shares


def read(folder: str, newest: int, only: int | None = None) -> Exchange:
  """Reads a work dir or a folder of journals.

  Keeps the rollouts of the `newest` rounds of each journal, or of the round
  `only`. Raises InputError if nothing about an exchange can be read.
  """
  inner = os.path.join(folder, workdir.JOURNALS)
  parent = inner if os.path.isdir(inner) else folder
  try:
    run = run_lib.read(folder)
  except checks.InputError:  # A folder of journals alone.
    run = run_lib.Run(folder=folder)
  problems, journals = [*run.problems], {}
  for path in sorted(pathlib.Path(parent).glob('*/journal.json')):
    policy = path.parent.name
    journal = run_lib.attempt(
      problems, policy, _read_journal, parent, policy, newest, only, problems
    )
    if journal:
      journals[policy] = journal
  checks.require(
    bool(journals or run.all_rows or run.summary),
    f'no exchange in {folder}: looked for POLICY/journal.json in it and in '
    f'{inner}, for {workdir.ROUNDS} and for {workdir.SUMMARY}'
    + ''.join(f'; {problem}' for problem in problems),
  )
  limits = transfer.Limits(
    max_tokens=run.settings.max_tokens, max_residual=run.settings.max_residual
  )
  return Exchange(run=run, journals=journals, limits=limits, problems=problems)


def _read_journal(parent, policy, newest, only, problems) -> Journal:
  reader = journal_lib.Reader(parent, policy)
  finished, stored = reader.finished(), reader.rounds()
  chosen = stored[-newest:] if only is None else {only}.intersection(stored)
  rounds, rollouts = {}, []
  for round in stored:
    place = f'{policy}, round {round}'
    data = run_lib.attempt(problems, place, reader.read, round) or []
    rounds[round], rollouts_of_round, bad = _sums(data)
    problems += [f'{place}: {n:,} bad records, {why}' for why, n in bad.items()]
    rollouts += rollouts_of_round if round in chosen else []
  tokenizer = run_lib.attempt(
    problems,
    f'the tokenizer of {policy}',
    lambda: byte_tokenizer.from_json(reader.tokenizer()),
  )
  return Journal(finished, rounds, chosen, rollouts, tokenizer)


def _sums(data):
  """Sums by kind, the rollouts, and counts of bad records by reason."""
  by_kind = collections.defaultdict(collections.Counter)
  rollouts, bad = [], collections.Counter()
  for encoded in data:
    try:
      record = wire.decode(encoded)
      fault = records.fault(record)
    except msgspec.DecodeError:
      fault = 'undecodable'
    if fault:
      bad[fault] += 1
      continue
    by_kind[records.kind(record)].update(
      records=1, bytes=len(encoded), **_sums_over_samples(record)
    )
    if isinstance(record, records.Rollout):
      rollouts.append(record)
  return by_kind, rollouts, bad


def _sums_over_samples(record) -> dict[str, float]:
  if isinstance(record, records.Rollout):
    return {
      'samples': 1,
      'reward': record.reward,
      'successes': record.success,
      'stopped': record.finish in records.ENDED,
      'tokens': len(record.ids),
    }
  sums = {'samples': record.count, 'successes': record.successes}
  if isinstance(record, records.GroupStats):
    sums['reward'] = record.reward_sum
  return sums


class Offer(NamedTuple):
  """A rollout that was transferred to a peer's tokenizer, or refused."""

  sender: str
  receiver: str
  rollout: records.Rollout
  residual: transfer.Residual  # Of this rollout alone.

  @property
  def rank(self) -> tuple:
    """Sort key: rollouts that show most come first.

    These are rollouts that are not refused, that the two tokenizers segment
    differently, that are correct, and that are new.
    """
    chunks, header = self.residual.chunks, self.rollout.header
    return (
      bool(self.residual.refused),
      chunks.get('1:1') == sum(chunks.values()),
      not self.rollout.success,
      -header.round,
      header.prompt,
      header.sample,
    )


def transfer_all(
  exchange: Exchange,
) -> tuple[dict[str, transfer.Residual], list[Offer]]:
  """Transfers the rollouts of all journals to all peers, within the limits.

  Returns the residual of each pair, and all rollouts: pairs take turns, each in
  the order of `Offer.rank`.
  """
  residuals, by_pair = {}, []
  for sender, receiver in itertools.permutations(exchange.journals, 2):
    tokenizer = exchange.journals[receiver].tokenizer
    rollouts = exchange.journals[sender].rollouts
    if tokenizer is None or not rollouts:
      continue
    offers = []
    for rollout in rollouts:
      residual = transfer.Residual()
      transfer.transfer(rollout, tokenizer, exchange.limits, residual)
      offers.append(Offer(sender, receiver, rollout, residual))
    total = run_lib.total(offer.residual for offer in offers)
    residuals[f'{sender}->{receiver}'] = total
    by_pair.append(sorted(offers, key=lambda offer: offer.rank))
  turns = itertools.chain.from_iterable(itertools.zip_longest(*by_pair))
  return residuals, [offer for offer in turns if offer]
