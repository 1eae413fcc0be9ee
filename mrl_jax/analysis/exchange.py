"""What an exchange did, read from what a run has written so far.

  found = inspection.read('runs/mine', newest=10)
  residuals, tries = inspection.carry(found.journals, limits)

A run may still be writing, and files may be damaged: what cannot be read is
told in `problems`, and all the rest is there.
"""

import collections
from collections.abc import Collection, Mapping, Sequence
import dataclasses
import itertools
import json
import os
import pathlib
from typing import NamedTuple

import msgspec
import numpy as np

from mrl_jax import checks
from mrl_jax import records
from mrl_jax.analysis import alignment as sides
from mrl_jax.see import journal as journal_lib
from mrl_jax.see import ledger
from mrl_jax.see import wire
from mrl_jax.thl import byte_tokenizer
from mrl_jax.thl import transfer
from mrl_jax.training import metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class Journal:
  """What a policy published.

  Attributes:
    finished: whether no round will follow.
    rounds: that are there; for each kind of records, sums of what they say.
    looked_at: the rounds that `rollouts` are of.
    rollouts: of those rounds.
    tokenizer: None if it cannot be read.
  """

  finished: bool
  rounds: Mapping[int, Mapping[str, collections.Counter]]
  looked_at: Collection[int]
  rollouts: Sequence[records.Rollout]
  tokenizer: byte_tokenizer.ByteTokenizer | None

  def totals(self) -> dict[str, collections.Counter]:
    """The sums over all rounds, by kind."""
    totals = {}
    for by_kind in self.rounds.values():
      for kind, sums in by_kind.items():
        totals.setdefault(kind, collections.Counter()).update(sums)
    return totals

  def rewards(self) -> dict[int, float]:
    """The mean reward of every round that tells it."""
    return {
      round: sums['reward'] / sums['samples']
      for round, by_kind in self.rounds.items()
      for sums in by_kind.values()
      if 'reward' in sums
    }


class Row(msgspec.Struct, kw_only=True):
  """The part of a row of `metrics.jsonl` that is about the exchange."""

  round: int
  policy: str
  peer_rows: int = 0
  exchange: ledger.Pairs = {}  # By sender.


class Summary(msgspec.Struct, kw_only=True):
  """The part of `summary.json` that is about the exchange."""

  exchange: ledger.Pairs = {}
  sent: ledger.Pairs = {}
  refusals: dict[str, dict[str, int]] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
  """What is known of the exchange of a run.

  Attributes:
    journals: by policy.
    rows: of the metrics.
    summary: None while there is none.
    limits: what policies take of their peers; None if nothing tells.
    problems: what could not be read, and why.
  """

  journals: Mapping[str, Journal]
  rows: Sequence[Row]
  summary: Summary | None
  limits: transfer.Limits | None
  problems: Sequence[str]

  def fates(self) -> ledger.Pairs | None:
    """What became of the records of each pair; None if nothing tells."""
    if self.summary:
      return {**self.summary.exchange, **self.summary.sent}
    if not self.rows:
      return None
    return ledger.summed((row.policy, row.exchange) for row in self.rows)

  def unlearned(self) -> dict[str, dict[int, float]]:
    """The share of peers' rollouts that a policy did not learn from.

    By policy and round. They were stale, say, or THL refused them.
    """
    shares = {}
    for row in self.rows:
      counts = [kinds.get('rollout', {}) for kinds in row.exchange.values()]
      settled = sum(sum(ledger.befell(c).values()) for c in counts)
      if settled:
        share = 1 - row.peer_rows / settled
        shares.setdefault(row.policy, {})[row.round] = share
    return shares


def read(folder: str, newest: int, only: int | None = None) -> Exchange:
  """Reads a work dir or a folder of journals.

  Args:
    folder: either.
    newest: of how many rounds of each policy rollouts are kept.
    only: if given, the one round of which they are kept instead.

  Raises:
    InputError: there is nothing that can be read.
  """
  root, problems = pathlib.Path(folder), []
  inner = root / 'see'
  parent = inner if inner.is_dir() else root
  journals = {}
  for path in sorted(parent.glob('*/journal.json')):
    name = path.parent.name
    found = _attempt(problems, name, _read_journal, parent, name, newest, only)
    if found:
      journals[name], faults = found
      problems += faults
  rows, summary, limits = (
    _attempt(problems, name, part, os.path.join(folder, name))
    for name, part in (
      ('metrics.jsonl', _read_rows),
      ('summary.json', _read_summary),
      ('config.json', _read_limits),
    )
  )
  checks.require(
    bool(journals or rows or summary),
    f'nothing of an exchange in {folder}: looked for POLICY/journal.json in it '
    f'and in {inner}, for metrics.jsonl and for summary.json'
    + ''.join(f'; {problem}' for problem in problems),
  )
  return Exchange(
    journals=journals,
    rows=rows or [],
    summary=summary,
    limits=limits,
    problems=problems,
  )


def _attempt(problems, what, function, *arguments):
  """What a function gives; None, and a problem, if something is damaged."""
  try:
    return function(*arguments)
  except (ValueError, OSError) as error:
    problems.append(f'{what}: {error}')
    return None


