"""gRPC between processes: who may connect, and what is tried again."""

from concurrent import futures
import contextlib
import os
import socket
import threading
import time

from cryptography.hazmat.primitives import serialization
import grpc
import msgspec
import pytest
import trustme

from mrl_jax import checks
from mrl_jax import records
from mrl_jax.see import inbox as inbox_lib
from mrl_jax.see import rpc
from mrl_jax.see import spool as spool_lib
from mrl_jax.see import wire
from mrl_jax.sharing import xgrpo
from tests import examples
from tests import exchanges

PLAIN = rpc.Security()
METHOD = '/mrl_jax.see.Exchange/Publish'
Code = grpc.StatusCode


@pytest.fixture
def stack():
  """Closes what a test opens, the last first."""
  with contextlib.ExitStack() as opened:
    yield opened


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


@pytest.mark.parametrize(
  'address', ['127.0.0.1:1', '127.8.9.1:65535', 'localhost:80', '[::1]:80']
)
def test_the_loopback_interface_may_be_plain(address):
  PLAIN.check(address)


@pytest.mark.parametrize(
  'address',
  [
    '0.0.0.0:80',
    '[::]:80',
    '10.0.0.1:80',
    '128.0.0.1:80',
    '[fe80::1]:80',
    '127.1:80',
    'host_a:80',
    'localhost.example.org:80',
    '127.0.0.1.example.org:80',
  ],
)
def test_other_addresses_need_certificates(stack, address):
  refuses(stack, address, PLAIN, r'not a loopback.*tls\.ca.*allow_insecure')
  rpc.Security(allow_insecure=True).check(address)
  rpc.Security(ca='ca', cert='cert', key='key').check(address)


@pytest.mark.parametrize(
  'address',
  [
    '',
    '127.0.0.1',
    '127.0.0.1:',
    ':80',
    '127.0.0.1:http',
    '127.0.0.1:0',
    '127.0.0.1:65536',
    '127.0.0.1:-1',
    '127.0.0.1:80\n',
    '127.0.0.1:\uff18\uff10',
    '::1:80',
    '[::1]',
    '[localhost]:80',
    'a b:80',
    'http://localhost:80',
    'unix:/tmp/socket:80',
    'ipv4:127.0.0.1:80',
  ],
)
def test_what_is_not_an_address_is_refused(stack, address):
  everybody = rpc.Security(allow_insecure=True)
  refuses(stack, address, everybody, 'is not an address; it must be HOST:PORT')


@pytest.fixture(scope='module')
def pem(tmp_path_factory):
  """Writes PEM files, and returns their paths."""
  folder = tmp_path_factory.mktemp('pem')

  def write(name, content: bytes) -> str:
    path = folder / f'{name}.pem'
    path.write_bytes(content)
    return os.fspath(path)

  return write


@pytest.fixture(scope='module')
def tls(pem):
  """Securities by name: 'ours', one more of the same authority, 'theirs'."""
  made = {}
  authorities = {'ours': trustme.CA(), 'theirs': trustme.CA()}
  for name, by in (('ours', 'ours'), ('too', 'ours'), ('theirs', 'theirs')):
    leaf = authorities[by].issue_cert('127.0.0.1', 'localhost')
    made[name] = rpc.Security(
      ca=pem(f'{name}_ca', authorities[by].cert_pem.bytes()),
      cert=pem(f'{name}_cert', leaf.cert_chain_pems[0].bytes()),
      key=pem(f'{name}_key', leaf.private_key_pem.bytes()),
    )
  return made


def changed(security, **paths):
  return rpc.Security(
    **{'ca': security.ca, 'cert': security.cert, 'key': security.key, **paths}
  )


@pytest.mark.parametrize('lacks', ['ca', 'cert', 'key'])
def test_half_of_a_security_is_refused(stack, tls, lacks):
  half = changed(tls['ours'], **{lacks: ''})
  refuses(stack, '127.0.0.1:80', half, 'all of ca, cert and key, or none')


