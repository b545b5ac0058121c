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
import time
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import pytest

from tba_jax.system import processes
from tba_jax.transport import byte_store
from tba_jax.transport.kv import certificates
from tba_jax.transport.kv import jax_kv
from tba_jax.transport.kv import kv_client
from tba_jax.transport.kv import locator
from tests.support import waiting
from tests.transport import contract
from tests.transport import running_host

_ROOT = locator.root("run", b"s" * 32)


# Its service is stopped, and ends while the interpreter does.
_LEAVES = """
import os, signal, sys, time
from tba_jax.system import processes
from tba_jax.transport import byte_store
from tba_jax.transport.kv import kv_client

path, pid = sys.argv[1], int(sys.argv[2])
client = kv_client.KvTransport(path, deadline_s=20.0)
os.kill(pid, signal.SIGSTOP)
client.deadline_s = 0.3
try:
  client.get("a")
except byte_store.DeadlineExceededError:
  pass

class Late:
  def __del__(self):
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.5)

sys.modules["late"] = Late()
processes.leave(3)
"""


def _workers():
  """Returns the threads that are or may be in a call of the library."""
  return {
      thread
      for thread in threading.enumerate()
      if thread.name.startswith(processes.LEFT_BEHIND)
  }


class HostCase(absltest.TestCase):
  """Base of tests that share a host; each client sees the newest generation."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.running = cls.enterClassContext(running_host.RunningHost())

  def lose_generation(self):
    host = self.running.host
    generation = host.generation
    os.kill(host.child_pid, signal.SIGKILL)
    # Tests expect the next number.
    waiting.wait_until(lambda: host.generation == generation + 1)


class KvContractTest(contract.TransportContract, HostCase):

  def make_client(self):
    return self.running.client(run_id="run")


class RootedContractTest(contract.TransportContract, HostCase):
  """Clients whose keys are all in a secret directory."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.running = cls.enterClassContext(running_host.RunningHost(root=_ROOT))

  def make_client(self):
    return self.running.client(run_id="run", root=_ROOT)

  def test_stranger_finds_no_key(self):
    client = self.make_client()
    client.put("q/0/a", b"value")
    address = locator.read_locator(self.running.host.locator_path).address
    stranger = jax_kv.connect(address)
    guesses = ("", "/", "q", "q/0", "meta", _ROOT[:-1], _ROOT[:4])
    for guess in guesses:
      self.assertEmpty(stranger.key_value_dir_get_bytes(guess), guess)
      stranger.key_value_delete(guess)
    stranger.key_value_set_bytes("q/0/a", b"forged")
    stranger.key_value_set_bytes("meta/store", b"forged")
    self.assertEqual(client.list("q"), {"q/0/a": b"value"})
    self.make_client()

  def test_messages_name_no_root(self):
    client = self.make_client()
    self.lose_generation()
    with self.assertRaises(byte_store.TransportError) as caught:
      while True:
        client.put("q/0/a", b"value")
    self.assertIn("put 'q/0/a'", str(caught.exception))
    self.assertNotIn(_ROOT, str(caught.exception))
    self.assertNotIn(_ROOT, str(caught.exception.__cause__))


