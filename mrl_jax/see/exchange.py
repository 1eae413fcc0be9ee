"""What a policy sees of the exchange, whatever carries the records."""

from collections.abc import Collection, Sequence
import dataclasses
from typing import Protocol

from mrl_jax import records
from mrl_jax.see import ledger


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """How much waits for a policy, how old it may be, and who waits how long.

  Attributes:
    records, bytes: the most that one policy's queue holds.
    max_staleness: rounds that a record may be old when it is collected.
    block_s: how long a publisher waits for room before the oldest records go.
    wait_s: how long a collector waits for its peers.
  """

  records: int
  bytes: int
  max_staleness: int
  block_s: float
  wait_s: float


class Endpoint(Protocol):
  """One policy's place in the exchange.

  A round of a policy:

    endpoint.publish(round, own_records)
    received = endpoint.collect(round, kinds={'group_stats'})
    ...  # learn; of a peer that gave nothing there is nothing in `received`

  Publish first, then collect: waits are bounded, so that no order of policies
  can lock them.

  Attributes:
    ledger: what was offered to this policy, and what became of it.
  """

  ledger: ledger.Ledger

  def publish(self, round: int, published: Sequence[records.Record]) -> None:
    """Offers a round's records, maybe none, to everyone who listens.

    A full queue blocks for a while; then its oldest records are evicted.
    """

  def collect(self, round: int, kinds: Collection[str]) -> list[records.Record]:
    """Takes what peers published, in the order (policy, round, prompt, sample).

    Waits, for a bounded time, until all of them have published `round`. What is
    too old is dropped and counted; what is of a later round stays.
    """

  def state(self) -> bytes:
    """What waits, what peers have published, and the ledger."""

  def restore(self, state: bytes) -> None:
    """Puts back what `state` gave."""
