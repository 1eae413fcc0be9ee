"""The way to a policy of the same process: straight into its queue."""

from collections.abc import Sequence

from mrl_jax import records
from mrl_jax.see import inbox as inbox_lib


class Outlet:
  """See `exchange.Outlet`; nothing is ever on its way."""

  ledger = None

  def __init__(self, policy: str, inbox: inbox_lib.Inbox):
    """From `policy` into the inbox of a peer."""
    self._policy, self._inbox = policy, inbox

  def send(self, round: int, published: Sequence[records.Record]) -> None:
    self._inbox.deliver(self._policy, round, published)

  def state(self) -> bytes:
    return b''

  def restore(self, state: bytes) -> None:
    del state

  def close(self) -> None:
    pass
