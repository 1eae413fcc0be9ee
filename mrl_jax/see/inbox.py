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
_WARNINGS = 3  # Log lines for each peer and reason of refusal.
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
    self._changed = threading.Condition()
    self._waiting = {}  # Records by identity, in the order of arrival.
    self._bytes = collections.Counter()  # Of the waiting records, by peer.
    self._removed = {}  # {identity: round} of the records that left the queue.
    self._messages = {}  # {name: round} of the messages that were delivered.
    self._oldest = 0  # Records of earlier rounds are stale.
    self._finished = dict.fromkeys(self.peers, -1)  # Each peer's last round.
    self._silent = set()  # Peers that are not waited for until they send.
    # {peer: (highest round that it sent since the last wait began, when)}.
    self._reached = {}

  def deliver(
    self,
    sender: str,
    round: int,
    published: Sequence[records.Record],
    last: bool = True,
    may_block: bool = True,
    message: str = '',
  ) -> None:
    """Puts records of a peer into the queue, or counts why it does not.

    All are of `round`, which they end if they are the `last`; the peer has
    finished all earlier rounds. `may_block` waits for room in a full queue. It
    is False for a source, as the thread that fetches from it is the one that
    would make room. `message` names what held the records, for `has_message`.
    """
    deadline = time.monotonic() + (self.limits.block_s if may_block else 0)
    with self._changed:
      self._silent.discard(sender)
      self._finish(sender, round - 1)
      if round > self._reached.get(sender, (-1, 0))[0]:
        self._reached[sender] = round, time.monotonic()
      for record in published:
        self._admit(sender, round, record, deadline)
      if last:
        self._finish(sender, round)
      if message:
        self._messages[message] = round
      self._changed.notify_all()

  def deliver_encoded(
    self,
    sender: str,
    round: int,
    data: Sequence[bytes],
    kinds: Collection[str] = records.KINDS,
    **options,
  ) -> None:
    """Decodes records and delivers them; `options` are those of `deliver`.

    Bytes that are not a record are refused. Records of other kinds than `kinds`
    are skipped, as they are not meant for this policy.
    """
    decoded = []
    for item in data:
      try:
        decoded.append(wire.decode(item))
      except msgspec.DecodeError as error:
        self.refuse(sender, 'unknown', 'undecodable', str(error))
    shared = [record for record in decoded if records.kind(record) in kinds]
    self.deliver(sender, round, shared, **options)

  def refuse(self, sender: str, kind: str, reason: str, details: str = ''):
    """Counts a refused record; logs the first few for each reason."""
    with self._changed:
      self.ledger.add(sender, kind, 'published')
      self.ledger.add(sender, kind, 'refused', reason=reason)
      count = self.ledger.refusals()[sender][reason]
    if count <= _WARNINGS:
      logging.warning(
        f'{self.policy} refused a {kind} of {sender}: {reason} {details}'
      )

  def has_message(self, name: str) -> bool:
    """Whether a message of this name was delivered."""
    return name in self._messages

  def forget_messages(self, before: int) -> None:
    """Forgets the names of messages of rounds below `before`."""
    with self._changed:
      self._messages = {m: r for m, r in self._messages.items() if r >= before}

  def last_round(self, peer: str) -> int:
    """Returns the last round that a peer has finished; -1 if there is none."""
    return self._finished[peer]

  def end(self, peer: str) -> None:
    """Stops waiting for a peer that will publish no more."""
    with self._changed:
      self._silent.add(peer)
      self._changed.notify_all()

  def collect(self, round: int, kinds: Collection[str]) -> list[records.Record]:
    """Takes records of these kinds; see `exchange.Endpoint.collect`."""
    with self._changed:
      oldest = self._oldest = round - self.limits.max_staleness
      # This makes room for the records to come.
      self._remove(
        'stale', [r for r in self._waiting.values() if r.header.round < oldest]
      )
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
          self._messages,
          self._oldest,
          self._finished,
          self.ledger.state(),
        ]
      )

  def restore(self, state: bytes) -> None:
    """Restores what `state` returned."""
    with self._changed:
      waiting, removed, self._messages, self._oldest, finished, ledger = (
        msgspec.msgpack.decode(state)
      )
      self._finished |= {p: r for p, r in finished.items() if p in self.peers}
      self._waiting, self._bytes = {}, collections.Counter()
      for record in map(wire.decode, waiting):
        self._add(record)
      self._removed = {tuple(identity): round for identity, round in removed}
      self.ledger.restore(ledger)

  def _admit(self, sender, round, record, deadline):
    """Queues a record, after a wait for room and evictions if need be."""
    kind = records.kind(record)
    if fault := self._fault(sender, round, record):
      self.refuse(sender, kind, *fault)
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

  def _fault(self, sender, round, record) -> tuple[str, str] | None:
    """Returns why a record is refused and details for the log, or None."""
    header, peer = record.header, self.peers[sender]
    if header.policy != sender:
      return 'sender', f'that says it is of {header.policy!r:.50}'
    if header.round != round:
      return 'round', f'of round {header.round} in round {round}'
    if fault := records.fault(record):
      return fault, ''
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
    return None

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
    self._finished[peer] = max(round, self._finished[peer])

  def _wait_for_peers(self, round):
    """Waits until each peer has finished `round` or was silent too long."""
    awaited, began = set(), time.monotonic()
    with self._changed:
      self._reached = {}
    while True:
      for fetch in self.sources:
        fetch(round)
      with self._changed:
        now = time.monotonic()
        deadlines = self._deadlines(round, began, now)
        for peer in awaited - deadlines.keys():
          self.ledger.waited[peer] += now - began
        awaited = {*deadlines}
        if not awaited:
          return
        poll_s = _POLL_S if self.sources else math.inf
        self._changed.wait(min(poll_s, min(deadlines.values()) - now))

  def _deadlines(self, round, began, now) -> dict[str, float]:
    """Returns until when to wait for each peer that has not finished `round`.

    A peer gets more time when it reaches a higher round, be it only to catch
    up, and none when it repeats rounds. Whose time is over becomes silent.
    """
    deadlines = {}
    for peer, last in self._finished.items():
      if last >= round or peer in self._silent:
        continue
      _, heard_s = self._reached.get(peer, (-1, began))
      if now < heard_s + self.limits.wait_s:
        deadlines[peer] = heard_s + self.limits.wait_s
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
