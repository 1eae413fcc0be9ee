"""A policy's bounded queue, in memory, of the records that peers publish."""

import collections
from collections.abc import Callable, Collection, Mapping, Sequence
import dataclasses
import math
import threading
import time
from typing import NamedTuple

from absl import logging
import msgspec

from mrl_jax import records
from mrl_jax.see import ledger as ledger_lib
from mrl_jax.see import wire

_POLL_S = 0.05  # Seconds between calls of sources, which cannot notify.
_REMEMBERED = 4  # Identities of removed records, as a multiple of the capacity.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """Bounds of a queue, and of the time that is spent waiting for it."""

  records: int  # The most in a queue.
  bytes: int  # The most in a queue, as `records.size` counts them.
  max_staleness: int  # The largest age of a collected record, in rounds.
  # Seconds that a publisher waits for room in a full queue, before the oldest
  # records are evicted.
  block_s: float
  wait_s: float  # Seconds that a peer may be silent before nobody waits for it.


class Peer(NamedTuple):
  """What the records of a peer must agree with."""

  tokenizer: str  # Fingerprint of the peer's tokenizer.
  vocab_size: int
  run: str  # Fingerprint of the peer's run.


class Inbox:
  """A queue that several threads fill and one thread empties.

  One condition variable guards all its state. It is notified when there are
  more records or more room.
  """

  def __init__(self, policy: str, peers: Mapping[str, Peer], limits: Limits):
    """Builds the queue of `policy`, which `peers` may fill."""
    self.policy, self.peers, self.limits = policy, dict(peers), limits
    self.ledger = ledger_lib.Ledger()
    # Functions that `collect` calls with its round; each delivers what is
    # stored up to that round, on disk say, and does not wait for more.
    self.sources: list[Callable[[int], None]] = []
    self.messages = {}  # {name: round} of the messages that were delivered.
    # The last round that each peer has finished; -1 if there is none.
    self.finished = dict.fromkeys(self.peers, -1)
    self._changed = threading.Condition()
    self._waiting = {}  # Records by identity, in the order of arrival.
    self._bytes = collections.Counter()  # Of the waiting records, by peer.
    self._removed = {}  # {identity: round} of the records that left the queue.
    self._oldest = 0  # Records of earlier rounds are stale.
    self._silent = set()  # Peers that are not waited for until they send.
    # The highest round that each peer sent since the last wait began, and when.
    self._reached = dict.fromkeys(self.peers, (-1, 0.0))

  def deliver(
    self,
    sender: str,
    round: int,
    published: Sequence[records.Record | bytes | msgspec.Raw],
    kinds: Collection[str] = records.KINDS,
    last: bool = True,
    may_block: bool = True,
    message: str = '',
  ) -> None:
    """Puts records of a peer into the queue, or counts why it does not.

    Encoded records are decoded first. Records of other kinds than `kinds` are
    skipped, as they are not meant for this policy.

    All are of `round`, which they end if they are the `last`; the peer has
    finished all earlier rounds. `may_block` waits for room in a full queue. It
    is False for a source, as the thread that fetches from it is the one that
    would make room. `message` names what held the records, for `messages`.
    """
    decoded = []
    for item in published:
      try:
        is_encoded = isinstance(item, bytes | msgspec.Raw)
        decoded.append(wire.decode(item) if is_encoded else item)
      except msgspec.DecodeError as error:
        self.refuse(sender, 'unknown', 'undecodable', str(error))
    deadline = time.monotonic() + (self.limits.block_s if may_block else 0)
    with self._changed:
      self._silent.discard(sender)
      self._finish(sender, round - 1)
      if round > self._reached[sender][0]:
        self._reached[sender] = round, time.monotonic()
      for record in decoded:
        if records.kind(record) in kinds:
          self._admit(sender, round, record, deadline)
      if last:
        self._finish(sender, round)
      if message:
        self.messages[message] = round
      self._changed.notify_all()

  def refuse(self, sender: str, kind: str, reason: str, details: str = ''):
    """Counts a record of a peer as published and refused."""
    log = f'{self.policy} refused a {kind} of {sender}: {reason} {details}'
    with self._changed:
      self.ledger.add(sender, kind, 'published')
      self.ledger.add(sender, kind, 'refused', reason=reason, log=log)

  def forget_messages(self, before: int) -> None:
    """Forgets the names of messages of rounds below `before`."""
    with self._changed:
      self.messages = {m: r for m, r in self.messages.items() if r >= before}

  def end(self, peer: str) -> None:
    """Stops waiting for a peer that will publish no more."""
    with self._changed:
      self._silent.add(peer)
      self._changed.notify_all()

  def collect(self, round: int, kinds: Collection[str]) -> list[records.Record]:
    """Takes records of these kinds; see `exchange.Endpoint.collect`."""
    with self._changed:
      oldest = self._oldest = round - self.limits.max_staleness
      stale = [r for r in self._waiting.values() if r.header.round < oldest]
      self._remove('stale', stale)  # Makes room for the records to come.
      self._removed = {i: r for i, r in self._removed.items() if r >= oldest}
    if kinds:
      self._wait_for_peers(round)
    with self._changed:
      collected = [
        record
        for record in self._waiting.values()
        if record.header.round <= round and records.kind(record) in kinds
      ]
      self._remove('used', collected)
    return sorted(collected, key=_order)

  def state(self) -> bytes:
    """Returns the queue, what is known of the past and the ledger."""
    with self._changed:
      return msgspec.msgpack.encode(
        [
          [wire.encode(record) for record in self._waiting.values()],
          [*self._removed.items()],
          self.messages,
          self._oldest,
          self.finished,
          self.ledger.state(),
        ]
      )

  def restore(self, state: bytes) -> None:
    """Restores what `state` returned."""
    with self._changed:
      waiting, removed, self.messages, self._oldest, finished, ledger = (
        msgspec.msgpack.decode(state)
      )
      self.finished |= {p: r for p, r in finished.items() if p in self.peers}
      self._waiting, self._bytes = {}, collections.Counter()
      for record in map(wire.decode, waiting):
        self._add(record)
      self._removed = {tuple(identity): round for identity, round in removed}
      self.ledger.restore(ledger)

  def _admit(self, sender, round, record, deadline):
    """Queues a record, after a wait for room and evictions if need be."""
    kind = records.kind(record)
    if reason := self._fault(sender, round, record):
      expected = f'round {round} and {self.peers[sender]}'
      what = f'{record.header!r:.300}, expected {expected}'
      self.refuse(sender, kind, reason, what)
      return
    identity, size = records.identity(record), records.size(record)
    self._changed.wait_for(
      lambda: self._settled_fate(identity, round) or self._has_room(1, size),
      deadline - time.monotonic(),
    )
    self.ledger.add(sender, kind, 'published', bytes=size)
    # Asked again: another copy may have come while this one waited for room.
    if fate := self._settled_fate(identity, round):
      self.ledger.add(sender, kind, fate)
      return
    self._add(record)
    while not self._has_room(0, 0):
      # The oldest record of the peer that fills most of the queue.
      largest = max(self._bytes, key=self._bytes.get)
      oldest = min(
        (r for r in self._waiting.values() if r.header.policy == largest),
        key=lambda record: record.header.round,
      )
      self._remove('evicted', [oldest])

  def _fault(self, sender, round, record) -> str | None:
    """Returns why a record is refused; None if it is not."""
    header, peer = record.header, self.peers[sender]
    if header.policy != sender:
      return 'sender'
    if header.round != round:
      return 'round'
    if fault := records.fault(record):
      return fault
    for name in ('run', 'tokenizer'):
      if getattr(header, name) != getattr(peer, name):
        return name
    if isinstance(record, records.Rollout) and (
      record.ids.max(initial=0) >= peer.vocab_size
    ):
      return 'vocabulary'
    return 'size' if records.size(record) > self.limits.bytes else None

  def _settled_fate(self, identity, round) -> str | None:
    """The fate of a record that need not be queued, or None."""
    if identity in self._waiting or identity in self._removed:
      return 'duplicate'
    return 'stale' if round < self._oldest else None

  def _has_room(self, count, size):
    return (
      len(self._waiting) + count <= self.limits.records
      and self._bytes.total() + size <= self.limits.bytes
    )

  def _add(self, record):
    self._waiting[records.identity(record)] = record
    self._bytes[record.header.policy] += records.size(record)

  def _remove(self, fate, removed):
    for record in removed:
      header, identity = record.header, records.identity(record)
      del self._waiting[identity]
      self._bytes[header.policy] -= records.size(record)
      self._removed[identity] = header.round
      if len(self._removed) > _REMEMBERED * self.limits.records:
        del self._removed[next(iter(self._removed))]
      self.ledger.add(header.policy, records.kind(record), fate)
    self._changed.notify_all()

  def _finish(self, peer, round):
    self.finished[peer] = max(round, self.finished[peer])

  def _wait_for_peers(self, round):
    """Waits until each peer has finished `round` or was silent too long."""
    awaited, began = set(), time.monotonic()
    with self._changed:
      self._reached = dict.fromkeys(self.peers, (-1, began))
    while True:
      for fetch in self.sources:
        fetch(round)
      with self._changed:
        now = time.monotonic()
        deadlines = self._deadlines(round, now)
        for peer in awaited - deadlines.keys():
          self.ledger.waited[peer] += now - began
        awaited = {*deadlines}
        if not awaited:
          return
        poll_s = _POLL_S if self.sources else math.inf
        self._changed.wait(min(poll_s, min(deadlines.values()) - now))

  def _deadlines(self, round, now) -> dict[str, float]:
    """Returns until when to wait for each peer that has not finished `round`.

    A peer gets more time when it reaches a higher round, be it only to catch
    up, and none when it repeats rounds. Whose time is over becomes silent.
    """
    deadlines = {}
    for peer, last in self.finished.items():
      if last >= round or peer in self._silent:
        continue
      deadline = self._reached[peer][1] + self.limits.wait_s
      if now < deadline:
        deadlines[peer] = deadline
        continue
      self._silent.add(peer)
      logging.warning(
        f'round {round}: {self.policy} heard nothing from {peer} in '
        f'{self.limits.wait_s:g} s and goes on without'
      )
    return deadlines


def _order(record):
  h = record.header
  return (h.policy, h.round, h.prompt, h.sample, records.kind(record))
