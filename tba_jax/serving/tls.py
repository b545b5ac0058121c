# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""TLS files that a server makes: authority, certificate and key.

At its first start, a server that other machines can reach makes an authority
and a certificate signed by it; the authority's key is discarded. Clients get
`ca.pem`, which vouches for this certificate alone.
"""

from collections.abc import Sequence
import ipaddress
import pathlib
import socket

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tba_jax.system import jsonl
from tba_jax.transport.kv import certificates

CERT, KEY, CA = "cert.pem", "key.pem", "ca.pem"


def names_of(host: str, more: str) -> list[str]:
  """Returns the names by which clients may call a server.

  Args:
    more: further names and addresses, separated by commas.
  """
  hostname = socket.gethostname()
  names = [host, hostname, "localhost", "127.0.0.1", *more.split(",")]
  names = [name.strip() for name in names]
  unspecified = ("", "0.0.0.0", "::")
  return [n for n in dict.fromkeys(names) if n not in unspecified]


def make(folder: pathlib.Path, names: Sequence[str]) -> None:
  """Writes key, certificate and authority, unless they exist for these names.

  Args:
    folder: directory with mode 0700.
    names: DNS names and IP addresses for the certificate.

  Raises:
    ValueError: a name is invalid in a certificate.
  """
  alt_names = [_general_name(name) for name in names]
  if _names(folder / CERT) == alt_names and (folder / KEY).exists():
    return
  folder.mkdir(parents=True, exist_ok=True, mode=0o700)
  authority, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
  ca = _signed("authority", authority, authority, [], is_authority=True)
  cert = _signed("server", key, authority, alt_names, is_authority=False)
  pem = serialization.Encoding.PEM
  contents = {
      CA: ca.public_bytes(pem),
      KEY: key.private_bytes(
          pem,
          serialization.PrivateFormat.PKCS8,
          serialization.NoEncryption(),
      ),
      # Written last: its presence means that all three are complete.
      CERT: cert.public_bytes(pem),
  }
  for name, content in contents.items():
    with jsonl.replacing(folder / name, private=True) as file:
      file.write(content)


def _general_name(name: str) -> x509.GeneralName:
  try:
    return x509.IPAddress(ipaddress.ip_address(name))
  except ValueError:
    pass
  try:
    return x509.DNSName(name)
  except ValueError as error:
    raise ValueError(
        f"config.serve.tls_names: {name!r}: {error}; must be names and"
        " addresses of this machine, separated by commas"
    ) from error


def _names(path: pathlib.Path) -> list[x509.GeneralName] | None:
  """Returns the names of a certificate, or None."""
  try:
    cert = x509.load_pem_x509_certificate(path.read_bytes())
    extension = cert.extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
  except (OSError, ValueError, x509.ExtensionNotFound):
    return None
  return list(extension.value)


def _signed(
    label: str,
    key: ec.EllipticCurvePrivateKey,
    authority: ec.EllipticCurvePrivateKey,
    names: Sequence[x509.GeneralName],
    *,
    is_authority: bool,
) -> x509.Certificate:
  public = authority.public_key()
  builder = (
      certificates.builder(label, key.public_key(), x509.random_serial_number())
      .add_extension(
          x509.BasicConstraints(
              ca=is_authority, path_length=0 if is_authority else None
          ),
          critical=True,
      )
      .add_extension(
          x509.AuthorityKeyIdentifier.from_issuer_public_key(public),
          critical=False,
      )
  )
  if is_authority:
    builder = builder.add_extension(
        x509.SubjectKeyIdentifier.from_public_key(public), critical=False
    ).add_extension(
        x509.KeyUsage(
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=False,
            encipher_only=False,
            decipher_only=False,
        ),
        critical=True,
    )
  else:
    builder = builder.add_extension(
        x509.SubjectAlternativeName(names), critical=False
    ).add_extension(
        x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]),
        critical=False,
    )
  return builder.sign(authority, hashes.SHA256())
