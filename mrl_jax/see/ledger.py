"""The ledgers of the exchange: every record is counted, with its fate."""

import collections
from collections.abc import Iterable, Mapping
import threading

from absl import logging

RECEIVED = ('used', 'stale', 'refused', 'duplicate', 'evicted')
SENT = ('acknowledged', 'refused', 'evicted')
_WARNINGS = 3  # Log lines for each peer and reason of refusal.


class Ledger:
  """Counts of records between one policy and its peers, by fate.

  For every peer and kind, and at all times,

    published = sum of the counts of all fates + waiting

  where `waiting` is the number of records that are still in a queue. What a
  policy was offered and what it sent over a network are in two ledgers, with
  the fates `RECEIVED` and `SENT`.
  """

  def __init__(self, fates: tuple[str, ...] = RECEIVED):
    self.seconds = 0.0  # That the training thread spent in the exchange.
    self.waited = collections.Counter()  # Those spent waiting, by peer.
    self._fates = fates
    self._counts = collections.Counter()  # By (peer, kind, fate).
    self._reasons = collections.Counter()  # By (peer, reason).
    self._reported = collections.Counter()  # Counts at the last `since_last`.
    self._lock = threading.Lock()

  def add(
    self,
    peer: str,
    kind: str,
    fate: str,
    count: int = 1,
    *,
    bytes: int = 0,
    reason: str = '',
    log: str = '',
  ) -> None:
    """Counts records as 'published' or under a fate; refusals by reason too.

    The first few refusals of each reason write the line `log` to the log.
    """
    with self._lock:
      self._counts[peer, kind, fate] += count
      if bytes:
        self._counts[peer, kind, 'bytes'] += bytes
      if reason:
        if self._reasons[peer, reason] < _WARNINGS:
          logging.warning(log)
        self._reasons[peer, reason] += count

  def table(self) -> dict[str, dict[str, dict[str, int]]]:
    """{peer: {kind: counts}}: 'published', 'bytes', all fates, 'waiting'."""
    with self._lock:
      table = _nested(self._counts)
    columns = ('published', 'bytes', *self._fates)
    for kinds in table.values():
      for kind, counts in kinds.items():
        row = {column: counts.get(column, 0) for column in columns}
        kinds[kind] = {**row, 'waiting': _waiting(row)}
    return table

  def refusals(self) -> dict[str, dict[str, int]]:
    """{peer: {reason: count}}."""
    with self._lock:
      return _nested(self._reasons)

  def since_last(self) -> dict[str, dict[str, dict[str, int]]]:
    """{peer: {kind: counts}} of what was added since the last call."""
    with self._lock:
      added = self._counts - self._reported
      self._reported = self._counts.copy()
    return _nested(added)

  def state(self) -> list:
    """Returns all counts and times as plain values, for a checkpoint."""
    with self._lock:
      counts = [
        [[*key, n] for key, n in sorted(counter.items())]
        for counter in (self._counts, self._reported, self._reasons)
      ]
    return [*counts, dict(self.waited), self.seconds]

  def restore(self, state: list) -> None:
    *counts, waited, self.seconds = state
    self._counts, self._reported, self._reasons = (
      collections.Counter({tuple(key): n for *key, n in rows})
      for rows in counts
    )
    self.waited = collections.Counter(waited)


def _nested(counts: Mapping[tuple[str, ...], int]) -> dict:
  """{('a', 'x'): 1, ('a', 'y'): 2} as {'a': {'x': 1, 'y': 2}}, sorted."""
  nested = {}
  for (*path, column), n in sorted(counts.items()):
    row = nested
    for key in path:
      row = row.setdefault(key, {})
    row[column] = n
  return nested


def fates(counts: Mapping[str, int]) -> dict[str, int]:
  """The columns of a ledger's row that are fates or 'waiting', if not zero."""
  others = ('published', 'bytes')
  return {fate: n for fate, n in counts.items() if n and fate not in others}


def _waiting(counts):
  return counts['published'] - sum(fates(counts).values())


def totals_by_pair(
  changes: Iterable[tuple[str, Mapping]],
) -> dict[str, dict[str, dict[str, int]]]:
  """Sums the changes of receivers' ledgers: {'sender->receiver': {kind: row}}.

  `changes` are names of receivers, each with a result of `Ledger.since_last`.
  """
  pairs = {}
  for receiver, by_sender in changes:
    for sender, kinds in by_sender.items():
      pair = pairs.setdefault(f'{sender}->{receiver}', {})
      for kind, counts in kinds.items():
        pair.setdefault(kind, collections.Counter()).update(counts)
  for pair in pairs.values():
    for counts in pair.values():
      counts['waiting'] = _waiting(counts)
  return pairs