@pytest.mark.parametrize('name', ['ca', 'cert', 'key'])
def test_files_that_are_missing_or_damaged_are_named(
  stack, tls, pem, tmp_path, name
):
  address = exchanges.free_address()
  for path, match in (
    (tmp_path / 'nowhere', rf'see\.tls\.{name}: .*No such file.*nowhere'),
    (tmp_path, rf'see\.tls\.{name}: .*directory'),
    (pem('junk', b'junk'), rf'see\.tls\.{name}=\S*junk\.pem'),
    (pem('empty', b''), rf'see\.tls\.{name}=\S*empty\.pem'),
  ):
    security = changed(tls['ours'], **{name: os.fspath(path)})
    refuses(stack, address, security, match)


def test_a_key_of_another_certificate_is_refused(stack, tls):
  mixed = changed(tls['ours'], key=tls['too'].key)
  refuses(stack, exchanges.free_address(), mixed, 'a certificate and its key')


def test_a_key_with_a_password_is_refused_and_not_asked_for(stack, tls, pem):
  with open(tls['ours'].key, 'rb') as f:
    key = serialization.load_pem_private_key(f.read(), None)
  locked = key.private_bytes(
    serialization.Encoding.PEM,
    serialization.PrivateFormat.PKCS8,
    serialization.BestAvailableEncryption(b'secret'),
  )
  security = changed(tls['ours'], key=pem('locked', locked))
  refuses(stack, exchanges.free_address(), security, 'without a password')


@pytest.mark.parametrize('host', ['127.0.0.1', 'localhost'])
def test_a_port_that_is_taken_is_refused(stack, tmp_path, host):
  with socket.socket() as taken:
    taken.bind(('127.0.0.1', 0))
    taken.listen()
    address = f'{host}:{taken.getsockname()[1]}'
    with pytest.raises(checks.InputError, match=f'see.listen={address} cannot'):
      Receiver(stack, tmp_path, address=address)


def test_two_servers_do_not_share_a_port(stack, tmp_path):
  address = Receiver(stack, tmp_path / '1').address
  with pytest.raises(checks.InputError, match='another process does'):
    Receiver(stack, tmp_path / '2', address=address)


def test_everybody_may_write_where_that_is_allowed(stack, tmp_path):
  port = exchanges.free_address().partition(':')[2]
  receiver = Receiver(
    stack,
    tmp_path,
    address=f'0.0.0.0:{port}',
    security=rpc.Security(allow_insecure=True),
  )
  sender(stack, f'127.0.0.1:{port}').send(0, one())
  receiver.heard()
  assert len(receiver.collect()) == 1


@pytest.mark.parametrize('host', ['127.0.0.1', 'localhost'])
def test_certificates_of_one_authority_let_messages_through(
  stack, tmp_path, tls, host
):
  receiver = Receiver(stack, tmp_path, security=tls['ours'])
  address = receiver.address.replace('127.0.0.1', host)
  outlet = sender(stack, address, security=tls['too'])
  outlet.send(0, one())
  settled(outlet)
  assert fates(outlet) == {'published': 1, 'acknowledged': 1}
  assert len(receiver.collect()) == 1


@pytest.mark.parametrize(
  'stranger', ['plain', 'another certificate', 'another authority']
)
def test_of_strangers_nothing_gets_in_and_they_keep_trying(
  stack, tmp_path, tls, caplog, stranger
):
  ours, theirs = tls['ours'], tls['theirs']
  security, friend = {
    'plain': (PLAIN, PLAIN),
    'another certificate': (
      changed(theirs, ca=ours.ca),
      changed(ours, ca=theirs.ca),
    ),
    'another authority': (theirs, theirs),
  }[stranger]
  address = exchanges.free_address()
  outlet = sender(stack, address, security=security)
  with contextlib.ExitStack() as until_closed:
    receiver = Receiver(
      until_closed, tmp_path / '1', address=address, security=ours
    )
    outlet.send(0, one())
    exchanges.wait_until(lambda: 'a cannot reach b at' in caplog.text)
    assert f'{address} and will keep trying (is it up, with' in caplog.text
    assert fates(outlet) == {'published': 1, 'waiting': 1}
    assert receiver.is_untouched()
  receiver = Receiver(stack, tmp_path / '2', address=address, security=friend)
  settled(outlet)
  assert len(receiver.collect()) == 1
  assert caplog.text.count('a cannot reach b at') == 1


