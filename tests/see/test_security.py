"""Who may connect, and who may not."""

import contextlib
import os
import socket

from cryptography.hazmat.primitives import serialization
import grpc
import pytest
import trustme

from mrl_jax import checks
from mrl_jax.see import security as security_lib
from tests import exchanges
from tests import rpcs

Code = grpc.StatusCode


@pytest.mark.parametrize(
  'address', ['127.0.0.1:1', '127.8.9.1:65535', 'localhost:80', '[::1]:80']
)
def test_the_loopback_interface_may_be_plain(address):
  rpcs.PLAIN.check(address)


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
  rpcs.refuses(
    stack, address, rpcs.PLAIN, r'not a loopback.*tls\.ca.*allow_insecure'
  )
  security_lib.Security(allow_insecure=True).check(address)
  security_lib.Security(ca='ca', cert='cert', key='key').check(address)


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
  everybody = security_lib.Security(allow_insecure=True)
  rpcs.refuses(
    stack, address, everybody, 'is not an address; it must be HOST:PORT'
  )


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
    made[name] = security_lib.Security(
      ca=pem(f'{name}_ca', authorities[by].cert_pem.bytes()),
      cert=pem(f'{name}_cert', leaf.cert_chain_pems[0].bytes()),
      key=pem(f'{name}_key', leaf.private_key_pem.bytes()),
    )
  return made


def changed(security, **paths):
  return security_lib.Security(
    **{'ca': security.ca, 'cert': security.cert, 'key': security.key, **paths}
  )


@pytest.mark.parametrize('lacks', ['ca', 'cert', 'key'])
def test_half_of_a_security_is_refused(stack, tls, lacks):
  half = changed(tls['ours'], **{lacks: ''})
  rpcs.refuses(stack, '127.0.0.1:80', half, 'all of ca, cert and key, or none')


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
    rpcs.refuses(stack, address, security, match)


def test_a_key_of_another_certificate_is_refused(stack, tls):
  mixed = changed(tls['ours'], key=tls['too'].key)
  rpcs.refuses(
    stack, exchanges.free_address(), mixed, 'a certificate and its key'
  )


def test_a_key_with_a_password_is_refused_and_not_asked_for(stack, tls, pem):
  with open(tls['ours'].key, 'rb') as f:
    key = serialization.load_pem_private_key(f.read(), None)
  locked = key.private_bytes(
    serialization.Encoding.PEM,
    serialization.PrivateFormat.PKCS8,
    serialization.BestAvailableEncryption(b'secret'),
  )
  security = changed(tls['ours'], key=pem('locked', locked))
  rpcs.refuses(stack, exchanges.free_address(), security, 'without a password')


@pytest.mark.parametrize('host', ['127.0.0.1', 'localhost'])
def test_a_port_that_is_taken_is_refused(stack, tmp_path, host):
  with socket.socket() as taken:
    taken.bind(('127.0.0.1', 0))
    taken.listen()
    address = f'{host}:{taken.getsockname()[1]}'
    with pytest.raises(checks.InputError, match=f'see.listen={address} cannot'):
      rpcs.Receiver(stack, tmp_path, address=address)


def test_two_servers_do_not_share_a_port(stack, tmp_path):
  address = rpcs.Receiver(stack, tmp_path / '1').address
  with pytest.raises(checks.InputError, match='another process does'):
    rpcs.Receiver(stack, tmp_path / '2', address=address)


def test_everybody_may_write_where_that_is_allowed(stack, tmp_path):
  port = exchanges.free_address().partition(':')[2]
  receiver = rpcs.Receiver(
    stack,
    tmp_path,
    address=f'0.0.0.0:{port}',
    security=security_lib.Security(allow_insecure=True),
  )
  rpcs.sender(stack, f'127.0.0.1:{port}').send(0, rpcs.one())
  receiver.heard()
  assert len(receiver.collect()) == 1


@pytest.mark.parametrize('host', ['127.0.0.1', 'localhost'])
def test_certificates_of_one_authority_let_messages_through(
  stack, tmp_path, tls, host
):
  receiver = rpcs.Receiver(stack, tmp_path, security=tls['ours'])
  address = receiver.address.replace('127.0.0.1', host)
  outlet = rpcs.sender(stack, address, security=tls['too'])
  outlet.send(0, rpcs.one())
  rpcs.settled(outlet)
  assert rpcs.fates(outlet) == {'published': 1, 'acknowledged': 1}
  assert len(receiver.collect()) == 1


@pytest.mark.parametrize(
  'stranger', ['plain', 'another certificate', 'another authority']
)
def test_of_strangers_nothing_gets_in_and_they_keep_trying(
  stack, tmp_path, tls, caplog, stranger
):
  ours, theirs = tls['ours'], tls['theirs']
  security, friend = {
    'plain': (rpcs.PLAIN, rpcs.PLAIN),
    'another certificate': (
      changed(theirs, ca=ours.ca),
      changed(ours, ca=theirs.ca),
    ),
    'another authority': (theirs, theirs),
  }[stranger]
  address = exchanges.free_address()
  outlet = rpcs.sender(stack, address, security=security)
  with contextlib.ExitStack() as until_closed:
    receiver = rpcs.Receiver(
      until_closed, tmp_path / '1', address=address, security=ours
    )
    outlet.send(0, rpcs.one())
    exchanges.wait_until(lambda: 'a cannot reach b at' in caplog.text)
    assert f'{address} and will keep trying (is it up, with' in caplog.text
    assert rpcs.fates(outlet) == {'published': 1, 'waiting': 1}
    assert receiver.is_untouched()
  receiver = rpcs.Receiver(
    stack, tmp_path / '2', address=address, security=friend
  )
  rpcs.settled(outlet)
  assert len(receiver.collect()) == 1
  assert caplog.text.count('a cannot reach b at') == 1


def test_without_a_certificate_nothing_gets_in(stack, tmp_path, tls):
  receiver = rpcs.Receiver(stack, tmp_path, security=tls['ours'])
  with open(tls['ours'].ca, 'rb') as f:
    anonymous = grpc.ssl_channel_credentials(f.read())
  code, _ = rpcs.call(receiver.address, rpcs.message(rpcs.one()), anonymous)
  assert code is Code.UNAVAILABLE
  assert receiver.is_untouched()


def test_to_a_server_without_encryption_nothing_is_sent(stack, tls, caplog):
  fake = rpcs.Fake(stack, rpcs.take_all)
  rpcs.sender(stack, fake.address, security=tls['ours']).send(0, rpcs.one())
  exchanges.wait_until(lambda: 'a cannot reach b at' in caplog.text)
  assert not fake.messages


def test_a_server_of_another_authority_is_sent_nothing(
  stack, tmp_path, tls, caplog
):
  # It would take certificates of either authority.
  with open(tls['ours'].ca) as ours, open(tls['theirs'].ca) as theirs:
    (tmp_path / 'both').write_text(ours.read() + theirs.read())
  receiver = rpcs.Receiver(
    stack,
    tmp_path,
    security=changed(tls['theirs'], ca=os.fspath(tmp_path / 'both')),
  )
  outlet = rpcs.sender(stack, receiver.address, security=tls['ours'])
  outlet.send(0, rpcs.one())
  exchanges.wait_until(lambda: 'a cannot reach b at' in caplog.text)
  assert rpcs.fates(outlet) == {'published': 1, 'waiting': 1}
  assert receiver.is_untouched()


# What is tried again.
