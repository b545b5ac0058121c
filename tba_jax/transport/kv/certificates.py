# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Mutual TLS files that a run makes from its secret.

The keys of the authority and of the certificate that it signs are derived from
the secret. Every host with the secret makes the same files, at each start, and
a client without it fails the handshake. The certificate names a URI, since
addresses are not known when it is made.
"""

import dataclasses
import datetime
import importlib.metadata
import os
import pathlib
import re
from typing import Any

from tba_jax.system import jsonl

# First version of jaxlib whose key-value service has mutual TLS.
NEEDED = "0.11.2"
# URI that JAX looks for in the peer's certificate, instead of the host name.
_URI = "tba-jax://run/"
# Wide, since clocks may differ and a run may be resumed after years. The end is
# the date that RFC 5280 (4.1.2.5) prescribes for certificates without expiry.
BEGIN = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
END = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
# Order of the curve P-256.
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


@dataclasses.dataclass(frozen=True)
class Tls:
  """PEM files of mutual TLS.

  cert_file, key_file: certificate and key of this host.
  ca_file: certificate of the authority that both sides trust.
  peer_uri_prefix: beginning of a URI in the peer's certificate; "" = clients
    look for the service's address instead.
  """

  cert_file: str
  key_file: str
  ca_file: str
  peer_uri_prefix: str = ""

  def jax_options(self) -> dict[str, Any]:
    """Returns the keyword arguments of JAX's services and clients."""
    files = {k: v for k, v in dataclasses.asdict(self).items() if v}
    options = {f"mtls_{k}": v for k, v in files.items()}
    # No fallback to an insecure connection.
    return options | {"verify_secure_credentials": True}


def is_supported() -> bool:
  """Returns whether the installed jaxlib has mutual TLS."""
  return _numbers(jaxlib_version()) >= _numbers(NEEDED)


def jaxlib_version() -> str:
  """Returns jaxlib's installed version, without importing jaxlib."""
  return importlib.metadata.version("jaxlib")


def unguarded(address: str) -> str:
  """Returns the warning about an address that this host serves without TLS."""
  reason = (
      "config.store.insecure = True leaves mutual TLS out"
      if is_supported()
      else f"jaxlib {jaxlib_version()} has no mutual TLS, {NEEDED} (Python"
      " 3.12) has"
  )
  return (
      f"warning: anyone who reaches {address} can halt this run and read its"
      f" params and completions: {reason}"
  )


def _numbers(version: str) -> list[int]:
  """Returns the first three numbers of a version such as "0.11.2.dev3"."""
  return [int(number) for number in re.findall(r"\d+", version)[:3]]


def make(folder: str | os.PathLike[str], secret: bytes) -> Tls:
  """Returns the files of a run; writes those that are missing or differ.

  Args:
    folder: directory private to this user; processes may share it.
    secret: run's secret.
  """
  paths = []
  for name, content in _contents(secret).items():
    path = pathlib.Path(folder, name)
    if not path.exists() or path.read_bytes() != content:
      with jsonl.replacing(path, private=True) as file:
        file.write(content)
    paths.append(str(path))
  return Tls(*paths, peer_uri_prefix=_URI)


def builder(label: str, public_key: Any, serial_number: int) -> Any:
  """Returns an `x509.CertificateBuilder` for the authority to sign."""
  from cryptography import x509  # pylint: disable=g-import-not-at-top

  named = lambda text: x509.Name(
      [x509.NameAttribute(x509.NameOID.COMMON_NAME, f"tba_jax {text}")]
  )
  return x509.CertificateBuilder(
      issuer_name=named("authority"),
      subject_name=named(label),
      public_key=public_key,
      serial_number=serial_number,
      not_valid_before=BEGIN,
      not_valid_after=END,
  )


def _contents(secret: bytes) -> dict[str, bytes]:
  """Returns certificate, key and authority by file name."""
  # Imported here: a run without a port needs no certificates.
  # pylint: disable=g-import-not-at-top
  from cryptography import x509
  from cryptography.hazmat.primitives import hashes
  from cryptography.hazmat.primitives import serialization
  from cryptography.hazmat.primitives.asymmetric import ec
  from cryptography.hazmat.primitives.kdf import hkdf

  def derive(label: str) -> ec.EllipticCurvePrivateKey:
    # 64 bits more than the order: the bias of the remainder is negligible.
    text = hkdf.HKDF(
        hashes.SHA256(), length=40, salt=None, info=f"tba_jax {label}".encode()
    ).derive(secret)
    number = int.from_bytes(text) % (_ORDER - 1) + 1
    return ec.derive_private_key(number, ec.SECP256R1())

  authority = builder(
      "authority", derive("authority").public_key(), 1
  ).add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
  names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(_URI)])
  host = builder("host", derive("host").public_key(), 2)
  host = host.add_extension(names, critical=True).add_extension(
      x509.ExtendedKeyUsage(
          [
              x509.ExtendedKeyUsageOID.SERVER_AUTH,
              x509.ExtendedKeyUsageOID.CLIENT_AUTH,
          ]
      ),
      critical=False,
  )

  def signed(builder: x509.CertificateBuilder) -> bytes:
    # Deterministic: processes that share a folder write the same bytes.
    return builder.sign(
        derive("authority"), hashes.SHA256(), ecdsa_deterministic=True
    ).public_bytes(serialization.Encoding.PEM)

  key = derive("host").private_bytes(
      serialization.Encoding.PEM,
      serialization.PrivateFormat.PKCS8,
      serialization.NoEncryption(),
  )
  return {
      "cert.pem": signed(host),
      "key.pem": key,
      "ca.pem": signed(authority),
  }
