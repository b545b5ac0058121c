# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The locator file and the announcer."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import tempfile
import threading
import time
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.transport import base
from tba_jax.transport import locator
from tba_jax.transport import wire
from tests.transport import running_host
from tests.transport import tcp_proxy


class LocatorTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    folder = self.enterContext(tempfile.TemporaryDirectory(prefix="tba-"))
    self.path = pathlib.Path(folder) / "locator.json"

  def test_what_is_written_is_read(self):
    self.assertIsNone(locator.read_locator(self.path))
    for generation in (1, 2):
      written = locator.Locator("run", generation, "unix:/x/kv.sock", 12)
      locator.write_locator(self.path, written)
      self.assertEqual(locator.read_locator(self.path), written)
    # Nothing is left of the writing.
    self.assertEqual(os.listdir(self.path.parent), ["locator.json"])

  @parameterized.parameters(
      "",
      "{",
      "[]",
      '{"run": "r"}',
      json.dumps({"run": "r", "generation": "1", "address": "a", "pid": 1}),
      json.dumps({"run": "r", "generation": True, "address": "a", "pid": 1}),
      json.dumps(
          {"run": "r", "generation": 1, "address": "a", "pid": 1, "more": 1}
      ),
  )
  def test_refuses_what_is_no_locator(self, text):
    self.path.write_text(text)
    with self.assertRaisesRegex(ValueError, "not a store locator"):
      locator.read_locator(self.path)

  def test_accepts_only_where_something_listens(self):
    unix_path = str(self.path.with_name("a.sock"))
    self.assertFalse(locator.accepts(f"unix:{unix_path}", 1.0))
    with socket.socket(socket.AF_UNIX) as server:
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

  def test_identity_tells_runs_and_generations_apart(self):
    identities = [locator.identity(r, g) for r in "ab" for g in (1, 2)]
    self.assertLen(set(identities), 4)


SECRET = b"s" * 32
FOUND = locator.Locator(run="r", generation=2, address="h:1", pid=7)


