"""The books of the exchange: nothing is dropped without being counted."""

import collections
import threading

FATES = ('used', 'stale', 'refused', 'duplicate', 'evicted')


class Ledger:
  """Counts of records by (sender, receiver, kind) and by what became of them.

  `published` counts what was offered to a receiver, and

    published = used + stale + refused + duplicate + evicted + waiting

  holds at all times, `waiting` being what the receiver's queue still has.
  """

  def __init__(self):
    self._counts = collections.Counter()
    self._lock = threading.Lock()

  def add(
    self, sender: str, receiver: str, kind: str, fate: str, count: int = 1
  ) -> None:
    with self._lock:
      self._counts[sender, receiver, kind, fate] += count

  def table(self) -> dict[str, dict[str, dict[str, int]]]:
    """{'sender->receiver': {kind: {fate: count}}}."""
    pairs = {}
    for (sender, receiver, kind, fate), n in sorted(self._counts.items()):
      by_kind = pairs.setdefault(f'{sender}->{receiver}', {})
      by_kind.setdefault(kind, {})[fate] = n
    return pairs

  def used(self) -> dict[str, int]:
    """Records used so far by each receiver."""
    receivers = collections.Counter()
    for (_, receiver, _, fate), n in self._counts.items():
      receivers[receiver] += n * (fate == 'used')
    return dict(receivers)

  def state(self) -> list:
    """As plain values, for a checkpoint."""
    return [[*key, n] for key, n in sorted(self._counts.items())]

  def restore(self, state: list) -> None:
    self._counts = collections.Counter(
      {tuple(key): n for *key, n in state}
    )
