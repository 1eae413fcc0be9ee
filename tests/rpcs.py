"""Receivers and senders over gRPC, real and fake, for tests."""

from concurrent import futures
import os
import pathlib
import threading

import grpc
import msgspec

from mrl_jax.see import rpc
from mrl_jax.see import security
from mrl_jax.see import wire
from tests import exchanges

METHOD = '/mrl_jax.see.Exchange/Publish'
Code = grpc.StatusCode


class Receiver:
  """An open transport of policies that a, or whoever is named, sends to."""

  def __init__(
    self,
    stack,
    folder,
    *,
    names='b',
    senders='a',
    address=None,
    run='run',
    max_bytes=2**20,
    state=b'',
    tls=None,
    **limits,
  ):
    self.address = address or exchanges.free_address()
    self.folder = folder / '_received'
    self.inboxes = {n: exchanges.inbox(n, senders, **limits) for n in names}
    self.inbox = self.inboxes['b']
    network = security.Network(
      listen=self.address,
      addresses=dict.fromkeys(senders, '127.0.0.1:1'),
      max_bytes=max_bytes,
      **tls or {},
    )
    self.transport = rpc.Transport(
      self.inboxes,
      network,
      dict.fromkeys(senders, ()),
      exchanges.limits(**limits),
      run,
      os.fspath(self.folder),
    )
    stack.callback(self.transport.close)
    if state:
      self.inbox.restore(state)
    self.transport.open()

  def collect(self, round=0):
    return self.inbox.collect(round, exchanges.KINDS)

  def wait_for_round(self, round=0):
    exchanges.wait_until(lambda: self.inbox.finished['a'] >= round)

  def wait_for_files(self, count):
    exchanges.wait_until(lambda: len(os.listdir(self.folder)) == count)

  def is_untouched(self):
    return (
      not self.transport.refused
      and self.inbox.finished['a'] == -1
      and not self.inbox.ledger.table()
      and not os.listdir(self.folder)
    )


class Fake:
  """A server that answers with `answer(fake, context)`.

  Attributes:
    messages: that it got, in order.
    released: an event that is set when the test ends, or before.
  """

  def __init__(self, stack, answer=lambda fake, context: None, method=METHOD):
    self.messages, self._answer = [], answer
    self.released = threading.Event()
    service, name = method.strip('/').split('/')
    pool = futures.ThreadPoolExecutor(4)
    handler = grpc.unary_unary_rpc_method_handler(self._take)
    server = grpc.server(
      pool,
      handlers=[grpc.method_handlers_generic_handler(service, {name: handler})],
    )
    self.address = exchanges.free_address()
    server.add_insecure_port(self.address)
    server.start()
    stack.callback(pool.shutdown)
    stack.callback(lambda: server.stop(grace=0).wait())
    stack.callback(self.released.set)

  def _take(self, data, context):
    self.messages.append(msgspec.msgpack.decode(data))
    self._answer(self, context)
    return b''

  def rounds(self):
    return [message['round'] for message in self.messages]


def hang(fake, context):
  fake.released.wait()


def sender(
  stack, address, *, peer='b', run='run', max_bytes=2**20, tls=None, **limits
) -> rpc.Outlet:
  """An outlet from a."""
  network = security.Network(
    addresses={peer: address}, max_bytes=max_bytes, **tls or {}
  )
  outlet = rpc.Outlet('a', peer, network, exchanges.limits(**limits), run)
  stack.callback(outlet.close)
  return outlet


def fates(outlet, kind='rollout'):
  (peer,) = outlet.ledger.table()
  return exchanges.fates(outlet.ledger, peer, kind)


def wait_until_settled(outlet):
  exchanges.wait_until(lambda: not exchanges.waiting(outlet.ledger))


def message(published=(), **fields) -> bytes:
  plain = {
    'run': 'run',
    'sender': 'a',
    'receiver': 'b',
    'round': 0,
    'last': True,
    'records': [msgspec.Raw(wire.encode(r)) for r in published],
  }
  return msgspec.msgpack.encode({**plain, **fields})


def credentials(tls) -> grpc.ChannelCredentials:
  """Of a client with the PEM files of `tls`."""
  paths = (tls['ca'], tls['key'], tls['cert'])
  return grpc.ssl_channel_credentials(
    *(pathlib.Path(path).read_bytes() for path in paths)
  )


def call(address, data, credentials=None, target='', **options):
  """Returns the status code and the details of one bare attempt.

  Over TLS, the certificate of the receiver must name `target`.
  """
  channel = (
    grpc.secure_channel(
      address, credentials, [('grpc.ssl_target_name_override', target)]
    )
    if credentials
    else grpc.insecure_channel(address)
  )
  with channel:
    sending = channel.unary_unary(METHOD).future(
      data, timeout=exchanges.DEADLINE_S, **options
    )
    return sending.code(), sending.details()
