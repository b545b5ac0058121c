# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Mutual TLS of store and clients; needs jaxlib 0.11 and openssl."""

import dataclasses
import importlib.metadata
import pathlib
import shutil
import subprocess
import tempfile

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.transport import base
from tba_jax.transport import locator
from tests.transport import running_host
from tests.transport import tcp_proxy

_NAMES = "subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n"
_TEXT = b"forty bytes of plain text in a connection"


def setUpModule():
  found = importlib.metadata.version("jaxlib")
  if tuple(map(int, found.split(".")[:2])) < (0, 11):
    raise absltest.SkipTest(f"jaxlib {found} has no mutual TLS")
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
  return locator.Tls(path("host.pem"), path("host.key"), path("ca.pem"))


class TlsTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.ours = make_tls(folder, "ours")
    cls.other = make_tls(folder, "other")
    cls.host = cls.enterClassContext(
        running_host.RunningHost(address="127.0.0.1:0", tls=cls.ours)
    )

  def forwarded(self, tls, deadline_s=60.0):
    """Puts and gets a value; returns the bytes on the way."""
    found = locator.read_locator(self.host.host.locator_path)
    proxy = self.enterContext(
        tcp_proxy.TcpProxy(locator.split_address(found.address))
    )
    near = dataclasses.replace(found, address=proxy.address)
    client = self.host.client(
        locator_path=lambda: near, tls=tls, deadline_s=deadline_s
    )
    client.put("k", _TEXT)
    self.assertEqual(client.get("k"), _TEXT)
    return bytes(proxy.forwarded)

  def test_client_with_a_certificate_is_served_encrypted(self):
    forwarded = self.forwarded(self.ours)
    self.assertGreater(len(forwarded), 2 * len(_TEXT))
    self.assertNotIn(_TEXT, forwarded)

  @parameterized.parameters(None, "client", "store")
  def test_certificate_of_another_authority_is_refused(self, side):
    ours, other = self.ours, self.other
    tls = {
        None: None,
        "client": locator.Tls(other.cert_file, other.key_file, ours.ca_file),
        "store": locator.Tls(ours.cert_file, ours.key_file, other.ca_file),
    }[side]
    with self.assertRaises(base.DeadlineExceededError):
      self.forwarded(tls, deadline_s=1.5)


if __name__ == "__main__":
  absltest.main()
