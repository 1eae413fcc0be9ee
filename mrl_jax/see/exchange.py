"""What a policy sees of the exchange, whatever carries the records."""

from collections.abc import Collection, Mapping, Sequence
import time
from typing import Protocol

import msgspec

from mrl_jax import records
from mrl_jax.see import inbox as inbox_lib
from mrl_jax.see import journal as journal_lib
from mrl_jax.see import ledger as ledger_lib


class Outlet(Protocol):
  """The way from one policy to one peer.

  Attributes:
    ledger: what was sent; None where the peer's own ledger says it all.
  """

  ledger: ledger_lib.Ledger | None

  def send(self, round: int, published: Sequence[records.Record]) -> None:
    """Sends a round's records, maybe none; after it, the round is over."""

  def state(self) -> bytes:
    """What is on its way, and the ledger."""

  def restore(self, state: bytes) -> None:
    """Puts back what `state` gave."""

  def close(self) -> None:
    """Waits, for a bounded time, until nothing is on its way."""


class Endpoint:
  """One policy's place in the exchange.

  A round of a policy:

    endpoint.publish(round, own_records)
    received = endpoint.collect(round, kinds={'group_stats'})
    ...  # learn; of a peer that gave nothing there is nothing in `received`

  Publish first, then collect: waits are bounded, so that no order of policies
  can lock them.

  Attributes:
    ledger: what was offered to this policy, and what became of it.
    sent: ledgers of what it sent to other processes, by peer.
  """

  def __init__(
    self,
    inbox: inbox_lib.Inbox,
    outlets: Mapping[str, Outlet],
    journal: journal_lib.Writer | None,
    kinds: Collection[str],
  ):
    """Of a policy that shares records of these `kinds` with its peers."""
    self._inbox, self._outlets, self._journal = inbox, outlets, journal
    self._kinds = frozenset(kinds)
    self.ledger = inbox.ledger
    self.sent = {
      peer: outlet.ledger for peer, outlet in outlets.items() if outlet.ledger
    }

  def publish(self, round: int, published: Sequence[records.Record]) -> None:
    """Offers a round's records, maybe none, to everyone who listens.

    All of them are written to the journal; those of the kinds that are shared
    go to the peers. A full queue blocks for a while; then its oldest records
    are evicted.
    """
    began = time.monotonic()
    if self._journal:
      self._journal.write(round, published)
    shared = [r for r in published if records.kind(r) in self._kinds]
    for outlet in self._outlets.values():
      outlet.send(round, shared)
    self.ledger.seconds += time.monotonic() - began

  def collect(self, round: int, kinds: Collection[str]) -> list[records.Record]:
    """Takes what peers published, in the order (policy, round, prompt, sample).

    Waits until all of them have published `round`, except for those that have
    been silent for too long. What is too old is dropped and counted; what is
    of a later round or of another kind stays.
    """
    began = time.monotonic()
    received = self._inbox.collect(round, kinds)
    self.ledger.seconds += time.monotonic() - began
    return received

  def state(self) -> bytes:
    """What waits here or is on its way, and the ledgers."""
    outlets = {peer: outlet.state() for peer, outlet in self._outlets.items()}
    return msgspec.msgpack.encode([self._inbox.state(), outlets])

  def restore(self, state: bytes) -> None:
    """Puts back what `state` gave; peers may have come, gone or moved."""
    inbox, outlets = msgspec.msgpack.decode(state)
    self._inbox.restore(inbox)
    for peer, outlet in self._outlets.items():
      if outlets.get(peer):
        outlet.restore(outlets[peer])

  def finish(self) -> None:
    """Says that no round will follow."""
    if self._journal:
      self._journal.finish()

  def close(self) -> None:
    """Waits, for a bounded time, until peers have all that was published."""
    for outlet in self._outlets.values():
      outlet.close()
