"""The transport between processes and hosts: gRPC, acknowledged and bounded.

A message is a msgpack struct of encoded records, so that no code is generated
and none is run. The receiving process judges its records, writes the message to
disk if any is new, puts them into the inbox of the receiving policy, and only
then acknowledges it; a full inbox delays that. The sending process keeps a
message until it is acknowledged, and sends it again after every failure.

Whatever arrives is untrusted until it has been checked. A certificate speaks for
the policies that are its subject alternative names, on both sides. Answers to
others say nothing about the run.
"""

import collections
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent import futures
import functools
import re
import threading
from typing import Annotated, NoReturn

from absl import logging
import grpc
import msgspec

from mrl_jax import checks
from mrl_jax import records
from mrl_jax.see import inbox as inbox_lib
from mrl_jax.see import ledger as ledger_lib
from mrl_jax.see import security
from mrl_jax.see import spool as spool_lib
from mrl_jax.see import transport
from mrl_jax.see import wire

_SERVICE, _METHOD = 'mrl_jax.see.Exchange', 'Publish'
_ANSWER_S = 20.0  # Longest wait for an answer, beside the wait for room.
_GRACE_S = 1.0  # How long messages in delivery may delay the end.
_RETRY_S = (0.1, 5.0)  # First and longest pause between attempts.
_BUSY_S = 0.5  # Longest pause while the peer has no room.
_OVERHEAD = 4096  # Most bytes of a message beside its records.
_MOST = 4096  # Records of a message.
_PATIENCE_S = 0.1  # How long a message waits for another of its sender.
# Why a server refuses a message.
_REASONS = ('undecodable', 'certificate', 'run', 'peer', 'round')
# Answers that will be the same next time.
_FINAL = ('INVALID_ARGUMENT', 'FAILED_PRECONDITION', 'UNIMPLEMENTED')
_Name = Annotated[str, msgspec.Meta(max_length=records.MAX_NAME)]


class Message(
  msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
  """Encoded records of one policy's round for one peer; `last` ends the round.

  A round that exceeds the limits of a message is sent as several.
  """

  run: _Name
  sender: _Name
  receiver: _Name
  round: records.Count
  last: bool
  records: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=_MOST)]


class Refused(Exception):
  """A message will never be accepted; says 'reason: details'."""

  code = grpc.StatusCode.INVALID_ARGUMENT


