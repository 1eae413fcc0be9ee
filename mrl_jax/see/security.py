"""Where policies of other processes are, and who may connect: mutual TLS.

Without certificates only the loopback interface may be used, unless the user
allows more. Nothing here needs gRPC.
"""

from collections.abc import Mapping
import contextlib
import dataclasses
import ipaddress
import pathlib
import re
import ssl

from mrl_jax import checks

_ADDRESS = re.compile(r'([\w.-]+|\[[\da-fA-F:.]+\]):(\d{1,5})', re.ASCII)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
  """How this process and others reach each other."""

  listen: str = ''  # HOST:PORT on which this process receives, if it does.
  # HOST:PORT of each policy of another process, by name.
  addresses: Mapping[str, str] = dataclasses.field(default_factory=dict)
  max_bytes: int = 16 * 2**20  # Size of the largest message.
  # Paths of PEM files: of the authority that must have signed the certificates
  # of both sides, and of this process's certificate and private key. All are
  # empty if connections are not encrypted.
  ca: str = ''
  cert: str = ''
  key: str = ''
  allow_insecure: bool = False  # Allow that beyond the loopback interface.

  def check(self) -> None:
    """Raises InputError unless peers can reach this process safely."""
    checks.require(
      bool(self.listen) or not self.addresses,
      'see.listen is empty; policies of other processes need an address, '
      'HOST:PORT, where they reach those of this process',
    )
    for address in filter(None, (self.listen, *self.addresses.values())):
      self.check_address(address)

  def check_address(self, address: str) -> None:
    """Raises InputError if an address is malformed or open to anybody."""
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
      f'{address} is not a loopback address, so anybody could read and send '
      'records: give --config.see.tls.ca, .cert and .key, or, in a network '
      'where everybody is trusted, --config.see.allow_insecure=True',
    )

  def read_pem(self, address: str) -> tuple[bytes, bytes, bytes] | None:
    """Checks `address`; returns the contents of the files `ca, key, cert`.

    The files are tried out, as gRPC would find a fault only much later.
    Returns None if connections are not encrypted. Raises InputError if the
    address or a file cannot be used.
    """
    self.check_address(address)
    if not self.ca:
      return None
    paths = (self.ca, self.key, self.cert)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
      contents = tuple(pathlib.Path(path).read_bytes() for path in paths)
      context.load_verify_locations(self.ca)
      context.load_cert_chain(self.cert, self.key, password='')
    except OSError as error:  # `ssl.SSLError` is one.
      raise checks.InputError(
        f'see.tls.ca={self.ca} must hold certificates, see.tls.cert={self.cert}'
        f' and see.tls.key={self.key} a certificate and its key, all in PEM '
        f'format and without a password: {error}'
      ) from error
    return contents


def _is_loopback(host: str) -> bool:
  with contextlib.suppress(ValueError):
    return ipaddress.ip_address(host.strip('[]')).is_loopback
  return host == 'localhost'