def test_without_a_certificate_nothing_gets_in(stack, tmp_path, tls):
  receiver = Receiver(stack, tmp_path, security=tls['ours'])
  with open(tls['ours'].ca, 'rb') as f:
    anonymous = grpc.ssl_channel_credentials(f.read())
  code, _ = call(receiver.address, message(one()), anonymous)
  assert code is Code.UNAVAILABLE
  assert receiver.is_untouched()


def test_to_a_server_without_encryption_nothing_is_sent(stack, tls, caplog):
  fake = Fake(stack, take_all)
  sender(stack, fake.address, security=tls['ours']).send(0, one())
  exchanges.wait_until(lambda: 'a cannot reach b at' in caplog.text)
  assert not fake.messages


def test_a_server_of_another_authority_is_sent_nothing(
  stack, tmp_path, tls, caplog
):
  # It would take certificates of either authority.
  with open(tls['ours'].ca) as ours, open(tls['theirs'].ca) as theirs:
    (tmp_path / 'both').write_text(ours.read() + theirs.read())
  receiver = Receiver(
    stack,
    tmp_path,
    security=changed(tls['theirs'], ca=os.fspath(tmp_path / 'both')),
  )
  outlet = sender(stack, receiver.address, security=tls['ours'])
  outlet.send(0, one())
  exchanges.wait_until(lambda: 'a cannot reach b at' in caplog.text)
  assert fates(outlet) == {'published': 1, 'waiting': 1}
  assert receiver.is_untouched()


# What is tried again.


def test_a_server_may_come_up_late(stack, tmp_path, caplog):
  address = exchanges.free_address()
  outlet = sender(stack, address)
  for round in range(3):
    outlet.send(round, one(round))
  exchanges.wait_until(lambda: 'a cannot reach b at' in caplog.text)
  assert fates(outlet) == {'published': 3, 'waiting': 3}
  receiver = Receiver(stack, tmp_path, address=address, max_staleness=2)
  settled(outlet)
  assert [r.header.round for r in receiver.collect(2)] == [0, 1, 2]
  assert caplog.text.count('a cannot reach b at') == 1


@pytest.mark.parametrize(
  'code',
  [
    Code.UNAVAILABLE,
    Code.RESOURCE_EXHAUSTED,
    Code.DEADLINE_EXCEEDED,
    Code.UNKNOWN,
    Code.INTERNAL,
    Code.CANCELLED,
  ],
)
def test_an_answer_that_may_change_is_asked_for_again(stack, caplog, code):
  def answer(fake, context):
    if len(fake.messages) < 4:
      context.abort(code, 'not now')

  fake = Fake(stack, answer)
  outlet = sender(stack, fake.address)
  outlet.send(0, one())
  outlet.send(1, one(1))
  settled(outlet)
  assert fake.rounds() == [0, 0, 0, 0, 1]
  assert caplog.text.count(f'b at {fake.address} and will keep trying') == 1
  assert fates(outlet) == {'published': 2, 'acknowledged': 2}


@pytest.mark.parametrize(
  ('code', 'details', 'reason'),
  [
    (Code.INVALID_ARGUMENT, 'run: of another', 'run'),
    (Code.INVALID_ARGUMENT, 'undecodable: no', 'undecodable'),
    (Code.INVALID_ARGUMENT, '', 'invalid_argument'),
    (Code.INVALID_ARGUMENT, 'x' * 1000 + ': y', 'invalid_argument'),
    (Code.FAILED_PRECONDITION, 'later', 'failed_precondition'),
    (Code.UNIMPLEMENTED, 'what?', 'unimplemented'),
    (Code.RESOURCE_EXHAUSTED, 'message larger than max', 'size'),
  ],
)
def test_an_answer_that_will_not_change_is_taken(
  stack, caplog, code, details, reason
):
  def answer(fake, context):
    if len(fake.messages) < 4:
      context.abort(code, details)

  fake = Fake(stack, answer)
  outlet = sender(stack, fake.address)
  for round in range(4):
    outlet.send(round, [*one(round), examples.outcome(round=round)])
  settled(outlet)
  assert fake.rounds() == [0, 1, 2, 3]
  assert fates(outlet) == {'published': 4, 'refused': 3, 'acknowledged': 1}
  assert fates(outlet) == fates(outlet, 'outcome')
  assert outlet.ledger.refusals() == {'b': {reason: 6}}
  assert caplog.text.count(f'refused: {reason}, by b at {fake.address}') == 1
  assert 'cannot reach' not in caplog.text