class AnnouncerTest(absltest.TestCase):

  def start(self, find=lambda: FOUND, secret=SECRET):
    told = locator.Announcer("127.0.0.1:0", secret, find)
    self.addCleanup(told.close)
    return f"127.0.0.1:{told.port}"

  def test_it_tells_the_present_locator(self):
    found = [None]
    address = self.start(lambda: found[0])
    self.assertIsNone(locator.ask_announcer(address, SECRET))
    found[0] = FOUND
    self.assertEqual(locator.ask_announcer(address, SECRET), FOUND)

  def test_idle_connections_keep_nobody_waiting_and_take_no_threads(self):
    address = self.start()
    before = threading.active_count()
    with contextlib.ExitStack() as idle:
      for _ in range(2 * locator._MAX_CONNECTIONS):
        connection = socket.create_connection(locator.split_address(address))
        idle.enter_context(connection)
      self.assertEqual(locator.ask_announcer(address, SECRET), FOUND)
      self.assertEqual(threading.active_count(), before)

  def test_a_byte_now_and_then_does_not_hold_a_connection(self):
    self.enter_context(mock.patch.object(locator, "_DEADLINE_S", 0.3))
    address = self.start()
    start = time.monotonic()
    with socket.create_connection(locator.split_address(address)) as slow:
      with self.assertRaises(OSError):  # It is closed before the 16th byte.
        while time.monotonic() < start + 10:
          slow.sendall(b"n")
          time.sleep(0.1)
    self.assertLess(time.monotonic(), start + 1.3)
    self.assertEqual(locator.ask_announcer(address, SECRET), FOUND)

  def test_an_answer_of_a_byte_now_and_then_is_not_waited_for(self):
    self.enter_context(mock.patch.object(locator, "_DEADLINE_S", 0.3))
    with socket.create_server(("127.0.0.1", 0)) as server:

      def drip():
        connection, _ = server.accept()
        with connection:
          for _ in range(50):
            try:
              connection.sendall(b"x")
            except OSError:
              return
            time.sleep(0.1)

      thread = threading.Thread(target=drip)
      thread.start()
      start = time.monotonic()
      address = f"127.0.0.1:{server.getsockname()[1]}"
      self.assertIsNone(locator.ask_announcer(address, SECRET))
      self.assertLess(time.monotonic(), start + 3)
      thread.join()

  def test_what_find_raises_costs_one_answer(self):
    answers = [ValueError("no locator"), FOUND]

    def find():
      answer = answers.pop(0)
      if isinstance(answer, Exception):
        raise answer
      return answer

    address = self.start(find)
    self.assertIsNone(locator.ask_announcer(address, SECRET))
    self.assertEqual(locator.ask_announcer(address, SECRET), FOUND)

  def test_nobody_there_is_none(self):
    with socket.create_server(("127.0.0.1", 0)) as server:
      port = server.getsockname()[1]
    self.assertIsNone(locator.ask_announcer(f"127.0.0.1:{port}", SECRET))

  def test_a_forged_answer_is_refused(self):
    address = self.start(secret=b"x" * 32)
    with self.assertRaisesRegex(wire.WireError, "hash"):
      locator.ask_announcer(address, SECRET)

  def test_a_replayed_answer_is_refused(self):
    real = self.start()
    with socket.create_connection(locator.split_address(real)) as asked:
      asked.sendall(b"n" * 16)
      old = b"".join(iter(lambda: asked.recv(4096), b""))
    self.assertEqual(wire.decode_message(old, SECRET)["run"], "r")
    with socket.create_server(("127.0.0.1", 0)) as server:

      def replay():
        connection, _ = server.accept()
        with connection:
          connection.recv(16)
          connection.sendall(old)

      thread = threading.Thread(target=replay)
      thread.start()
      with self.assertRaisesRegex(wire.WireError, "replayed"):
        locator.ask_announcer(f"127.0.0.1:{server.getsockname()[1]}", SECRET)
      thread.join()

  def test_a_client_finds_its_store_and_the_next_generation(self):
    running = self.enterContext(
        running_host.RunningHost(address="127.0.0.1:0", probe_timeout_s=2.0)
    )
    address = self.start(
        lambda: locator.read_locator(running.host.locator_path)
    )
    client = running.client(locator_path=locator.RemoteLocator(address, SECRET))
    self.assertTrue(client.put("a", b"x"))
    os.kill(running.host.child_pid, signal.SIGKILL)
    with self.assertRaises(base.TransportError):
      while True:
        client.get("a")
    self.assertEqual(client.reconnect(), 2)
    self.assertTrue(client.put("a", b"x"))


class CutLinkTest(absltest.TestCase):
  """The store lives on, but the way to it is cut for a while."""

  def start(self):
    running = self.enterContext(running_host.RunningHost(address="127.0.0.1:0"))
    real = locator.read_locator(running.host.locator_path)
    proxy = self.enterContext(
        tcp_proxy.TcpProxy(locator.split_address(real.address))
    )
    near = locator.Locator(real.run, real.generation, proxy.address, real.pid)
    client = running.client(locator_path=lambda: near, deadline_s=3.0)
    client.put("a", b"x")
    return proxy, client

  def test_a_broken_connection_is_made_anew(self):
    proxy, client = self.start()
    proxy.cut(reset=True)
    with self.assertRaises(base.TransportError):
      client.get("a")
    with self.assertRaises(base.TransportError):
      client.reconnect(1.0)
    proxy.mend()
    self.assertEqual(client.reconnect(30.0), 1)
    # The same store, with what it held.
    self.assertEqual(client.get("a"), b"x")

  def test_silence_costs_a_deadline_and_not_the_client(self):
    proxy, client = self.start()
    proxy.cut(reset=False)
    with self.assertRaises(base.TransportError):
      client.get("a")
    proxy.mend()
    self.assertEqual(client.reconnect(30.0), 1)
    self.assertEqual(client.get("a"), b"x")


if __name__ == "__main__":
  absltest.main()
