# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Certificates of a run are a function of its secret."""

import datetime
import pathlib
from unittest import mock

from absl.testing import parameterized
from cryptography import x509

from tba_jax.transport.kv import certificates

_SECRET = b"s" * 32


class CertificatesTest(parameterized.TestCase):

  def make(self, secret=_SECRET):
    """Returns the files as a new host makes them."""
    return certificates.make(self.create_tempdir().full_path, secret)

  def test_hosts_with_one_secret_make_same_files(self):
    ours, theirs, other = self.make(), self.make(), self.make(b"t" * 32)
    for name in ("cert_file", "key_file", "ca_file"):
      path = pathlib.Path(getattr(ours, name))
      self.assertEqual(path.stat().st_mode & 0o777, 0o600)
      self.assertNotIn(_SECRET, path.read_bytes())
      same, not_same = getattr(theirs, name), getattr(other, name)
      self.assertEqual(path.read_bytes(), pathlib.Path(same).read_bytes())
      self.assertNotEqual(
          path.read_bytes(), pathlib.Path(not_same).read_bytes()
      )

  def test_certificate_holds_for_any_address_and_clock(self):
    made = self.make()
    certificate, authority = (
        x509.load_pem_x509_certificate(pathlib.Path(path).read_bytes())
        for path in (made.cert_file, made.ca_file)
    )
    certificate.verify_directly_issued_by(authority)
    names = certificate.extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    ).value
    (uri,) = names.get_values_for_type(x509.UniformResourceIdentifier)
    self.assertStartsWith(uri, made.peer_uri_prefix)
    for each in (certificate, authority):
      self.assertLess(each.not_valid_before_utc.year, 2001)
      self.assertGreater(
          each.not_valid_after_utc,
          datetime.datetime(9000, 1, 1, tzinfo=datetime.UTC),
      )

  def test_only_missing_and_damaged_files_are_written(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    made = certificates.make(folder, _SECRET)
    inode = lambda path: pathlib.Path(path).stat().st_ino
    cert, key = inode(made.cert_file), inode(made.key_file)
    content = pathlib.Path(made.key_file).read_bytes()
    pathlib.Path(made.key_file).write_bytes(content[:100])
    self.assertEqual(certificates.make(folder, _SECRET), made)
    self.assertEqual(inode(made.cert_file), cert)
    self.assertNotEqual(inode(made.key_file), key)
    self.assertEqual(pathlib.Path(made.key_file).read_bytes(), content)
    self.assertLen(list(folder.iterdir()), 3)

  @parameterized.parameters(
      ("0.10.2", False), ("0.11.1", False), ("0.11.2", True),
      ("0.11.2.dev20260301", True), ("0.12.0.1", True), ("1.0", True),
  )  # fmt: skip
  def test_versions_without_mutual_tls_are_reported(self, version, supported):
    with mock.patch.object(
        certificates, "jaxlib_version", return_value=version
    ):
      self.assertEqual(certificates.is_supported(), supported)
      self.assertRegex(
          certificates.unguarded("10.0.0.1:7"),
          "config.store.insecure = True leaves"
          if supported
          else f"jaxlib {version} has no mutual TLS, 0.11.2",
      )
