"""The books of the exchange: nothing is dropped without being counted."""

import collections
from collections.abc import Iterable, Mapping
import threading

RECEIVED = ('used', 'stale', 'refused', 'duplicate', 'evicted')
SENT = ('acknowledged', 'refused', 'evicted')


class Ledger:
  """Counts of records between one policy and its peers, by their fate.

  For every peer and kind, and at all times,

    published = the sum over all fates + waiting

  where `waiting` is what a queue still holds. What was offered to a policy and
  what it sent over a wire are two ledgers, with fates of their own.

  Attributes:
    seconds: spent in the exchange by the thread that learns.
    waited: seconds of them, by the peer that was waited for.
  """

  def __init__(self, fates: Iterable[str] = RECEIVED):
    self.seconds = 0.0
    self.waited = collections.Counter()
    self._fates = tuple(fates)
    self._counts = collections.Counter()
    self._reasons = collections.Counter()
    self._told = collections.Counter()
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
  ) -> None:
    """Counts records; those that are refused have a reason."""
    with self._lock:
      self._counts[peer, kind, fate] += count
      if bytes:
        self._counts[peer, kind, 'bytes'] += bytes
      if reason:
        self._reasons[peer, reason] += count

  def table(self) -> dict[str, dict[str, dict[str, int]]]:
    """{peer: {kind: {fate: count}}}, with `bytes`, `waiting` and all fates."""
    with self._lock:
      counts = self._counts.copy()
    table = {}
    for peer, kind in sorted({key[:2] for key in counts}):
      row = {
        name: counts[peer, kind, name]
        for name in ('published', 'bytes', *self._fates)
      }
      settled = sum(row[fate] for fate in self._fates)
      row['waiting'] = row['published'] - settled
      table.setdefault(peer, {})[kind] = row
    return table

  def refusals(self) -> dict[str, dict[str, int]]:
    """{peer: {reason: count}}."""
    with self._lock:
      reasons = sorted(self._reasons.items())
    table = {}
    for (peer, reason), n in reasons:
      table.setdefault(peer, {})[reason] = n
    return table

  def since_last(self) -> dict[str, dict[str, dict[str, int]]]:
    """{peer: {kind: {fate: count}}} of what was added since the last call."""
    with self._lock:
      added = self._counts - self._told
      self._told = self._counts.copy()
    table = {}
    for (peer, kind, name), n in sorted(added.items()):
      table.setdefault(peer, {}).setdefault(kind, {})[name] = n
    return table

  def timing(self) -> collections.Counter:
    """Seconds: 'exchange' in all, and in it 'waited/PEER' for each peer."""
    waited = {f'waited/{peer}': s for peer, s in self.waited.items()}
    return collections.Counter(exchange=self.seconds, **waited)

  def state(self) -> list:
    """As plain values, for a checkpoint."""
    with self._lock:
      books = [
        [[*key, n] for key, n in sorted(counts.items())]
        for counts in (self._counts, self._told, self._reasons)
      ]
    return [*books, dict(self.waited), self.seconds]

  def restore(self, state: list) -> None:
    *counts, waited, self.seconds = state
    self._counts, self._told, self._reasons = (
      collections.Counter({tuple(key): n for *key, n in rows})
      for rows in counts
    )
    self.waited = collections.Counter(waited)


Pairs = dict[str, dict[str, dict[str, int]]]  # 'sender->receiver', kind, fate.


def befell(counts: Mapping[str, int]) -> dict[str, int]:
  """The fates in a ledger's counts, without those of no record."""
  others = ('published', 'bytes')
  return {fate: n for fate, n in counts.items() if n and fate not in others}


def summed(told: Iterable[tuple[str, Mapping]]) -> Pairs:
  """What became of the records of each pair, by what receivers were told.

  Args:
    told: receivers, each with what its `since_last` returned.
  """
  pairs = {}
  for receiver, by_sender in told:
    for sender, kinds in by_sender.items():
      pair = pairs.setdefault(f'{sender}->{receiver}', {})
      for kind, counts in kinds.items():
        pair.setdefault(kind, collections.Counter()).update(counts)
  for pair in pairs.values():
    for counts in pair.values():
      counts['waiting'] = counts['published'] - sum(befell(counts).values())
  return pairs
