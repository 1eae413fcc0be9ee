"""Certificates of an authority of trustme that it cannot issue itself."""

import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509 import oid
import trustme


def issue(authority: trustme.CA, name: str, usage=()) -> tuple[bytes, bytes]:
  """A key and a certificate of any name, as PEM.

  `usage` are names in `ExtendedKeyUsageOID`; without any, it is not restricted.
  """
  key = ec.generate_private_key(ec.SECP256R1())
  ca = x509.load_pem_x509_certificate(authority.cert_pem.bytes())
  ca_key = serialization.load_pem_private_key(
    authority.private_key_pem.bytes(), None
  )
  now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
  names = x509.SubjectAlternativeName([x509.DNSName(name)])
  builder = (
    x509.CertificateBuilder()
    .subject_name(x509.Name([]))
    .issuer_name(ca.subject)
    .public_key(key.public_key())
    .serial_number(x509.random_serial_number())
    .not_valid_before(now - day)
    .not_valid_after(now + day)
    .add_extension(names, critical=True)
  )
  if usage:
    usages = [getattr(oid.ExtendedKeyUsageOID, name) for name in usage]
    builder = builder.add_extension(
      x509.ExtendedKeyUsage(usages), critical=False
    )
  private = key.private_bytes(
    serialization.Encoding.PEM,
    serialization.PrivateFormat.PKCS8,
    serialization.NoEncryption(),
  )
  certificate = builder.sign(ca_key, hashes.SHA256())
  return private, certificate.public_bytes(serialization.Encoding.PEM)