def test_a_message_of_another_run_is_refused_and_the_peer_is_named(
  stack, tmp_path, caplog
):
  receiver = Receiver(stack, tmp_path, run='this')
  outlet = sender(stack, receiver.address, run='other')
  outlet.send(0, one())
  settled(outlet)
  assert outlet.ledger.refusals() == {'b': {'run': 1}}
  assert f'b at {receiver.address}' in caplog.text
  assert "of run 'other', this is 'this'" in caplog.text
  assert receiver.server.refused == {'run': 1}
  assert not os.listdir(receiver.folder)


def test_another_service_at_the_address_refuses(stack):
  fake = Fake(stack, take_all, method='/another/Service')
  outlet = sender(stack, fake.address)
  outlet.send(0, one())
  settled(outlet)
  assert outlet.ledger.refusals() == {'b': {'unimplemented': 1}}


def test_an_answer_that_does_not_come_is_not_waited_for(stack, monkeypatch):
  monkeypatch.setattr(rpc, '_ANSWER_S', 0.2)

  def answer(fake, context):
    if len(fake.messages) == 1:
      fake.released.wait()

  fake = Fake(stack, answer)
  outlet = sender(stack, fake.address)
  outlet.send(0, one())
  settled(outlet)
  assert fake.rounds() == [0, 0]
  assert fates(outlet) == {'published': 1, 'acknowledged': 1}


def test_a_message_that_came_twice_is_taken_once(stack, tmp_path):
  receiver = Receiver(stack, tmp_path)
  for _ in range(2):
    assert call(receiver.address, message(one())) == (Code.OK, '')
  assert len(receiver.collect()) == 1
  row = receiver.inboxes['b'].ledger.table()['a']['rollout']
  assert (row['published'], row['duplicate']) == (2, 1)
  assert len(os.listdir(receiver.folder)) == 1


# What a message may hold.


def test_a_large_round_is_split_and_ends_with_its_last_message(stack):
  published = [
    *examples.group([1.0] * 50),
    *[examples.outcome(prompt=f'p{i}') for i in range(20)],
  ]
  fake = Fake(stack, take_all)
  outlet = sender(stack, fake.address, max_bytes=2000, bytes=10**6)
  outlet.send(0, published)
  settled(outlet)
  assert len(fake.messages) > 10
  assert [m['last'] for m in fake.messages[-2:]] == [False, True]
  assert sum(m['last'] for m in fake.messages) == 1
  for got in fake.messages:
    assert len(msgspec.msgpack.encode(got['records'])) <= 2000 + 100
  sent = [
    tuple(r['header'].values()) for m in fake.messages for r in m['records']
  ]
  assert sent == [
    tuple(msgspec.structs.asdict(r.header).values()) for r in published
  ]


def test_a_round_of_many_records_is_split_too(stack):
  stats = xgrpo.group_stats(examples.group([1.0]))
  fake = Fake(stack, take_all)
  outlet = sender(
    stack, fake.address, max_bytes=2**24, bytes=2**24, records=9999
  )
  outlet.send(0, [stats] * 9000)
  settled(outlet)
  assert [len(m['records']) for m in fake.messages] == [4096, 4096, 808]


def test_a_large_round_arrives_whole(stack, tmp_path):
  receiver = Receiver(stack, tmp_path, max_bytes=2000, bytes=10**6)
  outlet = sender(
    stack, receiver.address, max_bytes=2000, bytes=10**6, block_s=10.0
  )
  outlet.send(0, examples.group([1.0] * 50))
  receiver.heard()
  assert [r.header.sample for r in receiver.collect()] == [*range(50)]


def test_an_empty_round_is_a_message(stack, tmp_path):
  receiver = Receiver(stack, tmp_path)
  sender(stack, receiver.address).send(3, [])
  receiver.heard(3)


