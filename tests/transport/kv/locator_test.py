# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0

import contextlib
import json
import os
import pathlib
import signal
import socket
import tempfile
import threading
import time

from absl.testing import absltest
from absl.testing import parameterized
import pytest

from tba_jax.transport import byte_store
from tba_jax.transport import wire
from tba_jax.transport.kv import locator
from tests.transport import running_host
from tests.transport import tcp_proxy

SECRET = b"s" * 32
FOUND = locator.Locator(run="r", generation=2, address="h:1", pid=7)


class LocatorTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    folder = self.enterContext(tempfile.TemporaryDirectory(prefix="tba-"))
    self.path = pathlib.Path(folder) / "locator.json"

  def test_written_locator_is_read(self):
    self.assertIsNone(locator.read_locator(self.path))
    locator.write_locator(self.path, FOUND)
    self.assertEqual(locator.read_locator(self.path), FOUND)

  @parameterized.parameters(
      "",
      "[]",
      '{"run": "r"}',
      json.dumps({"run": "r", "generation": True, "address": "a", "pid": 1}),
  )
  def test_invalid_file_is_refused(self, text):
    self.path.write_text(text)
    with self.assertRaisesRegex(ValueError, "locator.json: damaged"):
      locator.read_locator(self.path)

  def test_accepts_if_something_listens(self):
    unix_path = str(self.path.with_name("a.sock"))
    with socket.socket(socket.AF_UNIX) as server:
      self.assertFalse(locator.accepts(f"unix:{unix_path}", 1.0))
      server.bind(unix_path)
      server.listen()
      self.assertTrue(locator.accepts(f"unix:{unix_path}", 1.0))
    self.assertFalse(locator.accepts(f"unix:{unix_path}", 1.0))
    with socket.socket() as server:
      server.bind(("127.0.0.1", 0))
      address = f"127.0.0.1:{server.getsockname()[1]}"
      self.assertFalse(locator.accepts(address, 1.0))
      server.listen()
      self.assertTrue(locator.accepts(address, 1.0))

  def test_identity_differs_between_runs_and_generations(self):
    identities = [locator.identity(r, g) for r in "ab" for g in (1, 2)]
    self.assertLen(set(identities), 4)


class AnnouncerTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.path = pathlib.Path(self.create_tempdir().full_path) / "locator.json"
    locator.write_locator(self.path, FOUND)

  def start(self, secret=SECRET, path=None, **settings):
    announcer = locator.Announcer(
        "127.0.0.1:0", secret, path or self.path, **settings
    )
    self.addCleanup(announcer.close)
    return f"127.0.0.1:{announcer.port}"

  def serve_once(self, answer):
    """Returns the address of a server that gives one connection to `answer`."""
    server = self.enterContext(socket.create_server(("127.0.0.1", 0)))

    def run():
      connection, _ = server.accept()
      with connection, contextlib.suppress(OSError):
        answer(connection)

    thread = threading.Thread(target=run)
    thread.start()
    self.addCleanup(thread.join)
    return f"127.0.0.1:{server.getsockname()[1]}"

  def test_current_locator_is_returned(self):
    self.path.unlink()
    address = self.start()
    self.assertIsNone(locator.ask_announcer(address, SECRET))
    self.path.write_text("damaged")
    self.assertIsNone(locator.ask_announcer(address, SECRET))
    locator.write_locator(self.path, FOUND)
    self.assertEqual(locator.ask_announcer(address, SECRET), FOUND)

  def test_idle_connections_block_nobody_and_need_no_threads(self):
    address = self.start()
    before = threading.active_count()
    with contextlib.ExitStack() as idle, self.assertNoLogs(level="INFO"):
      for _ in range(2 * locator.MAX_CONNECTIONS):
        connection = socket.create_connection(locator.split_address(address))
        idle.enter_context(connection)
      self.assertEqual(locator.ask_announcer(address, SECRET), FOUND)
      self.assertEqual(threading.active_count(), before)

  def test_slow_request_is_closed_at_deadline(self):
    address = self.start(deadline_s=0.3)
    start = time.monotonic()
    with socket.create_connection(locator.split_address(address)) as slow:
      with self.assertRaises(OSError):  # Closed before the 16th byte.
        while time.monotonic() < start + 10:
          slow.sendall(b"n")
          time.sleep(0.1)
    self.assertLess(time.monotonic(), start + 1.3)
    self.assertEqual(locator.ask_announcer(address, SECRET), FOUND)

  def test_slow_answer_is_not_awaited_beyond_deadline(self):

    def drip(connection):
      for _ in range(50):
        connection.sendall(b"x")
        time.sleep(0.1)

    address = self.serve_once(drip)
    start = time.monotonic()
    self.assertIsNone(locator.ask_announcer(address, SECRET, 0.3))
    self.assertLess(time.monotonic(), start + 3)

  def test_nothing_listens(self):
    with socket.create_server(("127.0.0.1", 0)) as server:
      port = server.getsockname()[1]
    self.assertIsNone(locator.ask_announcer(f"127.0.0.1:{port}", SECRET))

  def test_forged_and_replayed_answers_are_refused(self):
    with self.assertRaises(wire.WireError) as caught:
      locator.ask_announcer(self.start(secret=b"x" * 32), SECRET)
    self.assertEqual(caught.exception.reason, "hash")
    address = locator.split_address(self.start())
    with socket.create_connection(address) as connection:
      connection.sendall(b"n" * 16)
      old = b"".join(iter(lambda: connection.recv(4096), b""))
    self.assertEqual(wire.decode_message(old, SECRET)["run"], "r")

    def replay(connection):
      connection.recv(16)
      connection.sendall(old)

    with self.assertRaisesRegex(wire.WireError, "replayed"):
      locator.ask_announcer(self.serve_once(replay), SECRET)

  def test_client_finds_its_store_and_next_generation(self):
    running = self.enterContext(
        running_host.RunningHost(address="127.0.0.1:0", probe_timeout_s=2.0)
    )
    address = self.start(path=running.host.locator_path)
    client = running.client(locator_path=locator.RemoteLocator(address, SECRET))
    self.assertTrue(client.put("a", b"x"))
    os.kill(running.host.child_pid, signal.SIGKILL)
    with self.assertRaises(byte_store.TransportError):
      while True:
        client.get("a")
    self.assertEqual(client.reconnect(), 2)
    self.assertTrue(client.put("a", b"x"))


class CutLinkTest(parameterized.TestCase):

  @parameterized.parameters(True, False)
  @pytest.mark.slow
  def test_client_reconnects_to_same_generation(self, reset):
    running = self.enterContext(running_host.RunningHost(address="127.0.0.1:0"))
    real = locator.read_locator(running.host.locator_path)
    proxy = self.enterContext(
        tcp_proxy.TcpProxy(locator.split_address(real.address))
    )
    near = locator.Locator(real.run, real.generation, proxy.address, real.pid)
    client = running.client(locator_path=lambda: near, deadline_s=3.0)
    client.put("a", b"x")
    proxy.cut(reset=reset)
    with self.assertRaises(byte_store.TransportError):
      client.get("a")
    with self.assertRaises(byte_store.TransportError):
      client.reconnect(0.5)
    proxy.mend()
    self.assertEqual(client.reconnect(30.0), 1)
    self.assertEqual(client.get("a"), b"x")
