# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Processes survive the loss of the store and of each other."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

from absl.testing import parameterized

from tba_jax.transport import byte_store
from tba_jax.transport.kv import kv_client
from tba_jax.transport.kv import locator
from tests.support import waiting
from tests.transport import running_host

_ROOT = pathlib.Path(kv_client.__file__).parents[2]

# Serves until it is killed.
_HOST = """
import sys, threading
from tba_jax.transport.kv import kv_host
timeout_s = float(sys.argv[2])
host = kv_host.KvHost(sys.argv[1], "run", probe_timeout_s=timeout_s)
host.run(threading.Event())
"""

# Sends 0, 1, 2 … and continues after losses, until the store has "stop".
_SENDER = """
import sys
from tba_jax.transport import byte_store
from tba_jax.transport.kv import kv_client
client = kv_client.KvTransport(sys.argv[1], deadline_s=60.0, poll_s=0.01)
number, generations = 0, {client.generation}
while True:
  try:
    if client.get("stop"):
      break
    client.put(f"sent/{sys.argv[2]}", str(number).encode())
    number += 1
  except byte_store.TransportError:
    generations.add(client.reconnect())
print(number > 0, sorted(generations))
"""

# Connects to a hung service, and exits although a thread hangs.
_LATE = """
import sys
from tba_jax.transport import byte_store
from tba_jax.transport.kv import kv_client
try:
  kv_client.KvTransport(sys.argv[1], deadline_s=1.0)
except byte_store.DeadlineExceededError as error:
  print("no answer to get" in str(error))
"""

# A process of a JAX cluster of its own, which outlives the store.
_CLUSTER = """
import os, signal, sys
import jax
from tba_jax.transport import byte_store
from tba_jax.transport.kv import kv_client
jax.distributed.initialize(sys.argv[2], 1, 0)
first = kv_client.KvTransport(sys.argv[1], deadline_s=60.0)
second = kv_client.KvTransport(sys.argv[1], deadline_s=60.0)
os.kill(int(sys.argv[3]), signal.SIGKILL)
for client in (first, second):
  try:
    while True:
      client.get("a")
  except byte_store.TransportError:
    client.reconnect()
first.put("a", b"x")
assert second.get("a") == b"x"
print(float(jax.jit(lambda x: x + 1)(1.0)), first.generation)
jax.distributed.shutdown()
"""


def _start(code: str, *args: object) -> subprocess.Popen:
  return subprocess.Popen(
      [sys.executable, "-c", code, *map(str, args)],
      cwd=_ROOT,
      stdout=subprocess.PIPE,
      text=True,
  )


class ServiceLossTest(parameterized.TestCase):

  def start(self, **host_args):
    return self.enterContext(running_host.RunningHost(**host_args))

  def start_child(self, code, *args):
    child = _start(code, *args)
    self.addCleanup(child.stdout.close)
    self.addCleanup(child.wait)
    self.addCleanup(child.kill)
    return child

  def test_clients_survive_killed_and_stopped_services(self):
    running = self.start(probe_timeout_s=5.0)
    path = running.host.locator_path
    senders = [self.start_child(_SENDER, path, i) for i in range(2)]
    victim = self.start_child(_SENDER, path, "victim")
    client = running.client()
    names = [f"sent/{i}" for i in (0, 1, "victim")]
    for generation, kill in enumerate(
        (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL), start=1
    ):
      self.assertEqual(client.generation, generation)
      # All clients work in this generation.
      waiting.wait_until(lambda: set(client.list("sent")) >= set(names))
      if victim.poll() is None and generation == 2:
        # A killed client disturbs nobody.
        victim.kill()
        victim.wait()
        names.remove("sent/victim")
        client.delete("sent/victim")
      if kill == signal.SIGSTOP:
        waiting.stop(running.host.child_pid)
      else:
        os.kill(running.host.child_pid, kill)
      with self.assertRaises(byte_store.TransportError):
        while True:
          client.get("sent/0")
      self.assertEqual(client.reconnect(), generation + 1)
    waiting.wait_until(lambda: set(client.list("sent")) == set(names))
    client.put("stop", b"1")
    for sender in senders:
      out, _ = sender.communicate(timeout=60)
      self.assertEqual((sender.returncode, out), (0, "True [1, 2, 3, 4]\n"))

  def test_client_leaves_hung_service(self):
    running = self.start()
    path = running.host.locator_path
    clients = [running.client(deadline_s=1.0) for _ in range(2)]
    service = locator.read_locator(path)
    waiting.stop(service.pid)
    late = self.start_child(_LATE, path)
    for client in clients:
      start = time.monotonic()
      with self.assertRaisesRegex(
          byte_store.DeadlineExceededError,
          rf"no answer to put 'a' within 1\.\d s from .* generation 1, at"
          rf" {service.address} \(process {service.pid}\)",
      ):
        client.put("a", b"x")
      self.assertLess(time.monotonic() - start, 30.0)
      # Nothing is sent after the loss.
      with self.assertRaisesRegex(byte_store.TransportError, "reconnect first"):
        client.get("a")
    with self.assertRaises(byte_store.DeadlineExceededError):
      clients[0].reconnect(0.5)
    out, _ = late.communicate(timeout=60)
    self.assertEqual((late.returncode, out), (0, "True\n"))
    # One client waits for the same service, one for its successor.
    os.kill(service.pid, signal.SIGCONT)
    self.assertEqual(clients[0].reconnect(60.0), 1)
    self.assertTrue(clients[0].put("b", b"x"))
    os.kill(service.pid, signal.SIGKILL)
    self.assertEqual(clients[1].reconnect(60.0), 2)
    with self.assertRaises(byte_store.TransportError):
      clients[0].get("b")
    self.assertEqual(clients[0].reconnect(60.0), 2)

  @parameterized.parameters("", "127.0.0.1:0")
  def test_client_connects_past_hung_service(self, address):
    running = self.start(probe_timeout_s=2.0, address=address)
    waiting.stop(running.host.child_pid)
    # Connects once generation 1 is given up, long before 60 s.
    client = running.client(deadline_s=60.0)
    self.assertEqual(client.generation, 2)
    self.assertTrue(client.put("a", b"x"))

  def test_client_survives_losses_in_quick_succession(self):
    running = self.start()
    client = running.client()
    for generation in range(1, 5):
      waiting.wait_until(
          lambda: running.kinds().count("started") == generation  # noqa: B023
      )
      os.kill(running.host.child_pid, signal.SIGKILL)
    with self.assertRaises(byte_store.TransportError):
      client.get("a")
    self.assertEqual(client.reconnect(), 5)
    self.assertIsNone(client.get("a"))

  def test_waiting_threads_return_when_service_dies(self):
    running = self.start()
    clients = [running.client() for _ in range(4)]
    waiting.stop(running.host.child_pid)
    errors = []

    def wait(client):
      try:
        client.get("a")
      except byte_store.TransportError as error:
        errors.append(error)

    threads = [
        threading.Thread(target=wait, args=(client,)) for client in clients
    ]
    for thread in threads:
      thread.start()
    os.kill(running.host.child_pid, signal.SIGKILL)
    for thread in threads:
      thread.join(30)
    self.assertLen(errors, len(clients))
    self.assertEqual([client.reconnect() for client in clients], [2] * 4)

  def test_process_of_jax_cluster_survives(self):
    running = self.start()
    with socket.socket() as probe:
      probe.bind(("127.0.0.1", 0))
      coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    child = self.start_child(
        _CLUSTER, running.host.locator_path, coordinator, running.host.child_pid
    )
    out, _ = child.communicate(timeout=100)
    self.assertEqual((child.returncode, out), (0, "2.0 2\n"))


class HostLossTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    folder = self.enterContext(tempfile.TemporaryDirectory(prefix="tba-"))
    self.spool = pathlib.Path(folder) / "spool"
    self.path = self.spool / locator.FILE_NAME

  def start_host(self, probe_timeout_s=30.0):
    host = _start(_HOST, self.spool, str(probe_timeout_s))
    self.addCleanup(host.stdout.close)
    self.addCleanup(host.wait)
    self.addCleanup(host.kill)
    return host

  def wait_for_generation(self, generation):
    def is_announced():
      result = locator.read_locator(self.path)
      return result is not None and result.generation == generation

    waiting.wait_until(is_announced)
    return locator.read_locator(self.path)

  @parameterized.named_parameters(("running", False), ("stopped", True))
  def test_service_ends_with_its_host(self, stopped):
    host = self.start_host()
    service = self.wait_for_generation(1)
    client = kv_client.KvTransport(self.path, deadline_s=60.0)
    self.addCleanup(client.close)
    if stopped:
      waiting.stop(service.pid)
    host.kill()
    host.wait()
    waiting.wait_until(lambda: not waiting.is_running(service.pid), "its end")
    with self.assertRaises(byte_store.TransportError):
      client.get("a")
    # The dead host's locator is still there, but refused.
    self.assertEqual(locator.read_locator(self.path), service)
    with self.assertRaises(byte_store.DeadlineExceededError):
      client.reconnect(0.2)
    self.start_host()
    self.assertEqual(client.reconnect(60.0), 2)
    self.assertTrue(client.put("a", b"x"))

  def test_takes_no_suspended_machine_for_silent_service(self):
    host = self.start_host(probe_timeout_s=1.0)
    service = self.wait_for_generation(1)
    pids = host.pid, service.pid
    for pid in pids:
      waiting.stop(pid)
    time.sleep(3.0)
    for pid in pids:
      os.kill(pid, signal.SIGCONT)
      time.sleep(0.3)
    time.sleep(2.0)
    self.assertEqual(locator.read_locator(self.path), service)

  def test_second_host_is_refused(self):
    self.start_host()
    service = self.wait_for_generation(1)
    client = kv_client.KvTransport(self.path, deadline_s=60.0)
    self.addCleanup(client.close)
    client.put("a", b"x")
    second = subprocess.run(
        [sys.executable, "-c", _HOST, str(self.spool), "30"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    self.assertEqual(second.returncode, 1)
    self.assertIn("is held by another store host, process", second.stderr)
    self.assertEqual(client.get("a"), b"x")
    self.assertEqual(locator.read_locator(self.path), service)