def _read_journal(parent, policy, newest, only) -> tuple[Journal, list[str]]:
  """A policy's journal, and the problems with it."""
  reader, problems = journal_lib.Reader(os.fspath(parent), policy), []
  finished, there = reader.finished(), reader.rounds()
  looked_at = there[-newest:] if only is None else {only}.intersection(there)
  rounds, rollouts = {}, []
  for round in there:
    place = f'{policy}, round {round}'
    data = _attempt(problems, place, reader.read, round) or []
    rounds[round], found, bad = _read_records(data)
    problems += [f'{place}: {n:,} bad records, {why}' for why, n in bad.items()]
    if round in looked_at:
      rollouts += found
  tokenizer = _attempt(
    problems,
    f'the tokenizer of {policy}',
    lambda: byte_tokenizer.from_json(reader.tokenizer()),
  )
  journal = Journal(
    finished=finished,
    rounds=rounds,
    looked_at=looked_at,
    rollouts=rollouts,
    tokenizer=tokenizer,
  )
  return journal, problems


def _read_records(data):
  """Sums by kind, the rollouts, and how many were left out and why."""
  by_kind, rollouts = {}, []
  bad = collections.Counter()
  for item in data:
    try:
      record = wire.decode(item)
      fault = records.fault(record)
    except msgspec.DecodeError:
      fault = 'undecodable'
    if fault:
      bad[fault] += 1
      continue
    sums = by_kind.setdefault(records.kind(record), collections.Counter())
    sums.update(records=1, bytes=len(item), **_said(record))
    if isinstance(record, records.Rollout):
      rollouts.append(record)
  return by_kind, rollouts, bad


def _said(record) -> dict[str, float]:
  """What a record says of the samples that it is about, summed over them."""
  if isinstance(record, records.Rollout):
    return {
      'samples': 1,
      'reward': record.reward,
      'successes': record.success,
      'stopped': record.finish == 'stop',
      'tokens': len(record.ids),
    }
  said = {'samples': record.count, 'successes': record.successes}
  if isinstance(record, records.GroupStats):
    said['reward'] = record.reward_sum
  return said


def _read_rows(path) -> list[Row]:
  return msgspec.convert(metrics.read(path), list[Row])


def _read_summary(path) -> Summary | None:
  return msgspec.convert(_read_json(path), Summary | None)


def _read_limits(path) -> transfer.Limits | None:
  config = msgspec.convert(_read_json(path), dict[str, object] | None) or {}
  thl = {k[4:]: value for k, value in config.items() if k.startswith('thl.')}
  return msgspec.convert(thl or None, transfer.Limits | None)


def _read_json(path):
  if not os.path.exists(path):
    return None
  with open(path, encoding='utf-8') as f:
    return json.load(f)


class Try(NamedTuple):
  """A rollout that was offered to a peer's tokenizer."""

  sender: str
  receiver: str
  rollout: records.Rollout
  residual: transfer.Residual  # Of it alone.

  @property
  def rank(self) -> tuple:
    """What is looked at first: what is cut otherwise, is correct and new."""
    chunks, header = self.residual.chunks, self.rollout.header
    return (
      bool(self.residual.refused),
      chunks.get('1:1') == sum(chunks.values()),
      not self.rollout.success,
      -header.round,
      header.prompt,
      header.sample,
    )


def carry(
  journals: Mapping[str, Journal], limits: transfer.Limits
) -> tuple[dict[str, transfer.Residual], list[Try]]:
  """Carries all rollouts to all peers: the residual of each pair, and each try.

  In the list, pairs take turns, each with what is looked at first.
  """
  residuals, tries = {}, []
  for sender, receiver in itertools.permutations(journals, 2):
    tokenizer = journals[receiver].tokenizer
    if tokenizer is None or not journals[sender].rollouts:
      continue
    total = residuals[f'{sender}->{receiver}'] = transfer.Residual()
    of_pair = []
    for rollout in journals[sender].rollouts:
      one = transfer.Residual()
      transfer.transfer(rollout, tokenizer, limits, one)
      total.add(one)
      of_pair.append(Try(sender, receiver, rollout, one))
    tries.append(sorted(of_pair, key=lambda t: t.rank))
  turns = itertools.chain.from_iterable(itertools.zip_longest(*tries))
  return residuals, [t for t in turns if t]


class Chunk(NamedTuple):
  """What lies between two common boundaries, whole and as tokens."""

  text: str
  sent: Sequence[str]
  carried: Sequence[str]
  sent_logp: float
  carried_logp: float


def chunks(
  rollout: records.Rollout,
  receiver: byte_tokenizer.ByteTokenizer,
  limits: transfer.Limits,
) -> list[Chunk]:
  """A rollout that is not refused, in the tokens of both sides."""
  sent, carried = sides.sides(rollout, receiver, limits)
  lengths = [part.sum() for part in _cut(sent.lengths, sent.chunk)]
  tokens = [_cut(one.tokens, one.chunk) for one in (sent, carried)]
  logps = [
    [float(part.sum()) for part in _cut(one.logp, one.chunk)]
    for one in (sent, carried)
  ]
  return list(map(Chunk, sides.visible(rollout, lengths), *tokens, *logps))


def _cut(values, place) -> list:
  """Cuts where `place` goes on."""
  edges = [0, *np.flatnonzero(np.diff(place)) + 1, len(place)]
  return [values[start:end] for start, end in itertools.pairwise(edges)]
