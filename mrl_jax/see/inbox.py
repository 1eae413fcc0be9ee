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
_UNBOUNDED = 2**62


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """Bounds of what is kept of each peer, and of the time spent waiting."""

  records: int  # The most of a peer that wait in a queue.
  bytes: int  # The same, as `records.size` counts them.
  max_staleness: int  # The largest age of a collected record, in rounds.
  # Seconds that a publisher waits for room in a full queue, before the peer's
  # oldest records are evicted.
  block_s: float
  wait_s: float  # Seconds that a peer may be silent before nobody waits for it.
  rounds: int = _UNBOUNDED  # Of the run.
  max_ahead: int = _UNBOUNDED  # Rounds between a receiver and a message.
  spool_bytes: int = _UNBOUNDED  # The most of a peer that is kept on disk.


class Peer(NamedTuple):
  """What the records of a peer must agree with."""

  tokenizer: str  # Fingerprint of the peer's tokenizer.
  vocab_size: int
  run: str  # Fingerprint of the peer's run.
  samples: int = 0  # Rollouts of each prompt; 0 if that is not known.
  # The least and the largest reward that the peer's config allows.
  rewards: tuple[float, float] = (-records.LARGEST, records.LARGEST)
  round_records: int = _UNBOUNDED  # The most that it publishes in a round.
  round_bytes: int = _UNBOUNDED  # The same, as `records.size` counts them.


