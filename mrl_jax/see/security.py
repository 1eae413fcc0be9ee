"""Who may connect to whom: mutual TLS, or nobody from outside."""

import dataclasses
import ipaddress
import re
import ssl

import grpc

from mrl_jax import checks

_ADDRESS = re.compile(r'([\w.-]+|\[[\da-fA-F:.]+\]):(\d{1,5})', re.ASCII)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Security:
  """Who may connect.

  Attributes:
    ca, cert, key: paths of PEM files; the certificates of both sides must be
      signed by `ca`. All empty is no encryption.
    allow_insecure: whether that may be so beyond the loopback interface.
  """

  ca: str = ''
  cert: str = ''
  key: str = ''
  allow_insecure: bool = False

  def check(self, address: str) -> None:
    """Refuses an address that is malformed, or open to anybody.

    Raises:
      InputError: says what to give.
    """
    parts = _ADDRESS.fullmatch(address)
    checks.require(
      parts is not None and 0 < int(parts[2]) < 2**16,
      f'{address!r} is not an address; it must be HOST:PORT, with the host in '
      'brackets if it has colons',
    )
    paths = (self.ca, self.cert, self.key)
    checks.require(
      all(paths) or not any(paths),
      'see.tls needs all of ca, cert and key, or none of them',
    )
    checks.require(
      all(paths) or self.allow_insecure or _is_loopback(parts[1]),
      f'{address} is not a loopback address, and anybody could read and write '
      'there: give --config.see.tls.ca, .cert and .key, or, in a network where '
      'everybody is trusted, --config.see.allow_insecure=True',
    )

  def of_server(self) -> grpc.ServerCredentials | None:
    if not self.ca:
      return None
    ca, cert, key = self._read()
    return grpc.ssl_server_credentials(
      [(key, cert)], root_certificates=ca, require_client_auth=True
    )

  def of_client(self) -> grpc.ChannelCredentials | None:
    if not self.ca:
      return None
    ca, cert, key = self._read()
    return grpc.ssl_channel_credentials(ca, key, cert)

  def _read(self) -> list[bytes]:
    """The three files, tried out: gRPC would find a fault only much later."""
    contents = []
    for name in ('ca', 'cert', 'key'):
      try:
        with open(getattr(self, name), 'rb') as f:
          contents.append(f.read())
      except OSError as error:
        raise checks.InputError(f'see.tls.{name}: {error}') from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
      context.load_verify_locations(self.ca)
    except ssl.SSLError as error:
      raise checks.InputError(
        f'see.tls.ca={self.ca} holds no certificates in PEM format: {error}'
      ) from error
    try:
      context.load_cert_chain(self.cert, self.key, password='')
    except ssl.SSLError as error:
      raise checks.InputError(
        f'see.tls.cert={self.cert} and see.tls.key={self.key} must be a '
        f'certificate and its key, both in PEM format and without a password: '
        f'{error}'
      ) from error
    return contents


def _is_loopback(host):
  if host == 'localhost':
    return True
  try:
    return ipaddress.ip_address(host.strip('[]')).is_loopback
  except ValueError:
    return False