def test_a_record_larger_than_a_message_is_refused(stack, caplog):
  fake = Fake(stack, take_all)
  outlet = sender(stack, fake.address, max_bytes=1000)
  outlet.send(0, [*one(payload=b'x' * 1000), *one(sample=1)])
  exchanges.wait_until(lambda: fake.messages)
  settled(outlet)
  assert outlet.ledger.refusals() == {'b': {'size': 1}}
  assert [len(m['records']) for m in fake.messages] == [1]
  assert 'a rollout of a is refused: size, not sent to b at' in caplog.text


def test_an_unsound_record_is_not_sent(stack, caplog):
  fake = Fake(stack, take_all)
  outlet = sender(stack, fake.address)
  wrong = msgspec.structs.replace(
    examples.rollout(), ids=examples.rollout().ids.astype('i8')
  )
  outlet.send(0, [wrong, wrong, *one(reward=float('nan')), *one()])
  settled(outlet)
  assert outlet.ledger.refusals() == {'b': {'ids_type': 2, 'reward': 1}}
  assert fates(outlet) == {'published': 4, 'refused': 3, 'acknowledged': 1}
  assert caplog.text.count('refused: ids_type, not sent to b') == 1


def test_a_receiver_with_a_lower_limit_refuses(stack, tmp_path):
  receiver = Receiver(stack, tmp_path, max_bytes=2000, bytes=10**6)
  outlet = sender(stack, receiver.address, max_bytes=10**6)
  outlet.send(0, examples.group([1.0] * 50))
  outlet.send(1, one(1))
  settled(outlet)
  assert outlet.ledger.refusals() == {'b': {'size': 50}}
  assert fates(outlet)['acknowledged'] == 1
  assert len(os.listdir(receiver.folder)) == 1


def test_what_is_compressed_is_refused(stack, tmp_path):
  receiver = Receiver(stack, tmp_path)
  code, details = call(
    receiver.address, message(one()), compression=grpc.Compression.Gzip
  )
  assert code is Code.UNIMPLEMENTED
  assert 'disabled' in details
  assert receiver.is_untouched()


# What is kept, and for how long.


def test_a_peer_that_is_down_costs_no_time_and_little_memory(stack, caplog):
  outlet = sender(stack, exchanges.free_address(), records=3, block_s=2.0)
  outlet.send(0, one())
  exchanges.wait_until(lambda: 'a cannot reach b at' in caplog.text)
  began = time.monotonic()
  for round in range(1, 20):
    outlet.send(round, one(round))
  assert time.monotonic() - began < 10 * 2.0
  assert fates(outlet) == {'published': 20, 'evicted': 17, 'waiting': 3}
  assert rounds_in(outlet.state()) == [0, 18, 19]  # The first is on its way.


def rounds_in(state):
  parcels, _ = msgspec.msgpack.decode(state)
  return [msgspec.msgpack.decode(p['data'])['round'] for p in parcels]


def test_the_bytes_that_wait_are_bounded_too(stack):
  outlet = sender(stack, exchanges.free_address(), bytes=2000)
  for round in range(10):
    outlet.send(round, one(round))
  parcels, _ = msgspec.msgpack.decode(outlet.state())
  assert 1000 < sum(len(p['data']) for p in parcels) <= 2000


def test_a_publisher_waits_for_a_peer_that_is_slow(stack):
  def answer(fake, context):
    if len(fake.messages) > 1:
      fake.released.wait()

  fake = Fake(stack, answer)
  outlet = sender(stack, fake.address, records=2, block_s=exchanges.DEADLINE_S)
  outlet.send(0, one())
  settled(outlet)  # The peer is there.

  def publish():
    for round in (1, 2, 3, 4):
      outlet.send(round, one(round))

  with futures.ThreadPoolExecutor(1) as pool:
    publishing = pool.submit(publish)
    exchanges.wait_until(lambda: len(fake.messages) == 2)
    with pytest.raises(futures.TimeoutError):
      publishing.result(timeout=0.1)
    fake.released.set()
    publishing.result(timeout=exchanges.DEADLINE_S)
  settled(outlet)
  assert fates(outlet) == {'published': 5, 'acknowledged': 5}


