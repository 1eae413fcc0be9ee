"""The exchange between processes and hosts: gRPC, acknowledged and bounded.

A message is a msgpack struct of records, so that no code is generated and none
is run. The receiver keeps it on disk, puts its records into the queue of the
policy it is for, and acknowledges it; a full queue delays that. Until then the
sender keeps it, and sends it again. Whatever comes in is taken for a lie until
it has been checked.
"""

import collections
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent import futures
import re
import threading
from typing import Annotated

from absl import logging
import grpc
import msgspec

from mrl_jax import checks
from mrl_jax import records
from mrl_jax.see import inbox as inbox_lib
from mrl_jax.see import ledger as ledger_lib
from mrl_jax.see import security as security_lib
from mrl_jax.see import spool as spool_lib
from mrl_jax.see import wire

_SERVICE, _METHOD = 'mrl_jax.see.Exchange', 'Publish'
_ANSWER_S = 20.0  # How long an answer may take beside the wait for room.
_GRACE_S = 1.0  # How long messages that are being taken may hold up the end.
_RETRY_S = (0.1, 5.0)  # The first and the longest pause between attempts.
_OVERHEAD = 4096  # Bytes of a message beside its records, at most.
_MOST = 4096  # Records of a message.
_WARNINGS = 3  # Of messages that are refused for the same reason.
_REASONS = ('undecodable', 'run', 'peer')  # Why a server refuses a message.
# Answers that will be the same next time.
_LASTING = {
  grpc.StatusCode.INVALID_ARGUMENT,
  grpc.StatusCode.FAILED_PRECONDITION,
  grpc.StatusCode.UNIMPLEMENTED,
}
_Name = Annotated[str, msgspec.Meta(max_length=records.MAX_NAME)]


class Message(
  msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
  """Records of a policy's round for one peer; `last` ends the round."""

  run: _Name
  sender: _Name
  receiver: _Name
  round: records.Count
  last: bool
  records: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=_MOST)]


class Refused(Exception):
  """Says why a message is not taken: 'reason: more about it'."""


class Busy(Exception):
  """Says that a message is not taken now."""


class Server:
  """Takes what other processes publish for the policies of this one.

  Attributes:
    refused: messages that were not taken, by reason. What is in them is not
      known, so that no policy's ledger can have it.
  """

  def __init__(
    self,
    address: str,
    inboxes: Mapping[str, inbox_lib.Inbox],
    *,
    senders: Collection[str],
    run: str,
    security: security_lib.Security,
    max_bytes: int,
    spool: spool_lib.Spool,
  ):
    """Binds `address`; nobody is answered before `start`.

    Args:
      address: HOST:PORT.
      inboxes: of the policies of this process; each knows whom it listens to.
      senders: the policies of other processes.
      run: messages of other runs are refused.
      security: who may connect.
      max_bytes: of a message.
      spool: where messages are kept until a checkpoint has them.

    Raises:
      InputError: the address cannot be used.
    """
    security.check(address)
    credentials = security.of_server()
    self.refused = collections.Counter()
    self._inboxes, self._run, self._spool = inboxes, run, spool
    self._lock = threading.Lock()
    # Each sender delivers one message at a time to each policy, so that they
    # stay in order and nobody's full queue takes all threads.
    self._ways = {
      (sender, name): threading.Lock() for sender in senders for name in inboxes
    }
    threads = 2 * len(self._ways)
    self._pool = futures.ThreadPoolExecutor(threads, thread_name_prefix='see')
    self._server = grpc.server(
      self._pool,
      handlers=[
        grpc.method_handlers_generic_handler(
          _SERVICE, {_METHOD: grpc.unary_unary_rpc_method_handler(self._answer)}
        )
      ],
      options=[
        ('grpc.max_receive_message_length', max_bytes + _OVERHEAD),
        # None but identity: what is compressed may be of any size.
        ('grpc.compression_enabled_algorithms_bitset', 1),
        ('grpc.so_reuseport', 0),
      ],
      maximum_concurrent_rpcs=threads,
    )
    # Of two interfaces called localhost gRPC is content with one, although the
    # other may be somebody else's.
    bound = re.sub('^localhost:', '127.0.0.1:', address)
    try:
      if credentials:
        self._server.add_secure_port(bound, credentials)
      else:
        self._server.add_insecure_port(bound)
    except RuntimeError as error:
      raise checks.InputError(
        f'see.listen={address} cannot be listened on, because another process '
        f'does or because it is not an address of this machine: {error}'
      ) from error

  def start(self) -> None:
    """Begins to answer; what was acknowledged before is fetched by round."""
    for inbox in self._inboxes.values():
      inbox.sources.append(self)
    self._server.start()

  def fetch(self, round: int) -> None:
    """Takes in what was acknowledged before this process, as a source does.

    All at once, it could be more than a queue holds.
    """
    for name, data in self._spool.kept(round):
      try:
        message = self._open(data)
      except Refused as refused:
        logging.warning('%s is left on disk: %s', name, refused)
        continue
      if not self._inboxes[message.receiver].has_taken(name):
        self._deliver(message, name, waits=False)

  def close(self) -> None:
    self._server.stop(grace=_GRACE_S).wait()
    self._pool.shutdown(wait=False)

  def take(self, data: bytes) -> None:
    """Takes a message in, for good.

    Raises:
      Refused: it never will be taken.
      Busy: its sender is not yet done with another.
    """
    message = self._open(data)
    way = self._ways[message.sender, message.receiver]
    if not way.acquire(blocking=False):
      raise Busy(f'another message of {message.sender} is being taken')
    try:
      self._deliver(message, self._spool.add(message.round, data))
    finally:
      way.release()

  def _answer(self, data: bytes, context: grpc.ServicerContext) -> bytes:
    try:
      self.take(data)
    except Refused as refused:
      context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(refused))
    except Busy as busy:
      context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(busy))
    return b''

  def _open(self, data) -> Message:
    try:
      message = wire.strictly(_DECODER, data)
    except msgspec.DecodeError as error:
      raise self._refusal('undecodable', str(error)) from error
    if message.run != self._run:
      raise self._refusal(
        'run',
        f'of run {message.run!r:.50}, this is {self._run!r}: both must have the '
        'same config, but for see and mwra',
      )
    way = message.sender, message.receiver
    if way not in self._ways or not self._is_heard(*way):
      raise self._refusal(
        'peer', f'{message.sender!r:.50} to {message.receiver!r:.50}'
      )
    return message

  def _is_heard(self, sender, receiver) -> bool:
    return sender in self._inboxes[receiver].peers

  def _deliver(self, message, name, waits=True):
    inbox = self._inboxes[message.receiver]
    inbox.deliver_encoded(
      message.sender, message.round, message.records, message.last, waits=waits
    )
    inbox.note_taken(name, message.round)

  def _refusal(self, reason, why) -> Refused:
    with self._lock:
      self.refused[reason] += 1
      so_often = self.refused[reason]
    if so_often <= _WARNINGS:
      logging.warning('refused a message: %s: %s', reason, why)
    return Refused(f'{reason}: {why}')


