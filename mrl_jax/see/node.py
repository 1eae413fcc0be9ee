"""One process's part of the exchange."""

import collections
from collections.abc import Collection, Mapping, Sequence

from mrl_jax.see import exchange
from mrl_jax.see import inbox as inbox_lib
from mrl_jax.see import journal
from mrl_jax.see import transport as transport_lib


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
    journals: Mapping[str, journal.Writer] | None = None,
  ):
    """Gives every policy the outlets that the transports have for it.

    Inboxes and journals are given by policy of this process. The transports
    were built with these inboxes; peers get records of these kinds.
    """
    self._transports, journals = transports, journals or {}
    outlets = {name: {} for name in inboxes}
    for transport in transports:
      for (sender, receiver), outlet in transport.outlets.items():
        outlets[sender][receiver] = outlet
    self.endpoints = {
      name: exchange.Endpoint(inbox, outlets[name], journals.get(name), kinds)
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
    for endpoint in self.endpoints.values():
      endpoint.close()
    for transport in self._transports:
      transport.close()
