# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Carries params over TCP, from each process of the trainer to each searcher.

A process of the trainer keeps its shards of the newest versions in its host's
memory, encrypted (`seal.py`), and serves them. A searcher receives the pieces
over several connections at once, directly into place in its host's memory, and
requests pieces lost with a broken connection again. No version has a time
limit: a connection that moves no piece within `store.deadline_s` has failed.

A dropped version stays until the readers that have begun it are done.

Not `jax.experimental.transfer`: as of jax 0.10.2, a stranger's connection to
its port can abort the trainer, a pull from a silent peer never ends, and data
is neither encrypted nor authenticated. Its bytes also pass through the memory
of both hosts.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
import functools
import itertools
import queue
import socket
import struct
import threading
import time
from typing import Any

from absl import logging
import jax
import numpy as np

from tba_jax.system import processes
from tba_jax.transport import addresses
from tba_jax.transport import byte_store
from tba_jax.transport import wire
from tba_jax.transport.kv import locator
from tba_jax.transport.params import boxes
from tba_jax.transport.params import carrier
from tba_jax.transport.params import seal as seal_lib
from tba_jax.transport.params import version

_MAX_THREADS = 8
_LENGTH = struct.Struct("<I")
_RANGE = struct.Struct("<QQ")
_MAX_REQUEST_BYTES = 1 << 16
_HELLO_S = 10.0
_ACCEPT_PAUSE_S = 0.5
_ACCEPTED, _UNKNOWN = b"\1", b"\0"
# Most pieces of a request.
RANGE_PIECES = 64
# Most connections of a thread that may break in a row.
_MAX_FAILURES = 3
# Dropped versions still being read, from which on no new version is added.
MAX_DROPPED = 2
_MAX_CONNECTIONS = 1024