@dataclasses.dataclass
class _Round:
  """What a peer published of one round, by (prompt, sample, kind)."""

  # All keys, also those of records that left the queue. In a dict, because
  # the order must be the same in every process.
  seen: dict[tuple, None] = dataclasses.field(default_factory=dict)
  seen_bytes: int = 0
  waiting: dict[tuple, records.Record] = dataclasses.field(default_factory=dict)
  waiting_bytes: int = 0


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
    # By policy and round; a restored queue may have records of former peers.
    self._rounds = collections.defaultdict(
      lambda: collections.defaultdict(_Round)
    )
    self.round = 0  # The round that `collect` was last called with.
    # To a run that resumes from the last checkpoint, records of earlier rounds
    # are stale.
    self._resumes = 0
    # Records up to this round are being collected, and need no room.
    self._collecting = -1
    self._silent = set()  # Peers that are not waited for until they send.
    # The highest round that each peer sent since the last wait began, and when.
    self._reached = dict.fromkeys(self.peers, (-1, 0.0))

  def deliver(
    self,
    sender: str,
    round: int,
    published: Sequence[records.Record | bytes | msgspec.Raw],
    kinds: Collection[str] = records.KINDS,
    **options,
  ) -> None:
    """Judges records of a peer, then adds those that are sound."""
    sound = self.judge(sender, round, published, kinds)
    self.add(sender, round, sound, **options)

  def judge(
    self,
    sender: str,
    round: int,
    published: Sequence[records.Record | bytes | msgspec.Raw],
    kinds: Collection[str] = records.KINDS,
  ) -> list[records.Record]:
    """Returns the sound records, decoded; counts why it refuses others.

    All must be of `round`. Records of other kinds than `kinds` are skipped, as
    they are not meant for this policy.
    """
    sound = []
    for item in published:
      try:
        is_encoded = isinstance(item, bytes | msgspec.Raw)
        record = wire.decode(item) if is_encoded else item
      except msgspec.DecodeError as error:
        self.refuse(sender, 'unknown', 'undecodable', str(error))
        continue
      kind = records.kind(record)
      if kind not in kinds:
        continue
      if reason := self._fault(sender, round, record):
        expected = f'round {round} and {self.peers[sender]}'
        what = f'{record.header!r:.300}, expected {expected}'
        self.refuse(sender, kind, reason, what)
      else:
        sound.append(record)
    return sound

  def add(
    self,
    sender: str,
    round: int,
    sound: Sequence[records.Record],
    last: bool = True,
    may_block: bool = True,
    message: str = '',
  ) -> None:
    """Puts a peer's records of `round` into the queue, or counts why not.

    They end the round if they are the `last`. As a peer sends its rounds in
    order, they show that it has finished the earlier ones. Without records only
    the next round can end: a peer's round moves as far as its records.

    `may_block` waits for room in a full queue. It is False for a source, as the
    thread that fetches from it is the one that would make room. `message` names
    what held the records, for `messages`.
    """
    deadline = time.monotonic() + (self.limits.block_s if may_block else 0)
    with self._changed:
      counts = self._counts(sender, round, sound)
      if counts:
        if round > self.finished[sender]:  # Repeating itself is no progress.
          self._silent.discard(sender)
        if self.finished[sender] < round - 1:
          logging.warning(
            f'{self.policy} has nothing of {sender} for rounds '
            f'{self.finished[sender] + 1} to {round - 1}'
          )
        self._finish(sender, round - 1)
        if round > self._reached[sender][0]:
          self._reached[sender] = round, time.monotonic()
      for record in sound:
        self._admit(sender, record, deadline)
      if counts and last:
        self._finish(sender, round)
      if message:
        self.messages[message] = round
      self._changed.notify_all()

  def wants(
    self, sender: str, round: int, sound: Sequence[records.Record], last: bool
  ) -> bool:
    """Whether `add` would queue any of the records or end a round.

    It might also do so after a restart, if the round is stale by now.
    """
    with self._changed:
      if self._resumes <= round < self._oldest:
        return bool(sound)
      ends = last and self.finished[sender] < round
      return (ends and self._counts(sender, round, sound)) or not all(
        self._settled_fate(record, records.size(record)) for record in sound
      )

  def is_ahead(self, round: int) -> bool:
    """Whether a round is further ahead than a peer may be."""
    return round > self.round + self.limits.max_ahead

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
      self._resumes = before

  def end(self, peer: str) -> None:
    """Stops waiting for a peer that will publish no more."""
    with self._changed:
      self._silent.add(peer)
      self._changed.notify_all()

  def collect(self, round: int, kinds: Collection[str]) -> list[records.Record]:
    """Takes records of these kinds; see `exchange.Endpoint.collect`."""
    with self._changed:
      self.round = self._collecting = round
      for rounds in self._rounds.values():
        for stale in [n for n in rounds if n < self._oldest]:
          self._remove('stale', [*rounds[stale].waiting.values()])
          del rounds[stale]
      self._changed.notify_all()  # There is room for the records to come.
    try:
      if kinds:
        self._wait_for_peers(round)
      with self._changed:
        collected = [
          record
          for record in self._waiting()
          if record.header.round <= round and records.kind(record) in kinds
        ]
        self._remove('used', collected)
    finally:
      self._collecting = -1
    return sorted(collected, key=_order)

  def state(self) -> bytes:
    """Returns the queue, what is known of the past and the ledger."""
    with self._changed:
      return msgspec.msgpack.encode(
        [
          [
            [policy, n, round.seen_bytes, [*round.seen]]
            for policy, rounds in self._rounds.items()
            for n, round in rounds.items()
          ],
          [wire.encode(record) for record in self._waiting()],
          self.messages,
          self.round,
          self.finished,
          self.ledger.state(),
        ]
      )

  def restore(self, state: bytes) -> None:
    """Restores what `state` returned."""
    with self._changed:
      seen, waiting, self.messages, self.round, finished, ledger = (
        msgspec.msgpack.decode(state)
      )
      self._resumes = self._oldest
      self.finished |= {p: r for p, r in finished.items() if p in self.peers}
      self._rounds.clear()
      for policy, n, size, keys in seen:
        self._rounds[policy][n] = _Round(
          dict.fromkeys(map(tuple, keys)), seen_bytes=size
        )
      for record in map(wire.decode, waiting):
        self._queue(record)
      self.ledger.restore(ledger)

  @property
  def _oldest(self):
    """Records of earlier rounds are stale."""
    return self.round - self.limits.max_staleness

  def _waiting(self):
    for rounds in self._rounds.values():
      for round in rounds.values():
        yield from round.waiting.values()

  def _admit(self, sender, record, deadline):
    """Queues a record, after a wait for room and evictions if need be."""
    kind, size = records.kind(record), records.size(record)
    self._changed.wait_for(
      lambda: self._settled_fate(record, size) or self._has_room(record, size),
      deadline - time.monotonic(),
    )
    # Asked again: another copy may have come while this one waited for room.
    fate = self._settled_fate(record, size)
    if fate == 'refused':
      peer = self.peers[sender]
      most = f'{peer.round_records} records, {peer.round_bytes} bytes a round'
      self.refuse(sender, kind, 'quota', f'more than {most}')
      return
    self.ledger.add(sender, kind, 'published', bytes=size)
    if fate:
      self.ledger.add(sender, kind, fate)
      return
    round = self._rounds[sender][record.header.round]
    round.seen[_key(record)] = None
    round.seen_bytes += size
    self._queue(record)
    while not self._has_room(record):
      ahead = self._ahead(sender)
      oldest = ahead[min(n for n, round in ahead.items() if round.waiting)]
      self._remove('evicted', [next(iter(oldest.waiting.values()))])

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
    if fault := records.misfit(record, peer.samples, peer.rewards):
      return fault
    if isinstance(record, records.Rollout) and (
      record.ids.max(initial=0) >= peer.vocab_size
    ):
      return 'vocabulary'
    return 'size' if records.size(record) > self.limits.bytes else None

  def _settled_fate(self, record, size) -> str | None:
    """The fate of a record that need not be queued, or None."""
    header = record.header
    if header.round < self._oldest:
      return 'stale'
    round = self._rounds[header.policy][header.round]
    if _key(record) in round.seen:
      return 'duplicate'
    peer = self.peers[header.policy]
    fits = (
      len(round.seen) < peer.round_records
      and round.seen_bytes + size <= peer.round_bytes
    )
    return None if fits else 'refused'

  def _counts(self, sender, round, sound):
    """Whether a message says how far its sender is."""
    return bool(sound) or round == self.finished[sender] + 1

  def _has_room(self, record, size=None):
    """Whether a record fits; without its size, whether the queue is too full."""
    if record.header.round <= self._collecting:
      return True
    ahead = self._ahead(record.header.policy).values()
    count = sum(len(round.waiting) for round in ahead)
    total = sum(round.waiting_bytes for round in ahead)
    return (
      count + (size is not None) <= self.limits.records
      and total + (size or 0) <= self.limits.bytes
    )

  def _ahead(self, policy):
    """A policy's rounds that are not being collected, of which there are few."""
    rounds = self._rounds[policy].items()
    return {n: round for n, round in rounds if n > self._collecting}

  def _queue(self, record):
    round = self._rounds[record.header.policy][record.header.round]
    round.waiting[_key(record)] = record
    round.waiting_bytes += records.size(record)

  def _remove(self, fate, removed):
    for record in removed:
      header = record.header
      round = self._rounds[header.policy][header.round]
      del round.waiting[_key(record)]
      round.waiting_bytes -= records.size(record)
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


def _key(record):
  """What identifies a record in its policy's round."""
  return (record.header.prompt, record.header.sample, records.kind(record))
