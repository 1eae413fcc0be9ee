"""The exchange between policies of one process: bounded queues in memory."""

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import threading

from absl import logging
import msgspec

from mrl_jax import records
from mrl_jax.see import ledger as ledger_lib
from mrl_jax.see import wire


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """How much a queue holds, how old, and how long anyone waits for it.

  Attributes:
    records, bytes: the most in one receiver's queue.
    max_staleness: rounds that a record may be old when it is collected.
    block_s: how long a publisher waits for room before the oldest records go.
    wait_s: how long a collector waits for its peers.
  """

  records: int
  bytes: int
  max_staleness: int
  block_s: float
  wait_s: float


class Hub:
  """Queues of all policies, one a receiver; see `exchange.Endpoint`."""

  def __init__(self, peers: Mapping[str, Sequence[str]], limits: Limits):
    """Makes a queue for each policy.

    Args:
      peers: whom each policy listens to.
      limits: of each queue.
    """
    self.limits = limits
    self.ledger = ledger_lib.Ledger()
    self._queues = {
      name: _Queue(name, frozenset(senders), limits, self.ledger)
      for name, senders in peers.items()
    }

  def endpoint(self, policy: str) -> 'Endpoint':
    return Endpoint(self, policy)

  def publish(self, sender, round, published):
    for queue in self._queues.values():
      if sender in queue.senders:
        queue.put(sender, round, published)

  def collect(self, receiver, round, kinds):
    return self._queues[receiver].take(round, kinds)

  def state(self) -> bytes:
    """Undelivered records, published rounds and the ledger."""
    queues = {name: queue.state() for name, queue in self._queues.items()}
    return msgspec.msgpack.encode([queues, self.ledger.state()])

  def restore(self, state: bytes) -> None:
    queues, counts = msgspec.msgpack.decode(state)
    self.ledger.restore(counts)
    for name, queue in self._queues.items():
      queue.restore(queues[name])


@dataclasses.dataclass(frozen=True)
class Endpoint:
  """A policy's place at a `Hub`."""

  hub: Hub
  policy: str

  def publish(self, round: int, published: Sequence[records.Record]) -> None:
    self.hub.publish(self.policy, round, published)

  def collect(
    self, round: int, kinds: Collection[str]
  ) -> list[records.Record]:
    return self.hub.collect(self.policy, round, kinds)

  def ledger(self) -> ledger_lib.Ledger:
    return self.hub.ledger


class _Queue:
  """What waits for one receiver."""

  def __init__(self, receiver, senders, limits, ledger):
    self.senders = senders
    self._receiver, self._limits, self._ledger = receiver, limits, ledger
    self._changed = threading.Condition()
    self._waiting = {}  # Records by identity, oldest first.
    self._bytes = 0
    self._taken = set()  # Identities that were here, to know a duplicate.
    self._published = dict.fromkeys(senders, -1)  # Each sender's last round.

  def put(self, sender, round, published):
    with self._changed:
      for record in published:
        self._put_one(sender, record)
      self._published[sender] = max(round, self._published[sender])
      self._changed.notify_all()

  def _put_one(self, sender, record):
    identity, size = records.identity(record), records.size(record)
    fault = records.fault(record)
    if record.header.policy != sender:
      fault = 'sender'
    elif size > self._limits.bytes:
      fault = 'size'
    self._count(record, 'published', sender)
    if fault:
      logging.warning('SEE refused a record of %s: %s', sender, fault)
      self._count(record, 'refused', sender)
    elif identity in self._waiting or identity in self._taken:
      self._count(record, 'duplicate')
    else:
      self._changed.wait_for(lambda: self._fits(size), self._limits.block_s)
      while not self._fits(size):
        self._remove(next(iter(self._waiting)), 'evicted')
      self._waiting[identity] = record
      self._bytes += size

  def take(self, round, kinds):
    with self._changed:
      silent = lambda: [s for s, r in self._published.items() if r < round]
      if not self._changed.wait_for(lambda: not silent(), self._limits.wait_s):
        logging.warning(
          'round %d: %s heard nothing from %s in %g s and goes on without',
          round, self._receiver, ', '.join(sorted(silent())),
          self._limits.wait_s,
        )  # fmt: skip
      oldest = round - self._limits.max_staleness
      taken = []
      for identity, record in list(self._waiting.items()):
        if record.header.round < oldest:
          self._remove(identity, 'stale')
        elif record.header.round <= round and records.kind(record) in kinds:
          taken.append(self._remove(identity, 'used'))
      self._taken = {i for i in self._taken if i[1] >= oldest}
      self._changed.notify_all()
    return sorted(taken, key=_order)

  def _fits(self, size):
    return (
      len(self._waiting) < self._limits.records
      and self._bytes + size <= self._limits.bytes
    )

  def _remove(self, identity, fate):
    record = self._waiting.pop(identity)
    self._bytes -= records.size(record)
    self._taken.add(identity)
    self._count(record, fate)
    return record

  def _count(self, record, fate, sender=None):
    sender = sender or record.header.policy
    self._ledger.add(sender, self._receiver, records.kind(record), fate)

  def state(self):
    with self._changed:
      waiting = wire.encode(list(self._waiting.values()))
      return [waiting, sorted(self._taken), self._published]

  def restore(self, state):
    with self._changed:
      waiting, taken, self._published = state
      self._waiting = {records.identity(r): r for r in wire.decode(waiting)}
      self._bytes = sum(map(records.size, self._waiting.values()))
      self._taken = {tuple(identity) for identity in taken}


def _order(record):
  h = record.header
  return (h.policy, h.round, h.prompt, h.sample, records.kind(record))