class Busy(Refused):
  """A message cannot be accepted now, but may be later."""

  code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Transport(transport.Transport):
  """Receives over gRPC, and sends through its outlets.

  No ledger counts the records of a message that is refused as a whole, because
  nobody knows what they are; `refused` counts the message.
  """

  def __init__(
    self,
    inboxes: Mapping[str, inbox_lib.Inbox],
    network: security.Network,
    listens_to: Mapping[str, Collection[str]],
    limits: inbox_lib.Limits,
    run: str,
    folder: str,
  ):
    """Binds the address to listen on, and starts to connect to the peers.

    `listens_to` are the policies that each policy receives from, and `limits`
    bound what is queued for each peer. Messages of other runs than `run` are
    refused. Received messages are kept in `folder` until a checkpoint holds
    them. Raises InputError if an address or a certificate cannot be used.
    """
    pem = network.read_pem(network.listen)
    self._inboxes, self._limits, self._run = inboxes, limits, run
    self._spool = spool_lib.Spool(folder, limits.spool_bytes)
    self._encrypted = pem is not None
    self._refusals = ledger_lib.Ledger()  # Of messages, whoever sent them.
    # A sender delivers one message at a time to each policy, so that messages
    # stay in order and no full inbox occupies all threads.
    self._delivering = {
      (sender, name): threading.Lock()
      for name, inbox in inboxes.items()
      for sender in network.addresses.keys() & inbox.peers.keys()
    }
    threads = 2 * len(self._delivering) + 2  # Some to refuse all others.
    self._pool = futures.ThreadPoolExecutor(threads, thread_name_prefix='see')
    publish = grpc.unary_unary_rpc_method_handler(self._answer)
    handler = grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: publish})
    self._server = grpc.server(
      self._pool,
      handlers=[handler],
      options=[
        ('grpc.max_receive_message_length', network.max_bytes + _OVERHEAD),
        # Identity only: a compressed message could expand to any size.
        ('grpc.compression_enabled_algorithms_bitset', 1),
        ('grpc.so_reuseport', 0),
      ],
      maximum_concurrent_rpcs=threads,
    )
    # localhost may be two interfaces. gRPC is content if it gets one of them,
    # although another program may own the other.
    address = re.sub('^localhost:', '127.0.0.1:', network.listen)
    try:
      if pem is None:
        self._server.add_insecure_port(address)
      else:
        ca, *key_and_cert = pem
        credentials = grpc.ssl_server_credentials(
          [key_and_cert], root_certificates=ca, require_client_auth=True
        )
        self._server.add_secure_port(address, credentials)
    except RuntimeError as error:
      raise checks.InputError(
        f'see.listen={network.listen} cannot be listened on, because another '
        f'process does or because it is not an address of this machine: {error}'
      ) from error
    self.outlets = {
      (sender, receiver): Outlet(sender, receiver, network, limits, run)
      for sender in inboxes
      for receiver in network.addresses
      if sender in listens_to[receiver]
    }

  @property
  def refused(self) -> dict[str, int]:
    return self._refusals.refusals().get('', {})

  def open(self) -> None:
    for inbox in self._inboxes.values():
      inbox.sources.append(self.fetch)
    self._server.start()

  def fetch(self, round: int) -> None:
    """Delivers what an earlier process acknowledged, up to `round`."""
    for name, data in self._spool.left(round):
      try:
        message = self._decode(data)
      except Refused as refused:
        logging.warning('%s is left on disk: %s', name, refused)
        continue
      if name not in self._inboxes[message.receiver].messages:
        self._deliver(message, lambda name=name: name, may_block=False)

  def receive(
    self, data: bytes, speaks_for: Collection[str] | None = None
  ) -> None:
    """Judges a message, stores it on disk if it has news, then delivers it.

    `speaks_for` are the policies that the caller's certificate names; None if
    connections are not encrypted. Raises Refused, or Busy if the message may be
    accepted later: its sender has not finished another delivery to its
    receiver, is too far ahead, or has too much on disk.
    """
    message = self._decode(data, speaks_for)
    if message.round >= self._limits.rounds:
      self._refuse('round', 'is after the last', f'{message.round}')
    inbox = self._inboxes[message.receiver]
    if inbox.is_ahead(message.round):
      self._delay(
        'ahead',
        f'round {message.round} of {message.sender} comes later, as '
        f'{message.receiver} is at round {inbox.round}; see see.max_ahead',
      )
    delivering = self._delivering[message.sender, message.receiver]
    if not delivering.acquire(timeout=_PATIENCE_S):
      raise Busy(f'another message of {message.sender} is being delivered')
    try:
      self._deliver(message, lambda: self._store(message, data))
    finally:
      delivering.release()

  def saved(self, rounds: int) -> None:
    before = rounds - self._limits.max_staleness
    self._spool.forget(before)
    for inbox in self._inboxes.values():
      inbox.forget_messages(before)

  def close(self) -> None:
    for outlet in self.outlets.values():
      outlet.close()
    self._server.stop(grace=_GRACE_S).wait()
    self._pool.shutdown(wait=False)

  def _answer(self, data: bytes, context: grpc.ServicerContext) -> bytes:
    names = None
    if self._encrypted:
      names = context.auth_context().get('x509_subject_alternative_name', ())
      names = {name.decode(errors='replace') for name in names}
    try:
      self.receive(data, names)
    except Refused as refused:
      context.abort(refused.code, str(refused))
    # It has the path, which is nobody's business. Buckets have errors of their own.
    except Exception as error:
      logging.log_every_n_seconds(
        logging.ERROR, 'a received message cannot be stored: %s', 60, error
      )
      context.abort(grpc.StatusCode.INTERNAL, 'the message cannot be stored')
    return b''

  def _decode(self, data, speaks_for=None) -> Message:
    try:
      message = wire.decode_untrusted(_DECODER, data)
    except msgspec.DecodeError as error:
      self._refuse('undecodable', str(error))
    pair = message.sender, message.receiver
    between = '{!r:.50} to {!r:.50}'.format(*pair)
    # In this order, so that a caller needs a certificate, or the run's
    # fingerprint, before answers depend on which policies there are.
    if speaks_for is not None and message.sender not in speaks_for:
      self._refuse(
        'certificate',
        'the sender is not among its subject alternative names',
        f'{between}, by one for {sorted(speaks_for)!r:.200}',
      )
    if message.run != self._run:
      self._refuse(
        'run',
        'both must have the same config, but for see and mwra',
        f'of run {message.run!r:.50}, this is {self._run!r}',
      )
    if pair not in self._delivering:
      self._refuse('peer', 'the receiver does not listen to it here', between)
    return message

  def _deliver(self, message, store, may_block=True):
    """Gives the inbox a message; `store` returns its name on disk."""
    inbox = self._inboxes[message.receiver]
    about = message.sender, message.round
    sound = inbox.judge(*about, message.records)
    is_new = inbox.wants(*about, sound, message.last)
    name = store() if is_new else ''
    inbox.add(
      *about, sound, last=message.last, may_block=may_block, message=name
    )

  def _store(self, message, data) -> str:
    try:
      return self._spool.add(message.sender, message.round, data)
    except spool_lib.Full:
      most = self._limits.spool_bytes // 2**20
      self._delay(
        'quota',
        f'messages of {message.sender} fill {most} MiB on disk, until a '
        'checkpoint holds them; see see.spool_mib and checkpoint.every',
      )

  def _refuse(self, reason, answer, details='') -> NoReturn:
    """Refuses a message for ever; only the log gets the details."""
    self._count(reason, f'{answer} {details}')
    raise Refused(f'{reason}: {answer}')

  def _delay(self, reason, details) -> NoReturn:
    """Refuses a message, which its sender will send again."""
    self._count(reason, details)
    raise Busy(f'{reason}: not now')

  def _count(self, reason, details):
    log = f'refused a message: {reason}: {details}'
    self._refusals.add('', 'message', 'refused', reason=reason, log=log)


