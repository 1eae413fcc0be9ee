"""Servers and senders of gRPC, real and fake, for tests."""

from concurrent import futures
import os
import threading

import grpc
import msgspec
import pytest

from mrl_jax import checks
from mrl_jax import records
from mrl_jax.see import inbox as inbox_lib
from mrl_jax.see import rpc
from mrl_jax.see import security as security_lib
from mrl_jax.see import spool as spool_lib
from mrl_jax.see import wire
from tests import examples
from tests import exchanges

PLAIN = security_lib.Security()
METHOD = '/mrl_jax.see.Exchange/Publish'
Code = grpc.StatusCode


class Receiver:
  """The server of policies that a, and whoever else is named, sends to."""

  def __init__(
    self,
    stack,
    folder,
    *,
    names=('b',),
    senders=('a',),
    address=None,
    security=PLAIN,
    run='run',
    max_bytes=2**20,
    state=b'',
    **limits,
  ):
    self.address = address or exchanges.free_address()
    self.folder = folder / 'received'
    self.inboxes = {
      name: inbox_lib.Inbox(
        name,
        dict.fromkeys(senders, exchanges.PEER),
        exchanges.limits(**limits),
      )
      for name in names
    }
    self.server = rpc.Server(
      self.address,
      self.inboxes,
      senders=senders,
      run=run,
      security=security,
      max_bytes=max_bytes,
      spool=spool_lib.Spool(os.fspath(self.folder)),
    )
    stack.callback(self.server.close)
    if state:
      self.inboxes['b'].restore(state)
    self.server.start()

  def collect(self, round=0, name='b'):
    return self.inboxes[name].collect(round, records.KINDS)

  def heard(self, round=0):
    exchanges.wait_until(lambda: self.inboxes['b'].heard('a') >= round)

  def is_untouched(self):
    return (
      not self.server.refused
      and self.inboxes['b'].heard('a') == -1
      and not self.inboxes['b'].ledger.table()
      and not os.listdir(self.folder)
    )


class Fake:
  """A server that answers as it is told, by `answer(fake, context)`.

  Attributes:
    messages: what was sent, in order.
    released: an event that is set when the test ends, or before.
  """

  def __init__(self, stack, answer, method=METHOD):
    self.messages, self._answer = [], answer
    self.released = threading.Event()
    service, name = method.strip('/').split('/')
    pool = futures.ThreadPoolExecutor(4)
    server = grpc.server(
      pool,
      handlers=[
        grpc.method_handlers_generic_handler(
          service, {name: grpc.unary_unary_rpc_method_handler(self._take)}
        )
      ],
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


def take_all(fake, context):
  pass


def hang(fake, context):
  fake.released.wait()


def sender(
  stack,
  address,
  *,
  peer='b',
  security=PLAIN,
  run='run',
  max_bytes=2**20,
  **limits,
) -> rpc.Outlet:
  outlet = rpc.Outlet(
    'a',
    peer,
    address,
    run=run,
    security=security,
    limits=exchanges.limits(**limits),
    max_bytes=max_bytes,
  )
  stack.callback(outlet.close)
  return outlet


def fates(outlet, kind='rollout'):
  (row,) = [kinds[kind] for kinds in outlet.ledger.table().values()]
  return {fate: n for fate, n in row.items() if n and fate != 'bytes'}


def settled(outlet):
  exchanges.wait_until(lambda: not exchanges.waiting(outlet.ledger))


def one(round=0, **fields):
  return [examples.rollout(round=round, **fields)]


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


def call(address, data, credentials=None, **options):
  """One bare attempt: the status code, and what was said."""
  channel = (
    grpc.secure_channel(address, credentials)
    if credentials
    else grpc.insecure_channel(address)
  )
  with channel:
    sending = channel.unary_unary(METHOD).future(
      data, timeout=exchanges.DEADLINE_S, **options
    )
    return sending.code(), sending.details()


# Who may connect.


def both(stack, address, security):
  """The two ways to use an address."""
  yield lambda: sender(stack, address, security=security)
  yield lambda: rpc.Server(
    address,
    {},
    senders=(),
    run='run',
    security=security,
    max_bytes=1,
    spool=None,
  )


def refuses(stack, address, security, match):
  for use in both(stack, address, security):
    with pytest.raises(checks.InputError, match=match):
      use()
