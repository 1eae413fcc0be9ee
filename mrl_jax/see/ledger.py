"""The books of the exchange: nothing is dropped without being counted."""

import collections

FATES = ('used', 'stale', 'refused', 'duplicate', 'evicted')


class Ledger:
  """Counts of records offered to one policy, by what became of them.

  For every sender and kind, and at all times,

    published = used + stale + refused + duplicate + evicted + waiting

  where `waiting` is what the policy's queue still holds.
  """

  def __init__(self):
    self._counts = collections.Counter()

  def add(self, sender: str, kind: str, fate: str) -> None:
    self._counts[sender, kind, fate] += 1

  def table(self) -> dict[str, dict[str, dict[str, int]]]:
    """{sender: {kind: {fate: count}}}, all fates, `waiting` as the rest."""
    table = {}
    for sender, kind in sorted({key[:2] for key in self._counts}):
      count = {f: self._counts[sender, kind, f] for f in ('published', *FATES)}
      count['waiting'] = count['published'] - sum(count[f] for f in FATES)
      table.setdefault(sender, {})[kind] = count
    return table

  def state(self) -> list:
    """As plain values, for a checkpoint."""
    return [[*key, n] for key, n in sorted(self._counts.items())]

  def restore(self, state: list) -> None:
    self._counts = collections.Counter({tuple(key): n for *key, n in state})
