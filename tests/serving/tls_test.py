# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""TLS of the server: whom a client may believe, and what is refused."""

import pathlib
import socket
import ssl
import stat
import threading

from absl.testing import absltest

from configs import serve as serve_config
from tba_jax.config import validate
from tba_jax.programs import serve
from tba_jax.serving import tls


def _greet(files, ca, name):
  """Returns what a client that asks for a name hears, or raises SSLError."""
  context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
  context.load_cert_chain(files["ssl_certfile"], files["ssl_keyfile"])
  with socket.create_server(("127.0.0.1", 0)) as listener:

    def answer():
      connection, _ = listener.accept()
      try:
        with context.wrap_socket(connection, server_side=True) as secure:
          secure.sendall(b"hello")
      except (ssl.SSLError, OSError):
        pass  # The client refuses; it says why.

    thread = threading.Thread(target=answer)
    thread.start()
    try:
      client = ssl.create_default_context(cafile=ca)
      with socket.create_connection(listener.getsockname(), 10) as connection:
        with client.wrap_socket(connection, server_hostname=name) as secure:
          return secure.recv(5)
    finally:
      thread.join(10)


class TlsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path) / "tls"
    self.config = serve_config.get_config("smoke").serve

  def _files(self, **changes):
    self.config.update(changes)
    return serve._tls(self.config, self.folder)

  def test_clients_with_authority_believe_names(self):
    files = self._files(host="192.0.2.7", tls_names="pod.example, 198.51.100.3")
    ca = self.folder / tls.CA
    for name in ("192.0.2.7", "pod.example", "198.51.100.3", "localhost"):
      self.assertEqual(_greet(files, ca, name), b"hello")
    with self.assertRaisesRegex(ssl.SSLError, "other.example"):
      _greet(files, ca, "other.example")
    with self.assertRaisesRegex(ssl.SSLError, "verify failed"):
      _greet(files, None, "pod.example")
    for name in (tls.KEY, tls.CERT, tls.CA):
      mode = stat.S_IMODE((self.folder / name).stat().st_mode)
      self.assertEqual(mode, 0o600)

  def test_files_stay_until_names_change(self):
    files = self._files(host="192.0.2.7")
    before = pathlib.Path(files["ssl_certfile"]).read_bytes()
    self._files()
    self.assertEqual(pathlib.Path(files["ssl_certfile"]).read_bytes(), before)
    self._files(tls_names="pod.example")
    ca = self.folder / tls.CA
    self.assertEqual(_greet(files, ca, "pod.example"), b"hello")
    with self.assertRaisesRegex(ValueError, "config.serve.tls_names"):
      self._files(tls_names="p\N{LATIN SMALL LETTER O WITH DIAERESIS}d")

  def test_loopback_and_insecure_servers_have_none(self):
    for host in ("127.0.0.1", "::1", "localhost"):
      self.assertEqual(self._files(host=host), {})
    self.assertEqual(self._files(host="0.0.0.0", insecure=True), {})
    self.assertFalse(self.folder.exists())

  def test_accepts_custom_certificate_files(self):
    made = self._files(host="192.0.2.7")
    own = {
        "tls_cert_file": made["ssl_certfile"],
        "tls_key_file": made["ssl_keyfile"],
    }
    self.assertEqual(self._files(host="127.0.0.1", **own), made)
    config = serve_config.get_config("smoke")
    config.serve.update(own)
    validate.validate(config, program="serve")
    with self.assertRaisesRegex(ValueError, "PEM, without a passphrase"):
      self._files(tls_key_file=str(self.folder / tls.CA))
    config.serve.update(tls_key_file="", insecure=True)
    with self.assertRaisesRegex(
        ValueError, r"(?s)serve.insecure.*serve.tls_key_file|"
        r"serve.tls_key_file.*serve.insecure"
    ):  # fmt: skip
      validate.validate(config, program="serve")