def test_state_brings_back_what_was_not_acknowledged(stack, tmp_path):
  address = exchanges.free_address()
  outlet = sender(stack, address)
  for round in range(3):
    outlet.send(round, [*one(round), examples.outcome(round=round)])
  again = sender(stack, address)
  again.restore(outlet.state())
  assert again.ledger.table() == outlet.ledger.table()
  assert again.state() == outlet.state()
  outlet.close()
  receiver = Receiver(stack, tmp_path, address=address, max_staleness=2)
  settled(again)
  assert len(receiver.collect(2)) == 6
  assert fates(again) == {'published': 3, 'acknowledged': 3}
  again.send(3, one(3))
  receiver.heard(3)


def test_what_is_restored_is_bounded_as_well(stack):
  address = exchanges.free_address()
  outlet, again = (sender(stack, address, records=3) for _ in range(2))
  for round in range(3):
    outlet.send(round, one(round))
  again.restore(outlet.state())
  again.send(3, one(3))
  assert rounds_in(again.state()) == [0, 2, 3]


def test_restoring_while_a_message_is_on_its_way_loses_nothing(stack):
  fake = Fake(stack, hang)
  before = sender(stack, exchanges.free_address())
  before.send(7, one(7))
  outlet = sender(stack, fake.address)
  outlet.send(0, one())
  exchanges.wait_until(lambda: fake.messages)
  outlet.restore(before.state())
  fake.released.set()
  settled(outlet)
  assert fake.rounds() == [0, 7]
  assert fates(outlet) == {'published': 1, 'acknowledged': 1}


@pytest.mark.parametrize('state', ['idle', 'done', 'down', 'hung', 'never'])
def test_closing_takes_a_bounded_time_and_leaves_no_thread(
  stack, state, caplog
):
  before = set(threading.enumerate())
  with contextlib.ExitStack() as until_closed:
    fake = Fake(until_closed, hang if state == 'hung' else take_all)
    address = exchanges.free_address() if state == 'down' else fake.address
    outlet = sender(stack, address, block_s=0.2)
    if state in ('done', 'down', 'hung'):
      outlet.send(0, one())
    if state == 'done':
      settled(outlet)
    if state == 'down':
      exchanges.wait_until(lambda: 'cannot reach' in caplog.text)
    if state == 'hung':
      exchanges.wait_until(lambda: fake.messages)
    began = time.monotonic()
    outlet.close()
    assert time.monotonic() - began < exchanges.DEADLINE_S / 6
    left = {thread.name for thread in {*threading.enumerate()} - before}
    assert 'see-a-b' not in left
    outlet.close()
  lost = 'did not take the last 1 messages of a'
  assert caplog.text.count(lost) == (state in ('down', 'hung'))
  assert 'will keep trying' not in caplog.text or state == 'down'
  exchanges.wait_until(lambda: set(threading.enumerate()) <= before)


def test_closing_waits_for_a_peer_that_is_slow(stack):
  fake = Fake(stack, lambda *_: time.sleep(0.1))
  outlet = sender(stack, fake.address, block_s=exchanges.DEADLINE_S)
  for round in range(3):
    outlet.send(round, one(round))
  outlet.close()
  assert fates(outlet) == {'published': 3, 'acknowledged': 3}


# What a server does with a message.


def test_a_message_is_on_disk_before_it_is_acknowledged(stack, tmp_path):
  receiver = Receiver(stack, tmp_path)
  data = message(one())
  receiver.server.take(data)
  (name,) = os.listdir(receiver.folder)
  assert (receiver.folder / name).read_bytes() == data
  assert receiver.inboxes['b'].has_taken(name)


def test_a_message_that_cannot_be_kept_is_not_taken(stack, tmp_path):
  receiver = Receiver(stack, tmp_path)
  receiver.folder.rmdir()
  code, details = call(receiver.address, message(one()))
  assert code is Code.UNKNOWN  # To be sent again.
  assert 'No such file' in details
  assert receiver.collect() == []
  receiver.folder.mkdir()
  assert call(receiver.address, message(one())) == (Code.OK, '')


