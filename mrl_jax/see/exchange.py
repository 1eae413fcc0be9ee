"""The exchange of a process's policies, whichever transports carry records."""

import collections
from collections.abc import Callable, Collection, Mapping, Sequence
import functools
import time

import msgspec

from mrl_jax import records
from mrl_jax.see import inbox as inbox_lib
from mrl_jax.see import journal as journal_lib
from mrl_jax.see import transport as transport_lib
from mrl_jax.see import wire

# Maps the records of a round and the name of a peer to the records that it gets.
Addressed = Callable[[Sequence[records.Record], str], Sequence[records.Record]]


def _to_all(published, peer):
  del peer
  return published


class Endpoint:
  """One policy's access to the exchange.

  A round of a policy:

    endpoint.publish(round, own_records)
    received = endpoint.collect(round, kinds={'group_stats'})
    ...  # Learn. `received` has no records of a peer that stayed silent.

  Publish before you collect. As every wait is bounded, no order in which
  policies do so can deadlock.
  """

  def __init__(
    self,
    inbox: inbox_lib.Inbox,
    outlets: Mapping[str, transport_lib.Outlet],
    journal: journal_lib.Writer | None,
    kinds: Collection[str],
    addressed: Addressed = _to_all,
  ):
    """Builds the endpoint of the policy that owns `inbox`.

    It sends records of these kinds through `outlets`, which are given by peer;
    of these, each peer gets those that are `addressed` to it.
    """
    self._inbox, self._outlets, self._journal = inbox, outlets, journal
    self._kinds, self._addressed = frozenset(kinds), addressed
    # What peers offered to this policy, and the fate of each record; and what
    # this policy sent to other processes, by peer.
    self.ledger = inbox.ledger
    self.sent = {
      peer: outlet.ledger for peer, outlet in outlets.items() if outlet.ledger
    }

  def publish(self, round: int, published: Sequence[records.Record]) -> None:
    """Publishes the records of a round, possibly none, and ends the round.

    The journal gets all of them, peers those that they may read. If a peer's
    queue is full, this blocks for `Limits.block_s` at most; then the queue's
    oldest records are evicted.
    """
    began = time.monotonic()
    encode = functools.cache(wire.encode)  # Once for the journal and all peers.
    if self._journal:
      self._journal.write(round, published, encode)
    shared = [r for r in published if records.kind(r) in self._kinds]
    for peer, outlet in self._outlets.items():
      outlet.send(round, self._addressed(shared, peer), encode)
    self.ledger.seconds += time.monotonic() - began

  def collect(self, round: int, kinds: Collection[str]) -> list[records.Record]:
    """Returns what peers published up to `round`, of these kinds.

    Sorted by (policy, round, prompt, sample, kind). Waits until all peers have
    published `round`, but for none that is silent longer than `Limits.wait_s`.
    Records older than `Limits.max_staleness` rounds are dropped and counted;
    records of later rounds and of other kinds stay in the queue.
    """
    began = time.monotonic()
    received = self._inbox.collect(round, kinds)
    self.ledger.seconds += time.monotonic() - began
    return received

  def state(self) -> bytes:
    """Returns the queue, undelivered messages and ledgers, for a checkpoint."""
    outlets = {peer: outlet.state() for peer, outlet in self._outlets.items()}
    return msgspec.msgpack.encode([self._inbox.state(), outlets])

  def restore(self, state: bytes) -> None:
    """Restores what `state` returned; peers may have come, gone or moved."""
    inbox, outlets = msgspec.msgpack.decode(state)
    self._inbox.restore(inbox)
    for peer, outlet in self._outlets.items():
      if outlets.get(peer):
        outlet.restore(outlets[peer])

  def finish(self) -> None:
    """Marks the policy's journal as finished: no round will follow."""
    if self._journal:
      self._journal.finish()


class Node:
  """The endpoints of the policies that this process trains.

  node = Node(inboxes, transports, kinds)
  ...                                       # Restore the endpoints.
  node.open()
  node.endpoints['llama'].publish(round, records)
  ...                                       # Write a checkpoint.
  node.saved(rounds)
  node.close()
  """

  def __init__(
    self,
    inboxes: Mapping[str, inbox_lib.Inbox],
    transports: Sequence[transport_lib.Transport],
    kinds: Collection[str],
    journals: Mapping[str, journal_lib.Writer] | None = None,
    addressed: Addressed = _to_all,
  ):
    """Gives every policy the outlets that the transports have for it.

    Inboxes and journals are given by policy of this process. The transports
    were built with these inboxes; peers get records of these kinds, if they are
    `addressed` to them.
    """
    self._transports, journals = transports, journals or {}
    outlets = {name: {} for name in inboxes}
    for transport in transports:
      for (sender, receiver), outlet in transport.outlets.items():
        outlets[sender][receiver] = outlet
    self.endpoints = {
      name: Endpoint(inbox, outlets[name], journals.get(name), kinds, addressed)
      for name, inbox in inboxes.items()
    }

  @property
  def refused(self) -> dict[str, int]:
    """Messages refused before their records could be read, by reason."""
    refused = (collections.Counter(t.refused) for t in self._transports)
    return dict(sum(refused, collections.Counter()))

  def open(self) -> None:
    """Starts to receive from other processes; restore the endpoints before."""
    for transport in self._transports:
      transport.open()

  def saved(self, rounds: int) -> None:
    """Deletes stored messages that a checkpoint after `rounds` rounds holds."""
    for transport in self._transports:
      transport.saved(rounds)

  def close(self) -> None:
    """Waits, for a bounded time, until peers have all that was published."""
    for transport in self._transports:
      transport.close()