class Parcel(msgspec.Struct, frozen=True):
  """A message, and how many records of each kind it has."""

  data: bytes
  counts: dict[str, int]


class Outlet:
  """The way to a policy of another process; see `exchange.Outlet`.

  A thread sends what is queued, in order, each message until it is
  acknowledged.
  """

  def __init__(
    self,
    policy: str,
    peer: str,
    address: str,
    *,
    run: str,
    security: security_lib.Security,
    limits: inbox_lib.Limits,
    max_bytes: int,
  ):
    """From `policy` to `peer`, which listens on `address`.

    `limits` bound what is queued behind the message that is on its way, and
    `max_bytes` bounds a message.

    Raises:
      InputError: the address cannot be used.
    """
    security.check(address)
    credentials = security.of_client()
    self.ledger = ledger_lib.Ledger(ledger_lib.SENT)
    self._policy, self._peer, self._address = policy, peer, address
    self._run, self._limits, self._max_bytes = run, limits, max_bytes
    self._queue = collections.deque()
    self._records = self._bytes = 0  # In the queue.
    self._tried = self._reached = False  # Whether the last attempt succeeded.
    self._said = set()  # Refusals that are in the log.
    self._sending = None  # The call of the first message in the queue.
    self._closing = False
    self._changed = threading.Condition()
    options = [
      ('grpc.max_send_message_length', max_bytes + _OVERHEAD),
      ('grpc.initial_reconnect_backoff_ms', 100),
      ('grpc.max_reconnect_backoff_ms', 2000),
    ]
    self._channel = (
      grpc.secure_channel(address, credentials, options)
      if credentials
      else grpc.insecure_channel(address, options)
    )
    self._call = self._channel.unary_unary(f'/{_SERVICE}/{_METHOD}')
    self._thread = threading.Thread(
      target=self._run_queue, name=f'see-{policy}-{peer}', daemon=True
    )
    self._thread.start()

  def send(self, round: int, published: Sequence[records.Record]) -> None:
    for parcel in self._pack(round, published):
      self._put(parcel)

  def _pack(self, round, published) -> Iterator[Parcel]:
    """Messages within the limits; the last of them, maybe empty, says so."""
    items, counts, size = [], collections.Counter(), 0
    for record in published:
      kind, data = records.kind(record), b''
      fault = records.fault(record)
      if fault is None:
        data = wire.encode(record)
        fault = 'size' if len(data) > self._max_bytes else None
      self.ledger.add(self._peer, kind, 'published', bytes=len(data))
      if fault:
        self.ledger.add(self._peer, kind, 'refused', reason=fault)
        self._say(kind, fault, f'not sent to {self._where()}')
        continue
      if len(items) == _MOST or size + len(data) > self._max_bytes:
        yield self._parcel(round, items, counts, last=False)
        items, counts, size = [], collections.Counter(), 0
      items.append(msgspec.Raw(data))
      counts[kind] += 1
      size += len(data)
    yield self._parcel(round, items, counts, last=True)

  def _parcel(self, round, items, counts, last):
    message = Message(
      run=self._run,
      sender=self._policy,
      receiver=self._peer,
      round=round,
      last=last,
      records=items,
    )
    return Parcel(_ENCODER.encode(message), dict(counts))

  def _put(self, parcel):
    with self._changed:
      # A peer that cannot be reached makes no room, however long one waits.
      self._changed.wait_for(
        lambda: self._has_room(parcel) or not self._reached,
        self._limits.block_s,
      )
      # The first is on its way, and stays.
      while len(self._queue) > 1 and not self._has_room(parcel):
        self._remove(1, 'evicted')
      self._queue.append(parcel)
      self._records += sum(parcel.counts.values())
      self._bytes += len(parcel.data)
      self._changed.notify_all()

  def _has_room(self, parcel):
    return (
      self._records + sum(parcel.counts.values()) <= self._limits.records
      and self._bytes + len(parcel.data) <= self._limits.bytes
    )

  def _remove(self, place, fate, reason=''):
    parcel = self._queue[place]
    del self._queue[place]
    self._records -= sum(parcel.counts.values())
    self._bytes -= len(parcel.data)
    for kind, count in parcel.counts.items():
      self.ledger.add(self._peer, kind, fate, count, reason=reason)

  def _run_queue(self):
    pause = _RETRY_S[0]
    while True:
      with self._changed:
        self._changed.wait_for(lambda: self._queue or self._closing)
        if self._closing:
          return
        parcel = self._queue[0]
        # Begun under the lock, so that closing prevents or cancels it.
        self._sending = self._call.future(
          parcel.data, timeout=self._limits.block_s + _ANSWER_S
        )
      code, details = self._sending.code(), self._sending.details() or ''
      reason = _refusal(code, details)
      if code is grpc.StatusCode.OK:
        self._settle(parcel, 'acknowledged')
      elif reason:
        self._say('message', reason, f'by {self._where()}: {details!r:.300}')
        self._settle(parcel, 'refused', reason)
      else:
        self._lose(code, details)
        with self._changed:
          self._changed.wait_for(lambda: self._closing, pause)
        pause = min(2 * pause, _RETRY_S[1])
        continue
      pause = _RETRY_S[0]

  def _settle(self, parcel, fate, reason=''):
    with self._changed:
      # What was restored meanwhile is still to be sent.
      if self._queue and self._queue[0] is parcel:
        self._remove(0, fate, reason)
      if not self._reached:
        logging.info('%s reaches %s', self._policy, self._where())
      self._reached = True
      self._changed.notify_all()

  def _lose(self, code, details):
    with self._changed:
      if not self._closing and (self._reached or not self._tried):
        logging.warning(
          '%s cannot reach %s and will keep trying (is it up, with certificates '
          'of the same authority?): %s: %.300r',
          self._policy,
          self._where(),
          code.name,
          details,
        )
      self._reached, self._tried = False, True
      self._changed.notify_all()

  def _where(self):
    return f'{self._peer} at {self._address}'

  def _say(self, what, reason, more):
    """Once, that something is refused."""
    if (what, reason) not in self._said:
      self._said.add((what, reason))
      logging.warning(
        'a %s of %s is refused: %s, %s', what, self._policy, reason, more
      )

  def state(self) -> bytes:
    with self._changed:
      return _ENCODER.encode([list(self._queue), self.ledger.state()])

  def restore(self, state: bytes) -> None:
    parcels, books = msgspec.msgpack.decode(
      state, type=tuple[list[Parcel], list]
    )
    with self._changed:
      self._queue = collections.deque(parcels)
      self._records = sum(sum(parcel.counts.values()) for parcel in parcels)
      self._bytes = sum(len(parcel.data) for parcel in parcels)
      self.ledger.restore(books)
      self._changed.notify_all()

  def close(self) -> None:
    with self._changed:
      self._changed.wait_for(
        lambda: self._closing or not self._queue, self._limits.block_s
      )
      if self._queue and not self._closing:
        logging.warning(
          '%s did not take the last %d messages of %s',
          self._where(),
          len(self._queue),
          self._policy,
        )
      self._closing = True
      self._changed.notify_all()
      if self._sending:
        self._sending.cancel()
    self._thread.join()
    self._channel.close()


def _refusal(code, details) -> str:
  """Why a message is refused for good; '' where it may be taken next time."""
  if code is grpc.StatusCode.RESOURCE_EXHAUSTED and 'larger than' in details:
    return 'size'  # gRPC of the receiver says so.
  if code not in _LASTING:
    return ''
  reason = details.partition(':')[0]
  return reason if reason in _REASONS else code.name.lower()


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Message)
