"""The exchange between policies of one process: bounded queues in memory."""

from collections.abc import Collection, Mapping, Sequence
import threading

from absl import logging
import msgspec

from mrl_jax import records
from mrl_jax.see import exchange
from mrl_jax.see import ledger as ledger_lib
from mrl_jax.see import wire


def connect(
  listens_to: Mapping[str, Collection[str]], limits: exchange.Limits
) -> dict[str, 'Endpoint']:
  """The endpoints of policies of this process.

  Args:
    listens_to: the peers that each policy hears.
    limits: of each policy's queue.
  """
  endpoints = {
    name: Endpoint(name, peers, limits) for name, peers in listens_to.items()
  }
  for name, peers in listens_to.items():
    for peer in peers:
      endpoints[peer].listeners.append(endpoints[name])
  return endpoints


class Endpoint:
  """A policy's queue, and the queues of those who listen to it.

  The state of the queue is guarded by one condition, which is notified when
  there is more in it or more room.
  """

  def __init__(
    self, policy: str, peers: Collection[str], limits: exchange.Limits
  ):
    self.policy, self.limits = policy, limits
    self.listeners: list[Endpoint] = []
    self.ledger = ledger_lib.Ledger()
    self._changed = threading.Condition()
    self._waiting = {}  # Records by identity, in the order of arrival.
    self._bytes = 0
    self._gone = set()  # Identities that were here, to know a duplicate.
    self._heard = dict.fromkeys(peers, -1)  # Each peer's last round.

  def publish(self, round: int, published: Sequence[records.Record]) -> None:
    for listener in self.listeners:
      listener.deliver(self.policy, round, published)

  def deliver(
    self, sender: str, round: int, published: Sequence[records.Record]
  ) -> None:
    """Takes in what a peer publishes."""
    with self._changed:
      for record in published:
        self._admit(sender, record)
      self._heard[sender] = max(round, self._heard[sender])
      self._changed.notify_all()

  def _admit(self, sender, record):
    kind, identity = records.kind(record), records.identity(record)
    size = records.size(record)
    fault = records.fault(record)
    if record.header.policy != sender:
      fault = 'sender'
    elif size > self.limits.bytes:
      fault = 'size'
    self.ledger.add(sender, kind, 'published')
    if fault:
      # The ledger counts them all.
      logging.log_first_n(
        logging.WARNING,
        '%s refused a record of %s: %s',
        10,
        self.policy,
        sender,
        fault,
      )
      self.ledger.add(sender, kind, 'refused')
    elif identity in self._waiting or identity in self._gone:
      self.ledger.add(sender, kind, 'duplicate')
    else:
      self._changed.wait_for(lambda: self._has_room(size), self.limits.block_s)
      while not self._has_room(size):
        oldest = min(self._waiting.values(), key=lambda r: r.header.round)
        self._remove(oldest, 'evicted')
      self._waiting[identity] = record
      self._bytes += size

  def collect(self, round: int, kinds: Collection[str]) -> list[records.Record]:
    with self._changed:
      self._wait_for_peers(round)
      oldest = round - self.limits.max_staleness
      taken = []
      for record in list(self._waiting.values()):
        if record.header.round < oldest:
          self._remove(record, 'stale')
        elif record.header.round <= round and records.kind(record) in kinds:
          self._remove(record, 'used')
          taken.append(record)
      self._gone = {i for i in self._gone if i[1] >= oldest}
      self._changed.notify_all()
    return sorted(taken, key=_order)

  def _wait_for_peers(self, round):
    def silent():
      return sorted(peer for peer, last in self._heard.items() if last < round)

    if not self._changed.wait_for(lambda: not silent(), self.limits.wait_s):
      logging.warning(
        'round %d: %s heard nothing from %s in %g s and goes on without',
        round,
        self.policy,
        ', '.join(silent()),
        self.limits.wait_s,
      )

  def _has_room(self, size):
    return (
      len(self._waiting) < self.limits.records
      and self._bytes + size <= self.limits.bytes
    )

  def _remove(self, record, fate):
    identity = records.identity(record)
    del self._waiting[identity]
    self._bytes -= records.size(record)
    self._gone.add(identity)
    self.ledger.add(record.header.policy, records.kind(record), fate)

  def state(self) -> bytes:
    with self._changed:
      return msgspec.msgpack.encode(
        [
          wire.encode(list(self._waiting.values())),
          sorted(self._gone),
          self._heard,
          self.ledger.state(),
        ]
      )

  def restore(self, state: bytes) -> None:
    with self._changed:
      waiting, gone, self._heard, counts = msgspec.msgpack.decode(state)
      self._waiting = {records.identity(r): r for r in wire.decode(waiting)}
      self._bytes = sum(map(records.size, self._waiting.values()))
      self._gone = {tuple(identity) for identity in gone}
      self.ledger.restore(counts)


def _order(record):
  h = record.header
  return (h.policy, h.round, h.prompt, h.sample, records.kind(record))
