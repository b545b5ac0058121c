# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Mutual TLS between the store and its clients, with certificates of openssl.

Skips where jaxlib does not offer it (before 0.11).
"""

import importlib.metadata
import pathlib
import shutil
import socket
import subprocess
import tempfile
import threading

from absl.testing import absltest

from tba_jax.transport import base
from tba_jax.transport import locator
from tests.transport import running_host

_NAMES = "subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n"
_TEXT = b"forty bytes that can be read on the way "


def setUpModule():
  found = importlib.metadata.version("jaxlib")
  if tuple(map(int, found.split(".")[:2])) < (0, 11):
    raise absltest.SkipTest(f"jaxlib {found} has no mutual TLS")
  if shutil.which("openssl") is None:
    raise absltest.SkipTest("there is no openssl to make certificates with")


def _openssl(*args):
  subprocess.run(["openssl", *args], check=True, capture_output=True)


def make_tls(folder, authority):
  """Returns the files of a host that an authority of its own vouches for."""
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
  return locator.Tls(path("host.pem"), path("host.key"), path("ca.pem"))


class Listener:
  """Passes bytes on to an address, and keeps them."""

  def __init__(self, address):
    host, _, port = address.rpartition(":")
    self._target = host, int(port)
    self._server = socket.create_server(("127.0.0.1", 0))
    self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
    self.heard = bytearray()
    threading.Thread(target=self._run, daemon=True).start()

  def close(self):
    self._server.close()

  def _run(self):
    while True:
      try:
        near, _ = self._server.accept()
      except OSError:
        return
      far = socket.create_connection(self._target)
      for pair in ((near, far), (far, near)):
        threading.Thread(target=self._pass, args=pair, daemon=True).start()

  def _pass(self, source, target):
    try:
      while data := source.recv(1 << 16):
        self.heard += data
        target.sendall(data)
    except OSError:
      pass


class TlsTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.ours = make_tls(folder, "ours")
    cls.other = make_tls(folder, "other")
    cls.host = cls.enterClassContext(
        running_host.RunningHost(address="127.0.0.1:0", tls=cls.ours)
    )

  def heard_of(self, tls, deadline_s=60.0):
    """Puts a value from a client with these files; returns bytes on the way."""
    found = locator.read_locator(self.host.host.locator_path)
    listener = Listener(found.address)
    self.addCleanup(listener.close)
    where = locator.Locator(
        found.run, found.generation, listener.address, found.pid
    )
    client = self.host.client(
        locator_path=lambda: where, tls=tls, deadline_s=deadline_s
    )
    client.put("k", _TEXT)
    self.assertEqual(client.get("k"), _TEXT)
    return bytes(listener.heard)

  def test_who_has_a_certificate_is_served_and_nobody_reads_along(self):
    heard = self.heard_of(self.ours)
    self.assertGreater(len(heard), 2 * len(_TEXT))
    self.assertNotIn(_TEXT, heard)

  def test_who_has_none_is_not_served(self):
    with self.assertRaises(base.DeadlineExceededError):
      self.heard_of(None, deadline_s=3.0)

  def test_a_certificate_of_another_authority_is_none(self):
    mixed = locator.Tls(
        self.other.cert_file, self.other.key_file, self.ours.ca_file
    )
    with self.assertRaises(base.DeadlineExceededError):
      self.heard_of(mixed, deadline_s=3.0)

  def test_a_client_does_not_speak_to_a_store_of_another_authority(self):
    mixed = locator.Tls(
        self.ours.cert_file, self.ours.key_file, self.other.ca_file
    )
    with self.assertRaises(base.DeadlineExceededError):
      self.heard_of(mixed, deadline_s=3.0)


if __name__ == "__main__":
  absltest.main()
