"""Who may connect, and who may not."""

import contextlib
import os
import socket

from cryptography.hazmat.primitives import serialization
import grpc
import pytest
import trustme

from mrl_jax import checks
from mrl_jax.see import security
from tests import certificates
from tests import exchanges
from tests import rpcs

Code = grpc.StatusCode
INSECURE = {'allow_insecure': True}


@pytest.fixture
def refuse(stack, tmp_path):
  """Requires that neither senders nor receivers use an address."""

  def refuse(address, tls, match):
    with pytest.raises(checks.InputError, match=match):
      rpcs.sender(stack, address, tls=tls)
    with pytest.raises(checks.InputError, match=match):
      rpcs.Receiver(stack, tmp_path / 'refused', address=address, tls=tls)

  return refuse


# Addresses.


def test_policies_elsewhere_must_reach_those_here():
  network = security.Network(addresses={'b': '127.0.0.1:1'})
  with pytest.raises(checks.InputError, match=r'see\.listen is empty'):
    network.check()


@pytest.mark.parametrize(
  ('listen', 'theirs'),
  [('127.0.0.1:1', '10.0.0.1:1'), ('0.0.0.0:1', '[::1]:1'), ('a', 'a:1')],
)
def test_all_addresses_of_a_network_are_checked(listen, theirs):
  network = security.Network(listen=listen, addresses={'b': theirs})
  with pytest.raises(checks.InputError, match='is not a'):
    network.check()


@pytest.mark.parametrize(
  'address', ['127.0.0.1:1', '127.8.9.1:65535', 'localhost:80', '[::1]:80']
)
def test_the_loopback_interface_needs_no_encryption(address):
  security.Network(listen=address, addresses={'b': address}).check()


@pytest.mark.parametrize(
  'host',
  [
    *('0.0.0.0', '[::]', '10.0.0.1', '128.0.0.1', '[fe80::1]', '127.1'),
    *('host_a', 'localhost.example.org', '127.0.0.1.example.org'),
  ],
)
def test_other_addresses_need_certificates(refuse, host):
  address = f'{host}:80'
  refuse(address, {}, r'not a loopback.*tls\.ca.*allow_insecure')
  for tls in (INSECURE, {'ca': 'ca', 'cert': 'cert', 'key': 'key'}):
    security.Network(**tls).check_address(address)


@pytest.mark.parametrize(
  'address',
  [
    *('127.0.0.1', '[::1]', '127.0.0.1:', ':80', '::1:80'),
    *(f'127.0.0.1:{port}' for port in ('http', 0, 65536, -1, '80\n')),
    *('127.0.0.1:\uff18\uff10', '[localhost]:80', 'a b:80'),
    *('http://localhost:80', 'unix:/tmp/socket:80', 'ipv4:127.0.0.1:80'),
  ],
)
def test_a_malformed_address_is_refused(refuse, address):
  refuse(address, INSECURE, 'is not an address; it must be HOST:PORT')


@pytest.mark.parametrize('host', ['127.0.0.1', 'localhost'])
def test_a_port_of_another_process_is_refused(stack, tmp_path, host):
  with socket.socket() as taken:
    taken.bind(('127.0.0.1', 0))
    taken.listen()
    address = f'{host}:{taken.getsockname()[1]}'
    with pytest.raises(checks.InputError, match=f'see.listen={address} cannot'):
      rpcs.Receiver(stack, tmp_path, address=address)


def test_two_receivers_do_not_share_a_port(stack, tmp_path):
  address = rpcs.Receiver(stack, tmp_path / '1').address
  with pytest.raises(checks.InputError, match='another process does'):
    rpcs.Receiver(stack, tmp_path / '2', address=address)


# Certificates.


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
  """Paths by name: 'ours', 'too' and others of one authority, and 'theirs'."""
  made = {}
  authorities = {'ours': trustme.CA(), 'theirs': trustme.CA()}
  for name, by, policies in (
    ('ours', 'ours', 'ab'),
    ('too', 'ours', 'ab'),
    ('of_a', 'ours', 'a'),
    ('of_c', 'ours', 'c'),
    ('host', 'ours', ('localhost', '127.0.0.1')),
    ('theirs', 'theirs', 'ab'),
  ):
    leaf = authorities[by].issue_cert(*policies)
    made[name] = {
      'ca': pem(f'{name}_ca', authorities[by].cert_pem.bytes()),
      'cert': pem(f'{name}_cert', leaf.cert_chain_pems[0].bytes()),
      'key': pem(f'{name}_key', leaf.private_key_pem.bytes()),
    }
  return made


