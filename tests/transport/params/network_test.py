# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Params over the network: cut, stalled, forged and strange connections."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from tba_jax.transport import wire
from tba_jax.transport.kv import locator
from tba_jax.transport.params import network
from tba_jax.transport.params import version
from tests.support import waiting
from tests.transport import tcp_proxy
from tests.transport.params import carrier_test

# Some ranges of some pieces.
_ROWS, _COLUMNS = 3000, 1000


class NetworkTest(carrier_test.CarrierCase):

  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.object(network, "RANGE_PIECES", 2))
    self.leaves["['big']"] = np.random.default_rng(0).random(
        (_ROWS, _COLUMNS), np.float32
    )
    self.specs = version.specs_of(self.leaves)
    self.writer = self.make("network")
    self.packed = self.publish(self.writer)
    self.proxy = self.enter_context(
        tcp_proxy.TcpProxy(locator.split_address(self.source["address"]))
    )

  @property
  def source(self):
    return self.packed.carried["sources"][0]

  def read_through_proxy(self, stall_s=30.0):
    self.source["address"] = self.proxy.address
    return self.read(self.make("network", deadline_s=stall_s), self.packed)

  def check(self, leaves):
    for name, leaf in self.leaves.items():
      np.testing.assert_array_equal(leaves[name], np.asarray(leaf))

  def test_params_are_not_readable_on_wire(self):
    self.check(self.read_through_proxy())
    row = self.leaves["['big']"][7].tobytes()
    self.assertGreater(len(self.proxy.forwarded), 4 * _ROWS * _COLUMNS)
    self.assertNotIn(row, self.proxy.forwarded)

  def test_broken_connections_are_replaced(self):
    """The link breaks in the middle of a range; what has arrived is kept."""
    receive, calls, lock = network.receive_into, [0], threading.Lock()

    def break_now_and_then(connection, data):
      with lock:
        calls[0] += 1
        is_broken = calls[0] in (7, 12)
      if is_broken:
        connection.close()
      receive(connection, data)

    with mock.patch.object(network, "receive_into", break_now_and_then):
      self.check(self.read_through_proxy())

  def test_refused_connections_fail_with_settings(self):
    self.proxy.cut(reset=True)
    with self.assertRaisesRegex(wire.WireError, "network.*publish.address"):
      self.read_through_proxy()

  @parameterized.parameters(True, False)
  def test_cut_link_ends_read(self, reset):
    """A reader of a silent link gives up after three waits for a piece."""
    decrypt, started = network.seal_lib.Seal.decrypt, threading.Event()

    def note(*args):
      if not started.is_set():
        started.set()
        self.proxy.cut(reset=reset)
      return decrypt(*args)

    began = time.monotonic()
    with mock.patch.object(network.seal_lib.Seal, "decrypt", note):
      with self.assertRaisesRegex(wire.WireError, "store.deadline_s"):
        self.read_through_proxy(stall_s=0.5)
    self.assertLess(time.monotonic() - began, 15.0)
    self.proxy.mend()
    self.check(self.read_through_proxy())

  def test_slow_link_has_no_time_limit(self):
    """Pieces come slower than the version's size over the limit would allow."""
    receive = network.receive_into

    def receive_slowly(connection, data):
      time.sleep(0.1)
      receive(connection, data)

    began = time.monotonic()
    with mock.patch.object(network, "receive_into", receive_slowly):
      self.check(self.read_through_proxy(stall_s=0.5))
    self.assertGreater(time.monotonic() - began, 0.5)

  @parameterized.parameters(0, 5, 1 << 20, (1 << 20) + 15)
  def test_forged_bytes_are_refused(self, position):
    (pieces,) = self.writer.server.versions.values()
    number = max(range(len(pieces)), key=lambda i: len(pieces[i]))
    piece = bytearray(pieces[number])
    piece[position] ^= 1
    pieces[number] = bytes(piece)
    with self.assertRaisesRegex(wire.WireError, "is torn"):
      self.read(self.make("network"), self.packed)

  def test_pieces_in_another_order_are_refused(self):
    (pieces,) = self.writer.server.versions.values()
    large = [i for i, piece in enumerate(pieces) if len(piece) > 1 << 20]
    first, second = large[:2]
    pieces[first], pieces[second] = pieces[second], pieces[first]
    with self.assertRaisesRegex(wire.WireError, "is torn"):
      self.read(self.make("network"), self.packed)

  def test_another_version_is_refused(self):
    other = self.publish(self.writer, version.Version(1, 4))
    self.source["salt"] = other.carried["sources"][0]["salt"]
    with self.assertRaisesRegex(wire.WireError, "is torn"):
      self.read(self.make("network"), self.packed)

  @parameterized.parameters(b"", b"GET / HTTP/1.0\r\n\r\n", bytes(4096), None)
  def test_strangers_get_nothing_and_do_no_harm(self, sent):
    forged = wire.encode_message(
        {"run": "run", "key": "network", "salt": self.source["salt"]},
        b"x" * 32,
    )
    sent = len(forged).to_bytes(4, "little") + forged if sent is None else sent
    address = locator.split_address(self.source["address"])
    with socket.create_connection(address, 10) as stranger:
      stranger.sendall(sent + os.urandom(16))
      try:
        stranger.shutdown(socket.SHUT_WR)
        answer = stranger.recv(1)
      except OSError:  # It was closed at once.
        answer = b""
      self.assertEmpty(answer)
    self.check(self.read(self.make("network"), self.packed))

  def test_dropped_version_stays_for_current_readers(self):
    server = self.writer.server
    decrypt, entered = network.seal_lib.Seal.decrypt, threading.Event()
    go_on = threading.Event()

    def wait(*args):
      entered.set()
      go_on.wait(20)
      return decrypt(*args)

    result = []
    self.enter_context(
        mock.patch.object(network.seal_lib.Seal, "decrypt", wait)
    )
    reader = self.make("network")
    thread = threading.Thread(
        target=lambda: result.append(self.read(reader, self.packed))
    )
    thread.start()
    self.assertTrue(entered.wait(20))
    self.drop(self.writer, self.packed)
    self.assertEqual(server.num_dropped(), 1)
    self.assertFalse(self.writer.is_full())
    go_on.set()
    thread.join()
    self.check(result[0])
    waiting.wait_until(lambda: not server.num_dropped(), wait_s=20)
    self.assertIsNone(self.read(reader, self.packed))

  def test_many_versions_under_readers_hold_next_back(self):
    readers = []
    for step in range(5, 5 + network.MAX_DROPPED):
      packed = self.publish(self.writer, version.Version(1, step))
      source = packed.carried["sources"][0]
      hello = wire.encode_message(
          {"run": "run", "key": "network", "salt": source["salt"]},
          carrier_test.KEYS["secret"],
      )
      readers.append(network.connect(source["address"], hello, 10.0))
      self.drop(self.writer, packed)
    self.assertTrue(self.writer.is_full())
    readers.pop().close()
    waiting.wait_until(lambda: not self.writer.is_full(), wait_s=20)
    for reader in readers:
      reader.close()

  def test_ports_of_range_are_used(self):
    with socket.create_server(("127.0.0.1", 0)) as taken:
      port = taken.getsockname()[1]
      ports = f"127.0.0.1:{port}-{port + 20}"
      server = network.ParamsServer(ports, stall_s=1.0, **carrier_test.KEYS)
      self.addCleanup(server.close)
      _, used = locator.split_address(server.address)
      self.assertBetween(used, port + 1, port + 20)
      with self.assertRaisesRegex(OSError, "publish.address"):
        network.ParamsServer(
            f"127.0.0.1:{port}", stall_s=1.0, **carrier_test.KEYS
        )