def test_a_server_takes_in_what_it_had_acknowledged(stack, tmp_path, caplog):
  with contextlib.ExitStack() as until_killed:
    receiver = Receiver(until_killed, tmp_path)
    receiver.server.take(message(one()))
  spool = spool_lib.Spool(os.fspath(receiver.folder))
  spool.add(0, message(one(), receiver='c'))
  spool.add(0, b'damaged')
  again = Receiver(stack, tmp_path)
  assert len(again.collect()) == 1
  assert again.inboxes['b'].heard('a') == 0
  assert caplog.text.count('is left on disk') == 2


def test_a_server_takes_nothing_in_that_a_checkpoint_has(stack, tmp_path):
  with contextlib.ExitStack() as until_killed:
    receiver = Receiver(until_killed, tmp_path)
    receiver.server.take(message(one()))
    state = receiver.inboxes['b'].state()
    receiver.server.take(message(one(1), round=1))
  again = Receiver(stack, tmp_path, state=state, max_staleness=1)
  assert [r.header.round for r in again.collect(1)] == [0, 1]
  row = again.inboxes['b'].ledger.table()['a']['rollout']
  assert (row['published'], row['duplicate']) == (2, 0)


def test_a_server_may_be_closed_before_it_starts_and_twice():
  server = rpc.Server(
    exchanges.free_address(),
    {'b': None},
    senders=('a',),
    run='run',
    security=PLAIN,
    max_bytes=1,
    spool=None,
  )
  server.close()
  server.close()


def test_a_policy_that_is_slow_does_not_hold_up_others(stack, tmp_path):
  receiver = Receiver(
    stack, tmp_path, names=('b', 'c'), records=1, block_s=exchanges.DEADLINE_S
  )
  slow = sender(stack, receiver.address, block_s=exchanges.DEADLINE_S)
  for round in range(2):
    slow.send(round, one(round))
  exchanges.wait_until(lambda: receiver.inboxes['b'].heard('a') == 0)
  exchanges.wait_until(lambda: len(os.listdir(receiver.folder)) == 2)
  # Somebody insists, and is told to come again.
  for _ in range(8):
    code, details = call(receiver.address, message(one(1), round=1))
    assert (code, details.partition(' ')[0]) == (
      Code.RESOURCE_EXHAUSTED,
      'another',
    )
  quick = sender(stack, receiver.address, peer='c')
  quick.send(0, one())
  settled(quick)
  assert fates(quick) == {'published': 1, 'acknowledged': 1}
  for round in range(2):
    receiver.heard(round)
    assert [r.header.round for r in receiver.collect(round)] == [round]


def test_a_server_acknowledges_what_it_is_taking_before_it_closes(
  stack, tmp_path, monkeypatch
):
  monkeypatch.setattr(rpc, '_GRACE_S', exchanges.DEADLINE_S)
  receiver = Receiver(stack, tmp_path, records=1, block_s=exchanges.DEADLINE_S)
  outlet = sender(stack, receiver.address)
  outlet.send(0, one())
  outlet.send(1, one(1))
  exchanges.wait_until(lambda: len(os.listdir(receiver.folder)) == 2)
  with futures.ThreadPoolExecutor(1) as pool:
    closing = pool.submit(receiver.server.close)
    with pytest.raises(futures.TimeoutError):
      closing.result(timeout=0.2)
    receiver.collect()
  settled(outlet)
  assert fates(outlet) == {'published': 2, 'acknowledged': 2}


def test_a_server_closes_while_a_delivery_waits_for_room(stack, tmp_path):
  before = set(threading.enumerate())
  receiver = Receiver(stack, tmp_path, records=1, block_s=exchanges.DEADLINE_S)
  with contextlib.ExitStack() as until_closed:
    outlet = sender(until_closed, receiver.address, block_s=0.1)
    for round in range(2):
      outlet.send(round, one(round))
    exchanges.wait_until(lambda: len(os.listdir(receiver.folder)) == 2)
    began = time.monotonic()
    receiver.server.close()
    assert time.monotonic() - began < exchanges.DEADLINE_S / 6
  receiver.collect(1)  # Makes room.
  exchanges.wait_until(lambda: set(threading.enumerate()) <= before)
