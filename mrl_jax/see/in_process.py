"""The transport between policies of one process: straight into the queue."""

from collections.abc import Mapping, Sequence

from mrl_jax import records
from mrl_jax.see import inbox as inbox_lib
from mrl_jax.see import transport


class Outlet(transport.Outlet):
  """Puts a policy's records into the inbox of a peer, without a copy."""

  def __init__(self, sender: str, inbox: inbox_lib.Inbox):
    self._sender, self._inbox = sender, inbox

  def send(
    self, round: int, published: Sequence[records.Record], encode=None
  ) -> None:
    del encode  # Nothing is encoded.
    self._inbox.deliver(self._sender, round, published)


class Transport(transport.Transport):
  """Connects each policy with those others that receive from it."""

  def __init__(self, inboxes: Mapping[str, inbox_lib.Inbox]):
    self.outlets = {
      (sender, receiver): Outlet(sender, inbox)
      for receiver, inbox in inboxes.items()
      for sender in inboxes
      if sender in inbox.peers
    }