def serve_big():
  """Serves a version until it is killed; the main function of a process."""
  server = network.ParamsServer(
      "127.0.0.1:0", stall_s=30.0, **carrier_test.KEYS
  )
  big = np.ones((100, 1 << 18), np.float32)
  print(json.dumps(server.add(carrier_test.TAG, {"big": big})), flush=True)
  time.sleep(600)


def read_one_piece(source):
  """Begins to read and waits to be killed; the main function of a process."""

  def wait(*args):
    os.write(1, b'"reading"\n')  # Several threads may be here.
    time.sleep(600)

  with mock.patch.object(network.seal_lib.Seal, "decrypt", wait):
    network.Network(lambda: "", stall_s=30.0, **carrier_test.KEYS).read(
        None,
        carrier_test.TAG,
        {"sources": [source]},
        {"big": ((100, 1 << 18), np.dtype(np.float32))},
    )


class KilledTest(carrier_test.CarrierCase):
  """One of two processes is killed in the middle of a transfer."""

  def start(self, name, *args):
    code = (
        "import json, sys\n"
        "from tests.transport.params import network_test\n"
        f"network_test.{name}(*json.loads(sys.argv[1]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(args)],
        cwd=pathlib.Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        text=True,
    )
    self.addCleanup(process.stdout.close)
    self.addCleanup(process.wait)
    self.addCleanup(process.kill)
    return process, json.loads(process.stdout.readline())

  def test_reader_of_killed_trainer_refuses_version(self):
    process, source = self.start("serve_big")
    decrypt = network.seal_lib.Seal.decrypt

    def kill_first(*args):
      process.kill()
      process.wait()
      return decrypt(*args)

    self.transport.put(f"p/{carrier_test.TAG}/meta", b"the manifest")
    with mock.patch.object(network.seal_lib.Seal, "decrypt", kill_first):
      with self.assertRaisesRegex(wire.WireError, "network"):
        self.make("network").read(
            self.transport,
            carrier_test.TAG,
            {"sources": [source]},
            {"big": ((100, 1 << 18), np.dtype(np.float32))},
        )

  def test_killed_reader_releases_its_version(self):
    server = network.ParamsServer(
        "127.0.0.1:0", stall_s=30.0, **carrier_test.KEYS
    )
    self.addCleanup(server.close)
    big = np.ones((100, 1 << 18), np.float32)
    source = server.add(carrier_test.TAG, {"big": big})
    process, _ = self.start("read_one_piece", source)
    server.keep(())
    self.assertEqual(server.num_dropped(), 1)
    process.kill()
    waiting.wait_until(lambda: not server.num_dropped(), wait_s=20)


class SourcesTest(carrier_test.CarrierCase):
  """Shards from several processes, as `peers` collects them."""

  def test_leaves_are_put_together_from_two_processes(self):
    whole = np.arange(6000, dtype=np.float32).reshape(60, 100)
    servers = [
        network.ParamsServer("127.0.0.1:0", stall_s=10.0, **carrier_test.KEYS)
        for _ in range(2)
    ]
    sources = []
    for i, server in enumerate(servers):
      self.addCleanup(server.close)
      part = server.add(carrier_test.TAG, {"w": whole[:, 50 * i : 50 * i + 50]})
      part["shards"] = [["w", [[0, 60], [50 * i, 50 * i + 50]]]]
      sources.append(part)
    reader = self.make("network")
    specs = version.specs_of({"w": whole})
    read = lambda: reader.read(
        self.transport, carrier_test.TAG, {"sources": sources}, specs
    )
    self.transport.put(f"p/{carrier_test.TAG}/meta", b"the manifest")
    np.testing.assert_array_equal(read()["w"], whole)
    # One process died.
    servers[1].close()
    with self.assertRaises(wire.WireError):
      read()


if __name__ == "__main__":
  absltest.main()