class Parcel(msgspec.Struct, frozen=True):
  """An encoded message, and the number of its records of each kind."""

  data: bytes
  counts: dict[str, int]


class Outlet(transport.Outlet):
  """Sends the records of a policy to a peer in another process.

  A thread sends the queued messages in order, each one until the peer
  acknowledges or refuses it.
  """

  def __init__(
    self,
    sender: str,
    receiver: str,
    network: security.Network,
    limits: inbox_lib.Limits,
    run: str,
  ):
    """Starts to connect to `receiver`; see `Transport`.

    `limits` bound what is queued behind the message that is being sent.
    """
    address = network.addresses[receiver]
    pem = network.read_pem(address)
    self.ledger = ledger_lib.Ledger(ledger_lib.SENT)
    self._sender, self._receiver = sender, receiver
    self._limits, self._max_bytes = limits, network.max_bytes
    self._message = functools.partial(
      Message, run=run, sender=sender, receiver=receiver
    )
    self._place = f'{receiver} at {address}'  # For the log.
    self._queue = collections.deque()
    self._records = self._bytes = 0  # In the queue.
    self._reached = None  # Whether the last attempt succeeded; None before it.
    self._sending = None  # The call that sends the first message in the queue.
    self._closing = False
    self._changed = threading.Condition()
    options = [
      ('grpc.max_send_message_length', network.max_bytes + _OVERHEAD),
      ('grpc.initial_reconnect_backoff_ms', 100),
      ('grpc.max_reconnect_backoff_ms', 2000),
    ]
    if pem is None:
      self._channel = grpc.insecure_channel(address, options)
    else:
      # The receiver is known by its name, wherever its host is.
      options.append(('grpc.ssl_target_name_override', receiver))
      credentials = grpc.ssl_channel_credentials(*pem)
      self._channel = grpc.secure_channel(address, credentials, options)
    self._call = self._channel.unary_unary(f'/{_SERVICE}/{_METHOD}')
    self._thread = threading.Thread(
      target=self._send_queue, name=f'see-{sender}-{receiver}', daemon=True
    )
    self._thread.start()

  def send(
    self,
    round: int,
    published: Sequence[records.Record],
    encode: Callable[[records.Record], bytes] = wire.encode,
  ) -> None:
    batch, size = [], 0  # (kind, encoded record), and the bytes of all.
    for record in published:
      kind, data = records.kind(record), b''
      fault = records.fault(record)
      if fault is None:
        data = encode(record)
        fault = 'size' if len(data) > self._max_bytes else None
      self.ledger.add(self._receiver, kind, 'published', bytes=len(data))
      if fault:
        log = (
          f'a {kind} of {self._sender} is refused: {fault}, not sent to '
          f'{self._place}'
        )
        self.ledger.add(self._receiver, kind, 'refused', reason=fault, log=log)
        continue
      if len(batch) == _MOST or size + len(data) > self._max_bytes:
        self._enqueue(round, batch, last=False)
        batch, size = [], 0
      batch.append((kind, data))
      size += len(data)
    self._enqueue(round, batch, last=True)

  def state(self) -> bytes:
    with self._changed:
      return _ENCODER.encode([[*self._queue], self.ledger.state()])

  def restore(self, state: bytes) -> None:
    queue, ledger = msgspec.msgpack.decode(
      state, type=tuple[list[Parcel], list]
    )
    with self._changed:
      self._queue.clear()
      self._records = self._bytes = 0
      for parcel in queue:
        self._append(parcel)
      self.ledger.restore(ledger)
      self._changed.notify_all()

  def close(self) -> None:
    """Waits until the peer has taken all messages, or takes none for long."""
    with self._changed:
      while self._queue and not self._closing:
        left, reached = len(self._queue), self._reached
        if not self._changed.wait_for(
          lambda left=left, reached=reached: (
            self._closing
            or len(self._queue) < left
            or bool(self._reached) != bool(reached)
          ),
          max(self._limits.block_s, self._limits.wait_s if reached else 0),
        ):
          break
      if self._queue and not self._closing:
        logging.warning(
          f'{self._place} did not take the last {len(self._queue)} messages of '
          f'{self._sender}'
        )
      self._closing = True
      self._changed.notify_all()
      if self._sending:
        self._sending.cancel()
    self._thread.join()
    self._channel.close()

  def _enqueue(self, round, batch, last):
    """Queues a message, after a wait for room and evictions if need be."""
    encoded = [msgspec.Raw(data) for _, data in batch]
    message = self._message(round=round, last=last, records=encoded)
    counts = dict(collections.Counter(kind for kind, _ in batch))
    parcel = Parcel(_ENCODER.encode(message), counts)
    with self._changed:
      # Waiting makes no room while the peer cannot be reached.
      self._changed.wait_for(
        lambda: self._has_room(parcel) or not self._reached,
        self._limits.block_s,
      )
      # The first one is being sent, and stays.
      while len(self._queue) > 1 and not self._has_room(parcel):
        self._remove(1, 'evicted')
      self._append(parcel)
      self._changed.notify_all()

  def _has_room(self, parcel):
    return (
      self._records + sum(parcel.counts.values()) <= self._limits.records
      and self._bytes + len(parcel.data) <= self._limits.bytes
    )

  def _append(self, parcel):
    self._queue.append(parcel)
    self._records += sum(parcel.counts.values())
    self._bytes += len(parcel.data)

  def _remove(self, index, fate, **refusal):
    parcel = self._queue[index]
    del self._queue[index]
    self._records -= sum(parcel.counts.values())
    self._bytes -= len(parcel.data)
    for kind, count in parcel.counts.items():
      self.ledger.add(self._receiver, kind, fate, count, **refusal)

  def _send_queue(self):
    """Sends until the outlet closes; runs in a thread of its own."""
    pause_s = _RETRY_S[0]
    while True:
      with self._changed:
        self._changed.wait_for(lambda: self._queue or self._closing)
        if self._closing:
          return
        parcel = self._queue[0]
        # Begun under the lock, so that `close` prevents or cancels it.
        self._sending = self._call.future(
          parcel.data, timeout=self._limits.block_s + _ANSWER_S
        )
      code, details = self._sending.code().name, self._sending.details() or ''
      fate, reason = _judge(code, details)
      is_busy = not fate and code == 'RESOURCE_EXHAUSTED'  # It takes it later.
      with self._changed:
        # A `restore` during the call may have put another message there.
        if fate and self._queue and self._queue[0] is parcel:
          log = (
            f'a message of {self._sender} is refused: {reason}, by '
            f'{self._place}: {details!r:.300}'
          )
          self._remove(0, fate, reason=reason, log=log)
        if (fate or is_busy) and not self._reached:
          logging.info(f'{self._sender} reaches {self._place}')
        if (
          not (fate or is_busy)
          and self._reached is not False
          and not self._closing
        ):
          logging.warning(
            f'{self._sender} cannot reach {self._place} and will keep trying '
            f'(is it up, with certificates of the same authority?): {code}: '
            f'{details!r:.300}'
          )
        self._reached = bool(fate) or is_busy
        self._changed.notify_all()
        if fate:
          pause_s = _RETRY_S[0]
        else:
          self._changed.wait_for(lambda: self._closing, pause_s)
          pause_s = min(2 * pause_s, _BUSY_S if is_busy else _RETRY_S[1])


def _judge(code: str, details: str) -> tuple[str, str]:
  """Returns a message's fate and why it is refused; '' if it must be resent."""
  if code == 'OK':
    return 'acknowledged', ''
  if code == 'RESOURCE_EXHAUSTED' and 'larger than' in details:
    return 'refused', 'size'  # So says the receiver's gRPC.
  if code not in _FINAL:
    return '', ''
  reason = details.partition(':')[0]
  return 'refused', reason if reason in _REASONS else code.lower()


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Message)