class ParamsServer:
  """Serves the shards of one process of the trainer; see `Network`.

  versions: salt -> encrypted pieces of each version.

  Args:
    address: "HOST:0" or "HOST:first-last", as `publish.address`.
    secret: key of the run's messages.
    stall_s: longest time for a piece to be sent.
  """

  def __init__(
      self, address: str, *, run_id: str, secret: bytes, stall_s: float
  ):
    self._run_id = run_id
    self._secret = secret
    self._stall_s = stall_s
    self._lock = threading.Lock()
    self.versions: dict[str, list[bytes]] = {}
    # Salt -> number of connections that read the version.
    self._readers: dict[str, int] = {}
    self._salts: set[str] = set()
    self._connections: set[socket.socket] = set()
    self._is_closed = False
    host, ports = addresses.split_range(address)
    self._listener = _listen(host, ports)
    port = self._listener.getsockname()[1]
    self.address = addresses.join_address(host, port)
    threading.Thread(
        target=self._accept, name="params-accept", daemon=True
    ).start()

  def add(self, tag: str, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Adds this process's shards of a version; waits for the devices.

    Returns a source, an entry of the manifest: address, salt, shards.
    """
    salt = seal_lib.make_salt()
    seal = seal_lib.Seal(self._secret, self._run_id, tag, salt)
    shards = [
        (name, box, data)
        for name, leaf in leaves.items()
        for box, data in boxes.shards_of(leaf)
    ]
    pieces: list[bytes] = []
    ahead = iter(shards[1:])
    with futures.ThreadPoolExecutor(_num_threads(), "params-seal") as pool:
      for _, _, data in shards:
        # Meanwhile the next shard is copied from the device.
        following = next(ahead, None)
        if following is not None and isinstance(following[2], jax.Array):
          following[2].copy_to_host_async()
        plain = seal_lib.pieces(carrier.flat_bytes(data))
        pieces += pool.map(seal.encrypt, itertools.count(len(pieces)), plain)
    with self._lock:
      self.versions[salt] = pieces
      self._salts.add(salt)
    return {
        "address": self.address,
        "salt": salt,
        "shards": [[name, box] for name, box, _ in shards],
    }

  def keep(self, salts: Sequence[str]) -> None:
    """Drops all other versions; their readers may finish."""
    with self._lock:
      self._salts = set(salts)
      self._drop_unread()

  def num_dropped(self) -> int:
    """Returns the number of dropped versions that are still being read."""
    with self._lock:
      return len(self.versions.keys() - self._salts)

  def _drop_unread(self) -> None:
    """Frees dropped versions that nobody reads. Under the lock."""
    for salt in self.versions.keys() - self._salts - self._readers.keys():
      del self.versions[salt]

  def close(self) -> None:
    self._is_closed = True
    self.keep(())
    # Wake the accepting thread.
    with self._lock:
      connections = list(self._connections)
    for connection in [self._listener, *connections]:
      try:
        connection.shutdown(socket.SHUT_RDWR)
      except OSError:
        pass
      connection.close()

  def _accept(self) -> None:
    while True:
      try:
        connection, _ = self._listener.accept()
      except OSError:
        if self._is_closed:
          return
        time.sleep(_ACCEPT_PAUSE_S)  # Perhaps out of file handles.
        continue
      with self._lock:
        if len(self._connections) >= _MAX_CONNECTIONS:
          connection.close()
          continue
        self._connections.add(connection)
      threading.Thread(
          target=self._serve, args=(connection,), daemon=True
      ).start()

  def _serve(self, connection: socket.socket) -> None:
    """Serves a reader until it leaves, stalls or violates the protocol."""
    salt = ""
    try:
      connection.settimeout(_HELLO_S)
      connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
      salt = self._take_hello(connection)
      with self._lock:
        pieces = self.versions.get(salt)
        if pieces is not None:
          self._readers[salt] = self._readers.get(salt, 0) + 1
        else:
          salt = ""
      connection.settimeout(self._stall_s)
      connection.sendall(_UNKNOWN if pieces is None else _ACCEPTED)
      while pieces is not None:
        request = bytearray(_RANGE.size)
        receive_into(connection, memoryview(request))
        first, stop = _RANGE.unpack(request)
        if not first < stop <= len(pieces):
          return
        for piece in pieces[first:stop]:
          connection.sendall(piece)
    except (OSError, wire.WireError) as error:
      # A reader has finished, or its link was cut.
      logging.vlog(1, "reader of params: %s", error)
    finally:
      with self._lock:
        self._connections.discard(connection)
        if salt:
          self._readers[salt] -= 1
          if not self._readers[salt]:
            del self._readers[salt]
            self._drop_unread()
      connection.close()

  def _take_hello(self, connection: socket.socket) -> str:
    """Returns the salt that an authentic reader requests."""
    head = bytearray(_LENGTH.size)
    receive_into(connection, memoryview(head))
    (length,) = _LENGTH.unpack(head)
    if length > _MAX_REQUEST_BYTES:
      raise wire.WireError("length", f"request of {length} bytes")
    data = bytearray(length)
    receive_into(connection, memoryview(data))
    hello = wire.decode_placed(
        bytes(data), self._secret, self._run_id, "network", {"salt": str}
    )
    return hello["salt"]


class Network(carrier.Carrier):
  """The carrier "network".

  server: listener of a trainer process, once it has published; else None.

  Args:
    find_address: returns where this process serves; called only in a trainer.
    secret: key of the run's messages.
    stall_s: longest time for a piece to arrive.
    peers: `peers.Leader` of a trainer with several processes.
  """

  name = "network"
  schema = {"sources": [{"address": str, "salt": str, "shards": [list]}]}

  @classmethod
  def make(cls, place: carrier.CarrierPlace) -> "Network":
    return cls(
        place.find_address,
        run_id=place.run_id,
        secret=place.secret,
        stall_s=place.deadline_s,
        peers=place.peers,
    )

  def __init__(
      self,
      find_address: Callable[[], str],
      *,
      run_id: str,
      secret: bytes,
      stall_s: float,
      peers: Any = None,
  ):
    self._find_address = find_address
    self._keys = {"run_id": run_id, "secret": secret}
    self._stall_s = stall_s
    self._peers = peers
    self.server: ParamsServer | None = None
    self._salts: dict[str, str] = {}

  def write(
      self, tag: str, leaves: Mapping[str, Any]
  ) -> tuple[dict[str, Any], Any]:
    if self.server is None:
      self.server = ParamsServer(
          self._find_address(), stall_s=self._stall_s, **self._keys
      )
    if self._peers is not None:
      self._peers.begin(tag, keep=[*self._salts, tag])
    sources = [self.server.add(tag, leaves)]
    if self._peers is not None:
      num_bytes = version.num_bytes(version.specs_of(leaves))
      sources += self._peers.collect(num_bytes)
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    _check_cover(shapes, sources)
    self._salts[tag] = sources[0]["salt"]
    # Drop the remains of a failed attempt.
    self.server.keep(list(self._salts.values()))
    return {"sources": sources}, None

  def is_full(self) -> bool:
    return self.server is not None and self.server.num_dropped() >= MAX_DROPPED

  def drop(self, packed: carrier.PackedVersion) -> None:
    self._salts.pop(packed.tag, None)
    if self.server is not None:
      self.server.keep(list(self._salts.values()))

  def read(
      self,
      transport: byte_store.Transport,
      tag: str,
      carried: Mapping[str, Any],
      specs: version.Specs,
  ) -> dict[str, np.ndarray] | None:
    sources = carried["sources"]
    _check_cover({name: shape for name, (shape, _) in specs.items()}, sources)
    fetch = functools.partial(
        _fetch,
        tag=tag,
        specs=specs,
        num_threads=-(-_num_threads() // len(sources)),
        stall_s=self._stall_s,
        **self._keys,
    )
    pieces: dict[str, list[Any]] = {name: [] for name in specs}
    try:
      # All at once, so that no source drops the version meanwhile.
      with futures.ThreadPoolExecutor(len(sources), "params-sources") as pool:
        for shards in pool.map(fetch, sources):
          for name, box, data in shards:
            pieces[name].append((box, data))
    except wire.WireError:
      if transport.get(f"p/{tag}/meta") is None:
        return None
      raise
    return {
        name: boxes.cut_box(boxes.box_of((), shape), dtype, pieces.pop(name))
        for name, (shape, dtype) in specs.items()
    }

  def close(self) -> None:
    if self.server is not None:
      self.server.close()


def _check_cover(
    shapes: Mapping[str, Sequence[int]], sources: Sequence[Mapping[str, Any]]
) -> None:
  """Raises WireError if the sources' shards do not cover a leaf."""
  parts: dict[str, list[boxes.Box]] = {name: [] for name in shapes}
  for source in sources:
    for name, box in source["shards"]:
      parts[name].append(box)
  for name, shape in shapes.items():
    boxes.check_cover(name, shape, parts[name])


def _fetch(
    source: Mapping[str, Any],
    tag: str,
    specs: version.Specs,
    *,
    num_threads: int,
    stall_s: float,
    run_id: str,
    secret: bytes,
) -> list[tuple[str, boxes.Box, np.ndarray]]:
  """Returns leaf, box and content of a source's shards.

  Raises:
    WireError: the source is out of reach, has dropped the version, or sent
      something else.
  """
  shards, places = [], []
  for name, box in source["shards"]:
    lengths = [stop - start for start, stop in box]
    array = np.empty(lengths, specs[name][1])
    shards.append((name, box, array))
    flat = array.reshape(-1).view(np.uint8)
    places += [(name, piece) for piece in seal_lib.pieces(flat)]
  seal = seal_lib.Seal(secret, run_id, tag, source["salt"])
  hello = wire.encode_message(
      {"run": run_id, "key": "network", "salt": source["salt"]}, secret
  )
  ranges: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
  starts = range(0, len(places), RANGE_PIECES)
  for first in starts:
    ranges.put((first, min(first + RANGE_PIECES, len(places))))
  failed = threading.Event()

  def receive(connection: socket.socket, first: int, stop: int) -> None:
    connection.sendall(_RANGE.pack(first, stop))
    sealed = memoryview(bytearray(seal_lib.PIECE_BYTES + seal_lib.TAG_BYTES))
    for number in range(first, stop):
      name, place = places[number]
      part = sealed[: len(place) + seal_lib.TAG_BYTES]
      receive_into(connection, part)
      plain = seal.decrypt(name, number, part)
      place[:] = np.frombuffer(plain, np.uint8)

  def work() -> None:
    """Receives ranges until none is left, or another thread has failed."""
    connection, todo, failures = None, None, 0
    try:
      while not failed.is_set():
        try:
          if connection is None:
            connection = connect(source["address"], hello, stall_s)
          todo = todo or ranges.get_nowait()
          receive(connection, *todo)
          todo, failures = None, 0
        except queue.Empty:
          return
        except OSError:
          # A new connection gets the range from its start.
          failures += 1
          if failures == _MAX_FAILURES:
            raise
          if connection is not None:
            connection.close()
          connection = None
    except BaseException:
      failed.set()
      raise
    finally:
      if connection is not None:
        connection.close()

  num_threads = max(min(num_threads, len(starts)), 1)
  try:
    with futures.ThreadPoolExecutor(num_threads, "params-network") as pool:
      jobs = [pool.submit(work) for _ in range(num_threads)]
      for job in jobs:
        job.result()
  except OSError as error:
    raise wire.WireError(
        "network",
        f"params at {source['address']}: {error or type(error).__name__}; a"
        " piece may take config.store.deadline_s ="
        f" {stall_s:g}, and config.publish.address names an address that"
        " searchers reach",
    ) from error
  return shards


def connect(address: str, hello: bytes, stall_s: float) -> socket.socket:
  """Returns a connection on which the server has accepted this reader."""
  wait_s = min(_HELLO_S, stall_s)
  connection = socket.create_connection(locator.split_address(address), wait_s)
  try:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(_LENGTH.pack(len(hello)) + hello)
    answer = bytearray(1)
    receive_into(connection, memoryview(answer))
    if answer != _ACCEPTED:
      raise wire.WireError("missing", f"{address} has dropped the version")
    connection.settimeout(stall_s)
  except BaseException:
    connection.close()
    raise
  return connection


def receive_into(connection: socket.socket, data: memoryview) -> None:
  """Fills `data`; raises OSError if the peer leaves or falls silent."""
  while data:
    count = connection.recv_into(data)
    if not count:
      raise ConnectionResetError("the connection was closed")
    data = data[count:]


def _listen(host: str, ports: Sequence[int]) -> socket.socket:
  """Returns a socket that listens at the first free port."""
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  for port in ports:
    try:
      return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
      failure = error
  raise OSError(
      failure.errno,
      f"config.publish.address: no port of {host} in {ports[0]} to {ports[-1]}"
      f" can be listened at ({failure.strerror})",
  )


def _num_threads() -> int:
  return min(_MAX_THREADS, len(processes.available_cores()))
