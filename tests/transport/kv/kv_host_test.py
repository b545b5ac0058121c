# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0

import collections
import os
import pathlib
import signal
import socket
import sys
import tempfile
import threading
from unittest import mock

from absl.testing import absltest

from tba_jax.transport.kv import kv_host
from tba_jax.transport.kv import locator
from tests.support import waiting
from tests.transport import running_host


class HostTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    folder = self.enterContext(tempfile.TemporaryDirectory(prefix="tba-"))
    self.folder = pathlib.Path(folder)
    self.spool = self.folder / "spool"

  def make_host(self, **host_args):
    args = {"probe_timeout_s": 5.0, **host_args}
    host = kv_host.KvHost(self.spool, "run", **args)
    self.addCleanup(host.close)
    return host

  def make_silent_service(self):
    """Makes services start as a program that never answers."""
    path = self.folder / "silent"
    path.write_text("#!/bin/sh\nexec sleep 60\n")
    path.chmod(0o700)
    self.enterContext(mock.patch.object(sys, "executable", str(path)))

  def assert_ended(self, pid):
    with self.assertRaises(ProcessLookupError):
      os.kill(pid, 0)

  def test_announces_service_and_cleans_up(self):
    with running_host.RunningHost(self.spool) as running:
      result = locator.read_locator(running.host.locator_path)
      pid = running.host.child_pid
      address = f"unix:{self.spool}/kv1.sock"
      self.assertEqual(result, locator.Locator("run", 1, address, pid))
      self.assertEqual(self.spool.stat().st_mode & 0o777, 0o700)
      self.assertTrue(locator.accepts(result.address, 5.0))
      running.stop()
      self.assertIsNone(running.host.child_pid)
      self.assertEqual(running.kinds(), ["started", "stopped"])
    self.assert_ended(pid)
    self.assertCountEqual(os.listdir(self.spool), ["generation", "host.lock"])

  def test_killed_service_is_replaced_at_new_address(self):
    for address in ("", "127.0.0.1:0"):
      with running_host.RunningHost(self.spool, address=address) as running:
        first = locator.read_locator(running.host.locator_path)
        client = running.client()
        client.put("a", b"x")
        os.kill(first.pid, signal.SIGKILL)
        waiting.wait_until(lambda: running.kinds().count("started") == 2)
        second = locator.read_locator(running.host.locator_path)
        self.assertEqual(second.generation, first.generation + 1)
        self.assertNotEqual(second.address, first.address)
        self.assertEqual(running.kinds(), ["started", "lost", "started"])
        self.assertIn("status -9", running.events[1][1])
        self.assertFalse((self.spool / "kv1.sock").exists())
        self.assertEqual(client.reconnect(), second.generation)
        self.assertIsNone(client.get("a"))
    # Generations continue across hosts.
    self.assertEqual(self.make_host().generation, 4)

  def test_service_ignores_sigint_and_ends_on_sigterm(self):
    with running_host.RunningHost(self.spool) as running:
      client = running.client()
      os.kill(running.host.child_pid, signal.SIGINT)
      identity = locator.identity("run", 1)
      # Probes restore the identity.
      client.put(locator.IDENTITY_KEY, b"\xff text")
      get = lambda: client.get(locator.IDENTITY_KEY)
      waiting.wait_until(lambda: get() == identity)
      client.delete("meta")
      waiting.wait_until(lambda: get() == identity)
      self.assertEqual(running.kinds(), ["started"])
      os.kill(running.host.child_pid, signal.SIGTERM)
      waiting.wait_until(lambda: "lost" in running.kinds())
      self.assertIn("status -15", running.events[1][1])

  def test_damaged_generation_file_is_refused(self):
    self.make_host().close()
    (self.spool / "generation").write_text("x")
    with self.assertRaisesRegex(ValueError, "generation contains 'x'"):
      self.make_host()

  def test_second_host_is_refused_with_pid_of_first(self):
    host = self.make_host()
    # A child must not hold the lock of a host that has ended.
    self.assertFalse(os.get_inheritable(host._lock_fd))
    with self.assertRaisesRegex(
        RuntimeError, f"{self.spool} is held .* process {os.getpid()};"
    ):
      self.make_host()
    host.close()
    self.make_host()

  def test_starts_after_killed_host(self):
    self.make_host().close()
    (self.spool / "locator.json").write_text("{}")
    (self.spool / "kv1.sock").touch()
    with running_host.RunningHost(self.spool) as running:
      running.client().put("a", b"x")

  def test_long_socket_path_is_refused(self):
    room = 100 - len(os.fsencode(str(self.folder))) - len("//kv1.sock")
    self.spool = self.folder / ("x" * room)
    with running_host.RunningHost(self.spool) as running:
      self.assertTrue(running.client().put("a", b"x"))
    self.spool = self.folder / ("x" * (room + 1))
    with self.assertRaisesRegex(ValueError, "must have at most 100"):
      self.make_host()
    # The lock is free again, and TCP needs no socket path.
    self.make_host(address="127.0.0.1:0")

  def test_gives_up_if_no_service_starts(self):
    broken = mock.patch.object(sys, "executable", "/bin/false")
    with broken, running_host.RunningHost(self.spool) as running:
      waiting.wait_until(lambda: running.error)
      self.assertRegex(str(running.error), "3 times in a row.*status 1")
      self.assertFalse(running.host.locator_path.exists())
    self.make_host()

  def test_replaces_service_after_start_timeout(self):
    self.make_silent_service()
    with running_host.RunningHost(self.spool, start_timeout_s=0.1) as running:
      self.assertRegex(str(running.error), "silent for 0.1 s")

  def test_stops_during_start(self):
    self.make_silent_service()
    host, stop = self.make_host(), threading.Event()
    thread = threading.Thread(target=host.run, args=(stop,))
    thread.start()
    waiting.wait_until(lambda: host.child_pid)
    pid = host.child_pid
    stop.set()
    thread.join(30)
    self.assertFalse(thread.is_alive())
    self.assert_ended(pid)

  def test_failed_announcer_ends_host(self):
    with running_host.RunningHost(self.spool) as running:
      running.host.announce("127.0.0.1:0", b"s" * 32)
      error = KeyError("x")
      with mock.patch.object(locator.Announcer, "check", side_effect=error):
        waiting.wait_until(lambda: running.error)
      self.assertEqual(running.error, error)
      self.assertIsNone(running.host.child_pid)

  def test_finds_new_free_port_each_time(self):
    used = collections.deque(maxlen=20)
    addresses = {
        kv_host.free_address("127.0.0.1", [0] * 9, generation, used)
        for generation in range(20)
    }
    self.assertLen(addresses, 20)

  def test_takes_ports_of_range_in_turn_and_skips_occupied_ones(self):
    with socket.socket() as occupied:
      # Find an occupied port with two free neighbours.
      for first in range(21000, 60000, 97):
        try:
          occupied.bind(("127.0.0.1", first))
          for port in (first + 1, first + 2):
            with socket.socket() as probe:
              probe.bind(("127.0.0.1", port))
        except OSError:
          continue
        break
      ports, used = range(first, first + 3), collections.deque(maxlen=1)
      addresses = [
          kv_host.free_address("127.0.0.1", ports, generation, used)
          for generation in (1, 2, 3, 4)
      ]
      free = [f"127.0.0.1:{first + 1}", f"127.0.0.1:{first + 2}"]
      self.assertEqual(addresses, [*free, *free])

  def test_takes_next_port_of_range_in_next_host(self):
    addresses = {
        kv_host.free_address(
            "127.0.0.1", range(21500, 21600), generation, collections.deque()
        )
        for generation in (1, 2, 3)
    }
    self.assertLen(addresses, 3)
