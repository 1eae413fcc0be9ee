"""The interface of whatever carries records from one policy to another."""

from collections.abc import Callable, Mapping, Sequence
import types
from typing import Protocol

from mrl_jax import records
from mrl_jax.see import ledger as ledger_lib
from mrl_jax.see import wire


class Outlet(Protocol):
  """Carries the records of one policy to one peer.

  The defaults suit an outlet that delivers at once, inside `send`.
  """

  # Fates of what was sent; None if the peer's own ledger counts it all.
  ledger: ledger_lib.Ledger | None = None

  def send(
    self,
    round: int,
    published: Sequence[records.Record],
    encode: Callable[[records.Record], bytes] = wire.encode,
  ) -> None:
    """Sends all records of a round, possibly none, and ends the round.

    An outlet that needs the bytes of a record gets them of `encode`, which may
    know them already.
    """

  def state(self) -> bytes:
    """Returns the undelivered messages and the ledger, for a checkpoint."""
    return b''

  def restore(self, state: bytes) -> None:
    """Restores what `state` returned."""


class Transport(Protocol):
  """Connects the policies of this process with some of their peers.

  A transport is built with the inboxes of this process's policies. It fills
  them from the peers it connects, and it has an outlet to each peer that can
  receive. `exchange.Node` calls its methods, in the order below.

  The transports are `in_process`, `rpc` and `journal`. A new one inherits from
  this class, and becomes a row of the contract tests, tests/see/test_exchange.
  """

  # By (sender, receiver), where the sender is in this process.
  outlets: Mapping[tuple[str, str], Outlet] = types.MappingProxyType({})
  # Messages refused before their records could be read, by reason.
  refused: Mapping[str, int] = types.MappingProxyType({})

  def open(self) -> None:
    """Starts to receive."""

  def saved(self, rounds: int) -> None:
    """Deletes stored messages that a checkpoint after `rounds` rounds holds."""

  def close(self) -> None:
    """Stops after a bounded wait until its outlets have delivered all."""
