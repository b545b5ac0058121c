# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Mutual TLS of store and clients; skips where jaxlib has none."""

import dataclasses
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.transport import byte_store
from tba_jax.transport.kv import certificates
from tba_jax.transport.kv import locator
from tests.transport import running_host
from tests.transport import strangers
from tests.transport import tcp_proxy

_NAMES = "subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n"
_TEXT = b"forty bytes of plain text in a connection"


def setUpModule():
  if not certificates.is_supported():
    version = certificates.jaxlib_version()
    raise absltest.SkipTest(f"jaxlib {version} has no mutual TLS")


def need_openssl():
  if shutil.which("openssl") is None:
    raise absltest.SkipTest("openssl is not installed")


def _openssl(*args):
  subprocess.run(["openssl", *args], check=True, capture_output=True)


def make_tls(folder, authority):
  """Returns a host's files, signed by a new authority."""
  folder = pathlib.Path(folder) / authority
  folder.mkdir()
  path = lambda name: str(folder / name)
  _openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout",
           path("ca.key"), "-out", path("ca.pem"), "-subj",
           f"/CN={authority}")  # fmt: skip
  _openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", path("host.key"),
           "-out", path("host.csr"), "-subj", "/CN=localhost")  # fmt: skip
  (folder / "names").write_text(_NAMES)
  _openssl("x509", "-req", "-in", path("host.csr"), "-CA", path("ca.pem"),
           "-CAkey", path("ca.key"), "-CAcreateserial", "-out",
           path("host.pem"), "-extfile", path("names"))  # fmt: skip
  return certificates.Tls(path("host.pem"), path("host.key"), path("ca.pem"))


class NamedFilesTest(parameterized.TestCase):
  """Files that settings name, of an authority of openssl."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    need_openssl()
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.ours = make_tls(folder, "ours")
    cls.other = make_tls(folder, "other")
    cls.host = cls.enterClassContext(
        running_host.RunningHost(address="127.0.0.1:0", tls=cls.ours)
    )

  def forwarded(self, tls, deadline_s=60.0):
    """Puts and gets a value; returns the bytes on the way."""
    result = locator.read_locator(self.host.host.locator_path)
    proxy = self.enterContext(
        tcp_proxy.TcpProxy(locator.split_address(result.address))
    )
    near = dataclasses.replace(
        result, address=proxy.address, tls=tls is not None
    )
    client = self.host.client(
        locator_path=lambda: near, tls=tls, deadline_s=deadline_s
    )
    client.put("k", _TEXT)
    self.assertEqual(client.get("k"), _TEXT)
    return bytes(proxy.forwarded)

  def test_client_with_certificate_is_served_encrypted(self):
    forwarded = self.forwarded(self.ours)
    self.assertGreater(len(forwarded), 2 * len(_TEXT))
    self.assertNotIn(_TEXT, forwarded)

  @parameterized.parameters(None, "client", "store")
  def test_certificate_of_another_authority_is_refused(self, side):
    ours, other = self.ours, self.other
    tls = {
        None: None,
        "client": certificates.Tls(
            other.cert_file, other.key_file, ours.ca_file
        ),
        "store": certificates.Tls(ours.cert_file, ours.key_file, other.ca_file),
    }[side]
    with self.assertRaises(byte_store.DeadlineExceededError):
      self.forwarded(tls, deadline_s=1.5)


class OwnFilesTest(parameterized.TestCase):
  """Files that each host makes from the run's secret."""

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.secret = b"k" * 32
    self.running = self.enterContext(
        running_host.RunningHost(address="127.0.0.1:0", tls=self.make("store"))
    )
    self.found = locator.read_locator(self.running.host.locator_path)

  def make(self, name):
    folder = self.folder / name
    folder.mkdir()
    return certificates.make(folder, self.secret)

  def test_another_host_with_secret_is_served_by_each_generation(self):
    client = self.running.client(tls=self.make("another"))
    client.put("k", _TEXT)
    self.assertEqual(client.get("k"), _TEXT)
    os.kill(self.running.host.child_pid, signal.SIGKILL)
    with self.assertRaises(byte_store.TransportError):
      while True:
        client.get("k")
    self.assertEqual(client.reconnect(), 2)
    client.put("k", _TEXT)
    self.assertEqual(client.get("k"), _TEXT)

  @parameterized.parameters("127.0.0.1", "localhost", "::1")
  def test_any_name_of_host_will_do(self, name):
    tls = self.make("host")
    with running_host.RunningHost(address=f"[{name}]:0", tls=tls) as running:
      client = running.client(tls=tls)
      client.put("k", b"v")
      self.assertEqual(client.get("k"), b"v")

  def test_strangers_get_nothing_and_store_continues(self):
    client = self.running.client(tls=self.make("another"))
    client.put("k", _TEXT)
    address, tls = self.found.address, self.make("mine")
    for _ in range(20):
      strangers.send_garbage(address)
      self.assertEmpty(strangers.speak_tls(address))
    other = strangers.of_another_run(self.folder / "other")
    for files in (
        None,
        other,
        dataclasses.replace(other, ca_file=tls.ca_file),
        dataclasses.replace(other, key_file=tls.key_file, ca_file=tls.ca_file),
    ):
      self.assertIsNone(strangers.attach(self.found, files))
    self.assertIsNotNone(strangers.attach(self.found, tls, deadline_s=60.0))
    self.assertEqual(client.get("k"), _TEXT)
    self.assertEqual(self.running.kinds(), ["started"])

  def test_client_without_tls_is_reported_so(self):
    self.assertTrue(self.found.tls)
    with self.assertRaisesRegex(
        byte_store.TransportError,
        "the store uses mutual TLS",
    ):
      self.running.client(tls=None)