@pytest.mark.parametrize('name', ['ca', 'cert', 'key'])
def test_missing_and_damaged_files_are_named(refuse, tls, pem, tmp_path, name):
  for path, match in (
    ('', 'all of ca, cert and key, or none'),
    (tmp_path / 'nowhere', rf'see\.tls\.{name}=.*No such file.*nowhere'),
    (tmp_path, rf'see\.tls\.{name}=.*directory'),
    (pem('junk', b'junk'), rf'see\.tls\.{name}=\S*junk\.pem'),
    (pem('empty', b''), rf'see\.tls\.{name}=\S*empty\.pem'),
  ):
    paths = {**tls['ours'], name: os.fspath(path)}
    refuse(exchanges.free_address(), paths, match)


def test_a_key_must_be_of_the_certificate_and_have_no_password(
  refuse, tls, pem
):
  other = {**tls['ours'], 'key': tls['too']['key']}
  refuse(exchanges.free_address(), other, 'a certificate and its key')
  with open(tls['ours']['key'], 'rb') as f:
    key = serialization.load_pem_private_key(f.read(), None)
  locked = key.private_bytes(
    serialization.Encoding.PEM,
    serialization.PrivateFormat.PKCS8,
    serialization.BestAvailableEncryption(b'secret'),
  )
  paths = {**tls['ours'], 'key': pem('locked', locked)}
  refuse(exchanges.free_address(), paths, 'without a password')


# Connections.


def test_anybody_may_send_where_that_is_allowed(stack, tmp_path):
  port = exchanges.free_address().partition(':')[2]
  receiver = rpcs.Receiver(
    stack, tmp_path, address=f'0.0.0.0:{port}', tls=INSECURE
  )
  rpcs.sender(stack, f'127.0.0.1:{port}').send(0, exchanges.rollouts())
  receiver.wait_for_round()
  assert len(receiver.collect()) == 1


@pytest.mark.parametrize('host', ['127.0.0.1', 'localhost'])
def test_certificates_of_one_authority_connect(stack, tmp_path, tls, host):
  receiver = rpcs.Receiver(stack, tmp_path, tls=tls['ours'])
  address = receiver.address.replace('127.0.0.1', host)
  outlet = rpcs.sender(stack, address, tls=tls['too'])
  outlet.send(0, exchanges.rollouts())
  rpcs.wait_until_settled(outlet)
  assert rpcs.fates(outlet) == {'published': 1, 'acknowledged': 1}
  assert len(receiver.collect()) == 1


@pytest.mark.parametrize(
  'stranger', ['plain', 'another certificate', 'another authority']
)
def test_strangers_do_not_get_in_and_keep_trying(
  stack, tmp_path, tls, caplog, stranger
):
  ours, theirs = tls['ours'], tls['theirs']
  sender, friend = {
    'plain': ({}, {}),
    'another certificate': (
      {**theirs, 'ca': ours['ca']},
      {**ours, 'ca': theirs['ca']},
    ),
    'another authority': (theirs, theirs),
  }[stranger]
  address = exchanges.free_address()
  outlet = rpcs.sender(stack, address, tls=sender)
  with contextlib.ExitStack() as until_closed:
    receiver = rpcs.Receiver(
      until_closed, tmp_path / '1', address=address, tls=ours
    )
    outlet.send(0, exchanges.rollouts())
    exchanges.wait_until(lambda: 'a cannot reach b at' in caplog.text)
    assert f'{address} and will keep trying (is it up, with' in caplog.text
    assert rpcs.fates(outlet) == {'published': 1, 'waiting': 1}
    assert receiver.is_untouched()
  receiver = rpcs.Receiver(stack, tmp_path / '2', address=address, tls=friend)
  rpcs.wait_until_settled(outlet)
  assert len(receiver.collect()) == 1
  assert caplog.text.count('a cannot reach b at') == 1


@pytest.mark.parametrize('name', ['of_c', 'host'])
def test_a_certificate_speaks_for_its_own_policies(
  stack, tmp_path, tls, caplog, name
):
  receiver = rpcs.Receiver(stack, tmp_path, tls=tls['ours'], senders='ac')
  outlet = rpcs.sender(stack, receiver.address, tls=tls[name])
  outlet.send(0, exchanges.rollouts())
  rpcs.wait_until_settled(outlet)
  assert outlet.ledger.refusals() == {'b': {'certificate': 1}}
  assert receiver.transport.refused == {'certificate': 1}
  assert receiver.inbox.finished == {'a': -1, 'c': -1}
  assert not os.listdir(receiver.folder)
  assert "'a' to 'b', by one for" in caplog.text


