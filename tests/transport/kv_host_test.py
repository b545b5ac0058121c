# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.transport import kv_host
from tba_jax.transport import locator
from tests.transport import running_host


class HostTest(parameterized.TestCase):

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

  def test_announces_a_service_and_leaves_nothing_behind(self):
    with running_host.RunningHost(self.spool) as running:
      found = locator.read_locator(running.host.locator_path)
      self.assertEqual(
          found,
          locator.Locator(
              run="run",
              generation=1,
              address=f"unix:{self.spool}/kv1.sock",
              pid=running.host.child_pid,
          ),
      )
      self.assertEqual(self.spool.stat().st_mode & 0o777, 0o700)
      self.assertTrue(locator.accepts(found.address, 5.0))
      running.stop()
      self.assertIsNone(running.host.child_pid)
      self.assertEqual(running.kinds(), ["started", "stopped"])
    with self.assertRaises(ProcessLookupError):
      os.kill(found.pid, 0)
    self.assertCountEqual(os.listdir(self.spool), ["generation", "host.lock"])

  def test_a_killed_service_is_replaced_at_a_new_address(self):
    with running_host.RunningHost(self.spool) as running:
      first = locator.read_locator(running.host.locator_path)
      os.kill(first.pid, signal.SIGKILL)
      running_host.wait_until(lambda: running.kinds().count("started") == 2)
      second = locator.read_locator(running.host.locator_path)
      self.assertEqual(second.generation, 2)
      self.assertNotEqual(second.address, first.address)
      self.assertEqual(running.kinds(), ["started", "lost", "started"])
      self.assertIn(
          f"generation 1: process {first.pid} ended (status -9)",
          running.events[1][1],
      )
      self.assertFalse((self.spool / "kv1.sock").exists())

  def test_the_service_leaves_on_sigterm_and_stays_on_sigint(self):
    with running_host.RunningHost(self.spool) as running:
      client = running.client()
      os.kill(running.host.child_pid, signal.SIGINT)
      # Probes go on, whatever others make of the key.
      for break_it in (
          lambda: client.put(locator.IDENTITY_KEY, b"\xff text"),
          lambda: client.delete("meta"),
      ):
        break_it()
        identity = locator.identity("run", 1)
        running_host.wait_until(
            lambda i=identity: client.get(locator.IDENTITY_KEY) == i
        )
      self.assertEqual(running.kinds(), ["started"])
      os.kill(running.host.child_pid, signal.SIGTERM)
      running_host.wait_until(lambda: "lost" in running.kinds())
      self.assertIn("status -15", running.events[1][1])

  def test_generations_grow_across_hosts(self):
    for generation in (1, 2):
      with running_host.RunningHost(self.spool) as running:
        self.assertEqual(running.host.generation, generation)
    host = self.make_host()
    self.assertEqual(host.generation, 2)
    host.close()
    (self.spool / "generation").write_text("x")
    with self.assertRaisesRegex(ValueError, "generation contains 'x'"):
      self.make_host()

  def test_a_second_host_is_refused_with_the_pid_of_the_first(self):
    host = self.make_host()
    with self.assertRaisesRegex(
        RuntimeError, f"{self.spool} is held .* process {os.getpid()};"
    ):
      self.make_host()
    host.close()
    self.make_host()

  def test_starts_over_what_a_killed_host_left(self):
    self.make_host().close()
    (self.spool / "locator.json").write_text("{}")
    (self.spool / "kv1.sock").touch()
    with running_host.RunningHost(self.spool) as running:
      running.client().put("a", b"x")

  def test_a_long_socket_path_is_refused_before_anything_starts(self):
    self.spool = self.folder / ("x" * 90)
    with self.assertRaisesRegex(ValueError, "kv1.sock has .* allowed are 100"):
      self.make_host()
    # And without holding the lock: TCP needs no socket path.
    self.make_host(address="127.0.0.1:0")

  def test_a_path_at_the_limit_works(self):
    room = 100 - len(os.fsencode(str(self.folder))) - len("//kv1.sock")
    self.spool = self.folder / ("x" * room)
    with running_host.RunningHost(self.spool) as running:
      address = locator.read_locator(running.host.locator_path).address
      self.assertLen(address.removeprefix("unix:"), 100)
      self.assertTrue(running.client().put("a", b"x"))

  def test_refuses_a_spool_that_others_may_enter(self):
    for mode in (0o750, 0o701, 0o755):
      self.spool.mkdir(exist_ok=True)
      self.spool.chmod(mode)
      with self.assertRaisesRegex(ValueError, f"mode {mode:04o}; .* 0700"):
        self.make_host()

  def test_refuses_a_spool_that_is_a_link_or_of_another_user(self):
    (self.folder / "real").mkdir(mode=0o700)
    self.spool.symlink_to(self.folder / "real")
    with self.assertRaisesRegex(ValueError, "no link"):
      self.make_host()
    self.spool.unlink()
    self.spool.mkdir(mode=0o700)
    with mock.patch.object(os, "geteuid", return_value=os.geteuid() + 1):
      with self.assertRaisesRegex(ValueError, "of this user"):
        self.make_host()

  def test_gives_up_where_no_service_starts(self):
    broken = mock.patch.object(sys, "executable", "/bin/false")
    with broken, running_host.RunningHost(self.spool) as running:
      running_host.wait_until(lambda: running.error)
      self.assertRegex(str(running.error), "3 times in a row.*status 1")
      self.assertFalse(running.host.locator_path.exists())
    self.make_host()

  def test_a_service_that_does_not_start_in_time_is_replaced(self):
    slow = self.folder / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o700)
    with mock.patch.object(sys, "executable", str(slow)):
      with running_host.RunningHost(self.spool, start_timeout_s=0.1) as running:
        self.assertRegex(str(running.error), "silent for 0.1 s")

  def test_stop_during_a_start_is_quick(self):
    slow = self.folder / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o700)
    host = self.make_host()
    stop = threading.Event()
    with mock.patch.object(sys, "executable", str(slow)):
      thread = threading.Thread(target=host.run, args=(stop,))
      thread.start()
      running_host.wait_until(lambda: host.child_pid)
    pid = host.child_pid
    stop.set()
    thread.join(30)
    self.assertFalse(thread.is_alive())
    with self.assertRaises(ProcessLookupError):
      os.kill(pid, 0)


class AddressTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    folder = self.enterContext(tempfile.TemporaryDirectory(prefix="tba-"))
    self.spool = pathlib.Path(folder) / "spool"

  def make_host(self, address, **host_args):
    host = kv_host.KvHost(
        self.spool, "run", address=address, probe_timeout_s=5.0, **host_args
    )
    self.addCleanup(host.close)
    return host

  @parameterized.parameters(
      ("127.0.0.1", "allowed are"),
      (":0", "allowed are"),
      ("127.0.0.1:x", "allowed are"),
      ("127.0.0.1:5000", "allowed are"),
      ("127.0.0.1:5001-5000", "allowed are"),
      ("127.0.0.1:65000-65536", "allowed are"),
      ("10.0.0.1:0", "not loopback"),
      ("example.org:0", "not loopback"),
      ("0.0.0.0:0", "not loopback"),
  )
  def test_refuses(self, address, message):
    with self.assertRaisesRegex(ValueError, f"store.address=.*{message}"):
      self.make_host(address)

  def test_remote_only_where_told_and_never_all_interfaces(self):
    self.make_host("10.0.0.1:0", allow_remote=True).close()
    for address in ("0.0.0.0:0", "[::]:0"):
      with self.assertRaisesRegex(ValueError, "one interface"):
        self.make_host(address, allow_remote=True)

  def test_a_free_port_is_new_each_time(self):
    host = self.make_host("127.0.0.1:0")
    addresses = {host._new_address() for _ in range(20)}
    self.assertLen(addresses, 20)

  def test_a_range_moves_on_and_skips_what_is_taken(self):
    with socket.socket() as taken:
      # Somewhere with two free neighbours above a port that is taken.
      for first in range(21000, 60000, 97):
        try:
          taken.bind(("127.0.0.1", first))
          for port in (first + 1, first + 2):
            with socket.socket() as probe:
              probe.bind(("127.0.0.1", port))
        except OSError:
          continue
        break
      host = self.make_host(f"127.0.0.1:{first}-{first + 2}")
      addresses = []
      for generation in (1, 2, 3, 4):
        host._generation = generation
        addresses.append(host._new_address())
      free = [f"127.0.0.1:{first + 1}", f"127.0.0.1:{first + 2}"]
      self.assertEqual(addresses, [*free, *free])

  def test_the_next_host_moves_on_in_the_range_too(self):
    addresses = set()
    for generation in (1, 2, 3):
      host = self.make_host("127.0.0.1:21500-21599")
      host._generation = generation
      addresses.add(host._new_address())
      host.close()
    self.assertLen(addresses, 3)

  def test_serves_over_tcp(self):
    with running_host.RunningHost(self.spool, address="127.0.0.1:0") as running:
      found = locator.read_locator(running.host.locator_path)
      self.assertRegex(found.address, r"^127\.0\.0\.1:\d+$")
      client = running.client()
      client.put("a", b"x")
      os.kill(found.pid, signal.SIGKILL)
      running_host.wait_until(lambda: running.kinds().count("started") == 2)
      self.assertEqual(client.reconnect(), 2)
      self.assertNotEqual(
          locator.read_locator(running.host.locator_path).address, found.address
      )
      self.assertIsNone(client.get("a"))


class ImportTest(absltest.TestCase):

  def test_the_host_never_imports_jax(self):
    code = """if True:
      import json, sys, tempfile, threading
      from tba_jax.transport import kv_host
      with tempfile.TemporaryDirectory(prefix="tba-") as folder:
        started, stop = threading.Event(), threading.Event()
        host = kv_host.KvHost(
            folder + "/spool", "run", probe_timeout_s=30.0,
            on_event=lambda kind, message: started.set())
        thread = threading.Thread(target=host.run, args=(stop,))
        thread.start()
        ok = started.wait(60)
        stop.set()
        thread.join(30)
      found = [m for m in ("jax", "jaxlib") if m in sys.modules]
      print(json.dumps([ok, found]))
    """
    root = pathlib.Path(kv_host.__file__).parents[2]
    child = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        stdout=subprocess.PIPE,
        check=True,
        timeout=100,
    )
    ok, modules = json.loads(child.stdout)
    self.assertTrue(ok)
    self.assertEmpty(modules)


class SpoolTest(absltest.TestCase):

  def test_makes_parents_and_locks_once(self):
    folder = self.enterContext(tempfile.TemporaryDirectory(prefix="tba-"))
    path = pathlib.Path(folder) / "a" / "b"
    kv_host.prepare_spool(path)
    kv_host.prepare_spool(path)
    fd = kv_host.lock_spool(path)
    self.assertEqual((path / "host.lock").read_text(), str(os.getpid()))
    # A child must not hold the lock of a host that is gone.
    self.assertFalse(os.get_inheritable(fd))
    with self.assertRaises(RuntimeError):
      kv_host.lock_spool(path)
    os.close(fd)
    os.close(kv_host.lock_spool(path))


if __name__ == "__main__":
  absltest.main()