class KvClientTest(HostCase):

  def test_stores_large_values(self):
    client = self.running.client()
    value = os.urandom(1 << 20)
    for i in range(6):
      client.put(f"large/{i:04d}", value[i:])
    listed = client.list("large")
    self.assertEqual(listed, {f"large/{i:04d}": value[i:] for i in range(6)})

  def test_store_of_another_run_is_refused(self):
    client = self.running.client()
    with self.assertRaisesRegex(
        byte_store.TransportError, "process is of run 'mine': .* of run 'run'"
    ) as caught:
      self.running.client(run_id="mine")
    # Refused at once.
    self.assertNotIsInstance(caught.exception, byte_store.DeadlineExceededError)
    self.assertTrue(client.put("a", b"x"))

  def test_store_without_tls_is_refused_by_client_with_it(self):
    tls = certificates.Tls("cert", "key", "ca")
    with running_host.RunningHost(address="127.0.0.1:0") as running:
      words = "this process uses mutual TLS and the store does not"
      with self.assertRaisesRegex(byte_store.TransportError, words):
        running.client(tls=tls)
    # A unix socket needs none.
    self.assertIsNone(self.running.client(tls=tls).get("nothing"))

  def test_another_store_at_address_is_refused(self):
    path = self.running.host.locator_path
    true = locator.read_locator(path)
    for change in ({"run": "other"}, {"generation": true.generation + 1}):
      fields = {**json.loads(path.read_text()), **change}
      forged = path.with_name("forged.json")
      forged.write_text(json.dumps(fields))
      with self.assertRaisesRegex(
          byte_store.DeadlineExceededError, "another store answers"
      ):
        kv_client.KvTransport(forged, deadline_s=1.0, poll_s=0.05)

  def test_older_generation_is_refused(self):
    client = self.running.client()
    old, path = client.generation, self.running.host.locator_path
    old_text = path.read_text()
    self.lose_generation()
    waiting.wait_until(lambda: path.read_text() != old_text)
    with self.assertRaises(byte_store.TransportError):
      client.get("a")
    new_text = path.read_text()
    self.addCleanup(path.write_text, new_text)
    path.write_text(old_text)
    # Whether its loss was told to the client or is found by a probe.
    with self.assertRaisesRegex(
        byte_store.DeadlineExceededError,
        f"(still announced, but lost|nothing listens there).*generation {old},",
    ):
      client.reconnect(0.3)
    path.write_text(new_text)
    self.assertEqual(client.reconnect(30.0), old + 1)
    path.write_text(old_text)
    self.assertEqual(client.reconnect(), old + 1)

  def test_two_threads_are_refused(self):
    client = self.running.client()
    # Another thread's call.
    with client.exclusive():
      with self.assertRaisesRegex(RuntimeError, "one thread at a time"):
        client.get("none")
    self.assertIsNone(client.get("none"))

  def test_operations_run_concurrently(self):
    client = self.running.client(deadline_s=20.0)
    together = threading.Barrier(4)

    def put(*args):
      together.wait(10)  # Broken if they run one by one.
      return True

    with mock.patch.dict(self.running.operations, put=put):
      client.put_all({f"a/{i}": b"x" for i in range(8)})

  def test_each_answer_restarts_deadline(self):
    client = self.running.client(deadline_s=0.5)
    put = self.running.operations["put"]

    def slowly(*args):
      time.sleep(0.05)
      return put(*args)

    values = {f"slow/{i:03d}": b"x" for i in range(60)}
    start = time.monotonic()
    with mock.patch.dict(self.running.operations, put=slowly):
      client.put_all(values)
    self.assertGreater(time.monotonic() - start, 0.5)
    self.assertEqual(client.list("slow"), values)

  def test_hanging_operations_end_at_deadline(self):
    client = self.running.client(deadline_s=0.5)
    release = threading.Event()
    self.addCleanup(release.set)
    put = self.running.operations["put"]

    def hangs_from_b_on(kv, key, *args):
      return put(kv, key, *args) if key < "b" else release.wait(30)

    values = {f"{c}/{i}": b"x" for c in "ab" for i in range(8)}
    start = time.monotonic()
    with mock.patch.dict(self.running.operations, put=hangs_from_b_on):
      with self.assertRaisesRegex(
          byte_store.DeadlineExceededError,
          "no answer to put 'b/0' within 0.5 s",
      ):
        client.put_all(values)
    self.assertLess(time.monotonic() - start, 5.0)

  def test_stores_and_deletes_thousands_of_keys(self):
    client = self.running.client(deadline_s=20.0)
    values = {f"q/{i:05d}": b"x" * 100 for i in range(1500)}
    client.put_all(values)
    self.assertEqual(client.list("q"), values)
    client.delete_all(values)
    self.assertEmpty(client.list("q"))

  def test_failed_operation_is_named(self):
    client = self.running.client()
    put = self.running.operations["put"]

    def fails_for_y(kv, key, *args):
      if key == "y":
        raise jax_kv.KvError("RESOURCE_EXHAUSTED: too much")
      return put(kv, key, *args)

    with mock.patch.dict(self.running.operations, put=fails_for_y):
      with self.assertRaisesRegex(
          byte_store.TransportError, "put 'y': RESOURCE"
      ):
        client.put_all({"x": b"x", "y": b"x", "z": b"x"})
    self.assertEqual(client.get("z"), b"x")
    self.assertIsNone(client.get("y"))

  def test_late_answer_is_dropped(self):
    client = self.running.client(deadline_s=2.0)
    generation = client.generation
    client.put("a", b"a")
    client.put("b", b"b")
    release = threading.Event()

    def slow_get(*args):
      release.wait(30)
      return b"late"

    with mock.patch.dict(self.running.operations, get=slow_get):
      with self.assertRaisesRegex(
          byte_store.DeadlineExceededError,
          r"no answer to get 'a' within 2\.\d s from the key-value store of run"
          rf" 'run', generation {generation}, at unix:.*kv{generation}.sock"
          rf" \(process {self.running.host.child_pid}\)",
      ):
        client.get("a")
    # The store was only slow: it still has its data.
    self.assertEqual(client.reconnect(30.0), generation)
    release.set()
    self.assertEqual(client.get("b"), b"b")
    self.assertEqual(client.get("a"), b"a")

  def test_thread_of_hung_service_ends_with_it(self):
    others = _workers()
    with running_host.RunningHost() as running:
      client = running.client()
      waiting.stop(running.host.child_pid)
      client.deadline_s = 0.3
      with self.assertRaisesRegex(byte_store.DeadlineExceededError, "get 'a'"):
        client.get("a")
      self.assertLen(_workers() - others, 1)
    waiting.wait_until(lambda: not _workers() - others, "its end")

  def test_process_leaves_while_its_service_hangs(self):
    with running_host.RunningHost() as running:
      host = running.host
      argv = [sys.executable, "-c", _LEAVES, host.locator_path, host.child_pid]
      child = subprocess.run(
          [str(arg) for arg in argv],
          env=processes.package_environment(),
          capture_output=True,
          timeout=60,
          check=False,
      )
    self.assertEqual((child.returncode, child.stderr), (3, b""))

  def test_newer_generation_ends_wait(self):
    client = self.running.client()
    path = self.running.host.locator_path
    self.addCleanup(path.write_text, path.read_text())
    fields = json.loads(path.read_text())
    release = threading.Event()
    self.addCleanup(release.set)

    def hang(*args):
      fields["generation"] += 1
      path.write_text(json.dumps(fields))
      release.wait(60)

    with mock.patch.dict(self.running.operations, get=hang):
      with self.assertRaisesRegex(byte_store.TransportError, "replaced while"):
        client.get("a")


class NoStoreTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    folder = self.enterContext(tempfile.TemporaryDirectory(prefix="tba-"))
    self.folder = pathlib.Path(folder)
    self.path = self.folder / "locator.json"

  def announce(self, address):
    locator.write_locator(self.path, locator.Locator("run", 3, address, 12345))

  def assert_no_store(self, pattern):
    start = time.monotonic()
    with self.assertRaisesRegex(byte_store.DeadlineExceededError, pattern):
      kv_client.KvTransport(self.path, deadline_s=0.3, poll_s=0.02)
    self.assertGreaterEqual(time.monotonic() - start, 0.3)

  def listen(self, kind):
    """Returns a socket that accepts and says nothing, and announces it."""
    if kind == "unix":
      silent = socket.socket(socket.AF_UNIX)
      silent.bind(f"{self.folder}/kv3.sock")
      self.announce(f"unix:{self.folder}/kv3.sock")
    else:
      silent = socket.socket()
      silent.bind(("127.0.0.1", 0))
      self.announce(f"127.0.0.1:{silent.getsockname()[1]}")
    silent.listen()
    return silent

  def test_names_missing_locator(self):
    self.assert_no_store(f"within 0.3 s .*{self.path}.*announces none")

  def test_reports_address_without_listener(self):
    # A connect would abort this process.
    self.announce(f"unix:{self.folder}/kv3.sock")
    self.assert_no_store("nothing listens there: .*generation 3, at .*12345")

  @parameterized.parameters("unix", "tcp")
  def test_gives_up_on_silent_service(self, kind):
    with self.listen(kind):
      self.assert_no_store("no answer to get 'meta/store' within .*12345")

  @parameterized.product(kind=("unix", "tcp"), goes=(False, True))
  @pytest.mark.slow
  def test_silent_service_leaves_no_thread(self, kind, goes):
    others = _workers()
    silent = self.listen(kind)
    self.addCleanup(silent.close)
    self.assert_no_store("no answer to get 'meta/store'")
    self.assertNotEmpty(_workers() - others)
    if goes:
      silent.close()
    waiting.wait_until(lambda: not _workers() - others, "its end")

  def test_names_reason_of_failed_connect(self):
    error = jax_kv.ConnectError("no such file: cert")
    with self.listen("unix"):
      with mock.patch.object(jax_kv, "connect", side_effect=error):
        self.assert_no_store("get 'meta/store': no such file: cert .*12345")

  def test_waits_for_late_host(self):
    running = running_host.RunningHost(spool=self.folder / "spool")
    timer = threading.Timer(0.2, running.__enter__)
    timer.start()
    client = kv_client.KvTransport(
        self.folder / "spool" / locator.FILE_NAME, deadline_s=60.0
    )
    timer.join()
    self.addCleanup(running.__exit__)
    self.assertEqual(client.generation, 1)
    client.close()
