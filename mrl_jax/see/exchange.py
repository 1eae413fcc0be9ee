"""What a policy sees of the exchange, whatever carries the records."""

from collections.abc import Collection, Sequence
from typing import Protocol

from mrl_jax import records
from mrl_jax.see import ledger


class Endpoint(Protocol):
  """One policy's place in the exchange.

  A round of a policy:

    endpoint.publish(round, own_records)
    peers = endpoint.collect(round, kinds={'group_stats'})
    ...  # learn; from a peer that gave nothing there is nothing in `peers`

  Publish first, then collect: waits are bounded, so that no order of policies
  can lock them.
  """

  def publish(self, round: int, published: Sequence[records.Record]) -> None:
    """Offers a round's records, maybe none, to everyone who listens.

    A full queue blocks for a while; then its oldest records are evicted.
    """

  def collect(
    self, round: int, kinds: Collection[str]
  ) -> list[records.Record]:
    """Takes what peers published, in the order (policy, round, prompt, sample).

    Waits, for a bounded time, until all of them have published `round`. What is
    too old is dropped and counted; what is of a later round stays.
    """

  def ledger(self) -> ledger.Ledger:
    """What has passed, by pair and kind."""