def test_a_certificate_may_speak_for_several_policies(stack, tmp_path, tls):
  receiver = rpcs.Receiver(stack, tmp_path, tls=tls['of_a'] | {}, names='ba')
  # That of the receiver does not name b: nothing is sent to it.
  outlet = rpcs.sender(stack, receiver.address, tls=tls['ours'], peer='b')
  outlet.send(0, exchanges.rollouts())
  other = rpcs.Receiver(
    stack, tmp_path / '2', tls=tls['ours'], names='b', senders='ac'
  )
  for name, certificate in (('a', 'too'), ('c', 'of_c')):
    code, _ = rpcs.call(
      other.address,
      rpcs.message(exchanges.rollouts(policy=name), sender=name),
      rpcs.credentials(tls[certificate]),
      target='b',
    )
    assert code is Code.OK
  assert len(other.collect()) == 2
  assert receiver.is_untouched()
  assert rpcs.fates(outlet) == {'published': 1, 'waiting': 1}


@pytest.mark.parametrize(
  ('usage', 'served', 'accepted'),
  [
    (('CLIENT_AUTH',), False, True),
    (('SERVER_AUTH',), True, False),
    (('SERVER_AUTH', 'CLIENT_AUTH'), True, True),
    ((), True, True),
  ],
)
def test_a_certificate_is_used_only_for_what_it_is_made(
  stack, tmp_path, pem, usage, served, accepted
):
  """And a policy's name need not be that of a host."""
  authority = trustme.CA()
  ca = pem(f'ca{usage}', authority.cert_pem.bytes())

  def issue(name, usage):
    key, cert = certificates.issue(authority, name, usage)
    paths = pem(f'key_{name}{usage}', key), pem(f'cert_{name}{usage}', cert)
    return {'ca': ca, 'key': paths[0], 'cert': paths[1]}

  def code(theirs, mine):
    receiver = rpcs.Receiver(
      stack, tmp_path / str(len(os.listdir(tmp_path))), tls=theirs
    )
    message = rpcs.message(exchanges.rollouts())
    credentials = rpcs.credentials(mine)
    return rpcs.call(receiver.address, message, credentials, target='b_1')[0]

  both = issue('b_1', ()), issue('a', ())
  assert (code(issue('b_1', usage), both[1]) is Code.OK) == served
  assert (code(both[0], issue('a', usage)) is Code.OK) == accepted


@pytest.mark.parametrize('encrypted', [True, False])
def test_a_stranger_learns_nothing_of_the_run(stack, tmp_path, tls, encrypted):
  receiver = rpcs.Receiver(
    stack,
    tmp_path,
    run='5ec4e7',
    names=('b', 'secret'),
    senders=('a', 'hidden'),
    tls=tls['ours'] if encrypted else None,
  )
  # With a certificate for another policy, or none, and not knowing the run.
  mine = rpcs.credentials(tls['of_c']) if encrypted else None
  answers = set()
  for sender in ('a', 'hidden', 'nobody'):
    for name in ('b', 'secret', 'nobody'):
      for round in (0, 10**9):
        guess = rpcs.message(sender=sender, receiver=name, round=round)
        answers.add(rpcs.call(receiver.address, guess, mine, target='b'))
  ((code, details),) = answers  # Whatever it guesses, the answer is the same.
  assert code is Code.INVALID_ARGUMENT
  reason = 'certificate: ' if encrypted else 'run: '
  assert details.startswith(reason)
  assert not {'5ec4e7', 'secret', 'hidden'} & {
    *details.replace(',', '').split()
  }


def test_without_a_certificate_nobody_gets_in(stack, tmp_path, tls):
  receiver = rpcs.Receiver(stack, tmp_path, tls=tls['ours'])
  with open(tls['ours']['ca'], 'rb') as f:
    anonymous = grpc.ssl_channel_credentials(f.read())
  message = rpcs.message(exchanges.rollouts())
  code, _ = rpcs.call(receiver.address, message, anonymous, target='b')
  assert code is Code.UNAVAILABLE
  assert receiver.is_untouched()


def test_nothing_is_sent_to_a_receiver_without_encryption(stack, tls, caplog):
  fake = rpcs.Fake(stack)
  outlet = rpcs.sender(stack, fake.address, tls=tls['ours'])
  outlet.send(0, exchanges.rollouts())
  exchanges.wait_until(lambda: 'a cannot reach b at' in caplog.text)
  assert not fake.messages


def test_nothing_is_sent_to_a_receiver_of_another_authority(
  stack, tmp_path, tls, caplog
):
  # The receiver would accept certificates of either authority.
  with open(tls['ours']['ca']) as ours, open(tls['theirs']['ca']) as theirs:
    (tmp_path / 'both').write_text(ours.read() + theirs.read())
  receiver = rpcs.Receiver(
    stack,
    tmp_path,
    tls={**tls['theirs'], 'ca': os.fspath(tmp_path / 'both')},
  )
  outlet = rpcs.sender(stack, receiver.address, tls=tls['ours'])
  outlet.send(0, exchanges.rollouts())
  exchanges.wait_until(lambda: 'a cannot reach b at' in caplog.text)
  assert rpcs.fates(outlet) == {'published': 1, 'waiting': 1}
  assert receiver.is_untouched()
