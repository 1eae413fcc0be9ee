"""A policy's queue of what its peers publish, bounded and in memory."""

import collections
from collections.abc import Collection, Mapping, Sequence
import dataclasses
import math
import threading
import time
from typing import NamedTuple, Protocol

from absl import logging
import msgspec

from mrl_jax import records
from mrl_jax.see import ledger as ledger_lib
from mrl_jax.see import wire

_POLL_S = 0.05  # Between looks at sources that cannot speak up.
_WARNINGS = 3  # Of what is refused for the same reason.
_REMEMBERED = 4  # Identities that are remembered, in units of the capacity.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """How much waits for a policy, how old it may be, and who waits how long.

  Attributes:
    records, bytes: the most that one queue holds.
    max_staleness: rounds that a record may be old when it is collected.
    block_s: how long a publisher waits for room before the oldest records go.
    wait_s: how long a peer may be silent before one goes on without it.
  """

  records: int
  bytes: int
  max_staleness: int
  block_s: float
  wait_s: float


class Peer(NamedTuple):
  """What is known of a peer.

  Attributes:
    tokenizer, vocab_size: the fingerprint and the size of its tokenizer.
    run: the fingerprint of its run.
  """

  tokenizer: str
  vocab_size: int
  run: str


class Source(Protocol):
  """Where records must be fetched from, as nobody delivers them."""

  def fetch(self, round: int) -> None:
    """Delivers what there is up to `round`; does not wait."""


class Inbox:
  """A queue that several threads fill and one empties.

  It is guarded by one condition, which is notified when there is more in it or
  more room.

  Attributes:
    policy: whose queue it is.
    peers: those that may fill it.
    ledger: what was offered, and what became of it.
    sources: what `collect` fetches from; each delivers to this queue.
  """

  def __init__(self, policy: str, peers: Mapping[str, Peer], limits: Limits):
    self.policy, self.peers, self.limits = policy, dict(peers), limits
    self.ledger = ledger_lib.Ledger()
    self.sources: list[Source] = []
    self._changed = threading.Condition()
    self._waiting = {}  # Records by identity, in the order of arrival.
    self._bytes = 0
    self._held = collections.Counter()  # Bytes of them, by peer.
    self._gone = {}  # Identities that were here, to know a duplicate.
    self._messages = {}  # Their rounds, by name.
    self._oldest = 0  # Records of earlier rounds are stale.
    self._heard = dict.fromkeys(self.peers, -1)  # Each peer's last round.
    self._away = set()  # Peers that are not waited for until they speak.
    # When each peer last went on, and to which round since it is waited for.
    self._spoke, self._reached = {}, {}

  def deliver(
    self,
    sender: str,
    round: int,
    published: Sequence[records.Record],
    last: bool = True,
    waits: bool = True,
  ) -> None:
    """Takes in what a peer publishes.

    Args:
      sender: the peer.
      round: of all records; the peer is done with those before.
      published: the records.
      last: whether it is done with this one, too.
      waits: for room, if there is none. A source does not: its records are
        fetched by the one who would make room.
    """
    until = time.monotonic() + (self.limits.block_s if waits else 0)
    with self._changed:
      self._hear(sender, round)
      for record in published:
        self._admit(sender, round, record, until)
      if last:
        self._heard[sender] = max(round, self._heard[sender])
      self._changed.notify_all()

  def deliver_encoded(
    self,
    sender: str,
    round: int,
    data: Sequence[bytes],
    last: bool = True,
    kinds: Collection[str] = records.KINDS,
    waits: bool = True,
  ) -> None:
    """Takes in records of these kinds that are still bytes; see `deliver`.

    Those of other kinds were not meant for this policy. Some of the bytes may
    not be records at all.
    """
    decoded = []
    for item in data:
      try:
        record = wire.decode(item)
        if records.kind(record) in kinds:
          decoded.append(record)
      except msgspec.DecodeError as error:
        self.refuse(sender, 'unknown', 'undecodable', str(error))
    self.deliver(sender, round, decoded, last, waits)

  def note_taken(self, message: str, round: int) -> None:
    """Notes a message that is kept on disk, so that `state` knows it."""
    with self._changed:
      self._messages[message] = round

  def has_taken(self, message: str) -> bool:
    return message in self._messages

  def forget(self, before: int) -> None:
    """Forgets messages of earlier rounds, which are no longer on disk."""
    with self._changed:
      self._messages = {m: r for m, r in self._messages.items() if r >= before}

  def heard(self, peer: str) -> int:
    """The last round that a peer is done with; -1 if there is none."""
    return self._heard[peer]

  def ended(self, peer: str) -> None:
    """Notes that a peer will publish no more."""
    with self._changed:
      self._away.add(peer)
      self._changed.notify_all()

  def refuse(self, sender: str, kind: str, reason: str, why: str = '') -> None:
    """Counts a record of a peer that is not taken, and says so at first."""
    with self._changed:
      self.ledger.add(sender, kind, 'published')
      self.ledger.add(sender, kind, 'refused', reason=reason)
      so_often = self.ledger.refusals()[sender][reason]
    if so_often <= _WARNINGS:
      logging.warning(
        '%s refused a %s of %s: %s %s', self.policy, kind, sender, reason, why
      )

  def _admit(self, sender, round, record, until):
    kind = records.kind(record)
    reason, why = self._fault(sender, round, record)
    if reason:
      self.refuse(sender, kind, reason, why)
      return
    identity, size = records.identity(record), records.size(record)
    if not self._fits(1, size):
      self._changed.wait_for(
        lambda: self._unwanted(identity, round) or self._fits(1, size),
        until - time.monotonic(),
      )
    # While it waited, another copy may have come, or its round have passed.
    self.ledger.add(sender, kind, 'published', bytes=size)
    fate = self._unwanted(identity, round)
    if fate:
      self.ledger.add(sender, kind, fate)
      return
    self._waiting[identity] = record
    self._bytes += size
    self._held[sender] += size
    while not self._fits(0, 0):
      self._evict()

  def _evict(self):
    """Lets the oldest go of the peer that has most: no other pays for it."""
    most = max(self._held, key=self._held.get)
    oldest = min(
      (r for r in self._waiting.values() if r.header.policy == most),
      key=lambda r: r.header.round,
    )
    self._remove(oldest, 'evicted')

  def _unwanted(self, identity, round) -> str | None:
    """The fate of a record that no room is made for."""
    if identity in self._waiting or identity in self._gone:
      return 'duplicate'
    return 'stale' if round < self._oldest else None

  def _fault(self, sender, round, record) -> tuple[str | None, str]:
    """Why a record is refused: a code, and what there is to say about it."""
    header = record.header
    if header.policy != sender:
      return 'sender', f'that says it is of {header.policy!r:.50}'
    if header.round != round:
      return 'round', f'of round {header.round} in round {round}'
    fault = records.fault(record)
    if fault:
      return fault, ''
    peer = self.peers[sender]
    if header.run != peer.run:
      return 'run', f'of run {header.run!r:.50}, where it is {peer.run!r}'
    if header.tokenizer != peer.tokenizer:
      return 'tokenizer', (
        f'{header.tokenizer!r:.50}, where its tokenizer is {peer.tokenizer!r}'
      )
    if isinstance(record, records.Rollout) and (
      record.ids.max(initial=0) >= peer.vocab_size
    ):
      return 'vocabulary', f'id {record.ids.max()} of {peer.vocab_size}'
    if records.size(record) > self.limits.bytes:
      return 'size', f'of {records.size(record):,} bytes'
    return None, ''

  def collect(self, round: int, kinds: Collection[str]) -> list[records.Record]:
    """Takes the records of these kinds; see `exchange.Endpoint.collect`."""
    self._drop_stale(round - self.limits.max_staleness)
    if kinds:
      self._wait_for_peers(round)
    with self._changed:
      taken = [
        record
        for record in self._waiting.values()
        if record.header.round <= round and records.kind(record) in kinds
      ]
      for record in taken:
        self._remove(record, 'used')
      self._changed.notify_all()
    return sorted(taken, key=_order)

  def _drop_stale(self, oldest):
    """Makes room for what is waited for."""
    with self._changed:
      self._oldest = oldest
      for record in list(self._waiting.values()):
        if record.header.round < oldest:
          self._remove(record, 'stale')
      self._gone = {i: r for i, r in self._gone.items() if r >= oldest}
      self._changed.notify_all()

  def _wait_for_peers(self, round):
    began = time.monotonic()
    waited_for = set()
    with self._changed:
      self._reached = {}
    while True:
      for source in self.sources:
        source.fetch(round)
      with self._changed:
        now = time.monotonic()
        patience = self._patience(round, began)
        for peer in waited_for - patience.keys():
          self.ledger.waited[peer] += now - began
        waited_for = patience.keys()
        if not patience:
          return
        self._changed.wait(
          min(
            min(patience.values()) - now, _POLL_S if self.sources else math.inf
          )
        )

  def _patience(self, round, began) -> dict[str, float]:
    """The peers that are still waited for, and until when."""
    patience = {}
    for peer, last in self._heard.items():
      if last >= round or peer in self._away:
        continue
      until = max(began, self._spoke.get(peer, began)) + self.limits.wait_s
      if time.monotonic() < until:
        patience[peer] = until
      else:
        self._away.add(peer)
        logging.warning(
          'round %d: %s heard nothing from %s in %g s and goes on without',
          round,
          self.policy,
          peer,
          self.limits.wait_s,
        )
    return patience

  def _hear(self, sender, round):
    """A peer that goes on, if only to catch up, is waited for."""
    self._away.discard(sender)
    self._heard[sender] = max(round - 1, self._heard[sender])
    if round > self._reached.get(sender, -1):
      self._reached[sender] = round
      self._spoke[sender] = time.monotonic()

  def _fits(self, count, size):
    return (
      len(self._waiting) + count <= self.limits.records
      and self._bytes + size <= self.limits.bytes
    )

  def _remove(self, record, fate):
    identity = records.identity(record)
    del self._waiting[identity]
    self._bytes -= records.size(record)
    self._held[record.header.policy] -= records.size(record)
    self._gone[identity] = record.header.round
    if len(self._gone) > _REMEMBERED * self.limits.records:
      del self._gone[next(iter(self._gone))]
    self.ledger.add(record.header.policy, records.kind(record), fate)

  def state(self) -> bytes:
    """What waits, what is known of peers, and the ledger."""
    with self._changed:
      return msgspec.msgpack.encode(
        [
          [wire.encode(record) for record in self._waiting.values()],
          [*self._gone.items()],
          self._messages,
          self._oldest,
          self._heard,
          self.ledger.state(),
        ]
      )

  def restore(self, state: bytes) -> None:
    """Puts back what `state` gave."""
    with self._changed:
      waiting, gone, self._messages, self._oldest, heard, books = (
        msgspec.msgpack.decode(state)
      )
      self._heard |= {p: r for p, r in heard.items() if p in self.peers}
      decoded = [wire.decode(data) for data in waiting]
      self._waiting = {records.identity(r): r for r in decoded}
      self._bytes = sum(map(records.size, decoded))
      self._held = collections.Counter()
      for record in decoded:
        self._held[record.header.policy] += records.size(record)
      self._gone = {tuple(identity): round for identity, round in gone}
      self.ledger.restore(books)


def _order(record):
  h = record.header
  return (h.policy, h.round, h.prompt, h.sample, records.kind(record))
