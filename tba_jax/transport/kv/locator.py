# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the store by its host's locator file, or by an announcer.

The store's address changes with every generation, so hosts without a shared
directory ask an announcer at a fixed address. The request is a nonce of 16
bytes; the answer is the locator with this nonce, authenticated with the run's
secret, so that it can be neither forged nor replayed.
"""

import asyncio
import dataclasses
import hashlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from typing import Any

from tba_jax.system import background
from tba_jax.system import jsonl
from tba_jax.transport import wire

FILE_NAME = "locator.json"

# Key of a service's run and generation, which a client compares with the
# locator before it trusts an address.
IDENTITY_KEY = "meta/store"
# Passes `root` to a service.
ROOT_VARIABLE = "TBA_JAX_STORE_ROOT"

_NONCE_BYTES = 16
_MAX_ANSWER_BYTES = 1 << 16
# Deadline of a request and its answer, on both sides.
_DEADLINE_S = 2.0
# Beyond this, the oldest connection is closed, so idle ones block nobody.
MAX_CONNECTIONS = 64
# Least time between two requests of a client, which caches the last answer.
_EVERY_S = 0.25


@dataclasses.dataclass(frozen=True)
class Locator:
  """Address of one generation of a run's store.

  address: "unix:/path" or "host:port".
  pid: process id of the service.
  tls: whether the store is served only over mutual TLS.
  """

  run: str
  generation: int
  address: str
  pid: int
  tls: bool = False

  def __str__(self) -> str:
    return (
        f"key-value store of run {self.run!r}, generation {self.generation},"
        f" at {self.address} (process {self.pid})"
    )


_FIELDS = {field.name: field.type for field in dataclasses.fields(Locator)}


def root(run_id: str, secret: bytes) -> str:
  """Returns the directory of all of a run's keys in its store.

  The store serves anyone who reaches it, but neither lists nor deletes without
  the full name of a directory: without the secret, nobody finds a run's keys.
  """
  return hashlib.blake2b(
      f"root of {run_id}".encode(), key=secret, digest_size=16
  ).hexdigest()


def identity(run_id: str, generation: int) -> bytes:
  """Returns the value of `IDENTITY_KEY` in a generation of a run."""
  return json.dumps({"run": run_id, "generation": generation}).encode()


def read_locator(path: str | os.PathLike[str]) -> Locator | None:
  """Returns the locator in a file, None without a file.

  Raises:
    ValueError: the file is not a locator.
  """
  fields = jsonl.read_object(path, _FIELDS)
  return None if fields is None else _locator(fields)


def _locator(fields: dict[str, Any]) -> Locator:
  return Locator(**{name: fields[name] for name in _FIELDS})


def write_locator(path: str | os.PathLike[str], locator: Locator) -> None:
  """Writes a locator file atomically."""
  jsonl.atomic_write_json(path, dataclasses.asdict(locator))


def accepts(address: str, wait_s: float) -> bool:
  """Returns whether something listens at `address`; waits up to `wait_s`."""
  try:
    if address.startswith("unix:"):
      with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(wait_s)
        probe.connect(address.removeprefix("unix:"))
    else:
      socket.create_connection(split_address(address), timeout=wait_s).close()
  except OSError:
    return False
  return True


class Announcer:
  """Serves a locator file at a fixed address, in one thread.

  Args:
    address: "host:port", port 0 for a free one.
    secret: key of the run's messages.
    path: locator file, which need not exist yet.
    deadline_s: longest time of a request and its answer.

  Raises:
    OSError: the address cannot be bound.
  """

  def __init__(
      self,
      address: str,
      secret: bytes,
      path: str | os.PathLike[str],
      deadline_s: float = _DEADLINE_S,
  ):
    self._secret = secret
    self._deadline_s = deadline_s
    self._path = path
    host, port = split_address(address)
    try:
      family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
      self._socket = socket.create_server((host, port), family=family)
    except OSError as error:
      raise OSError(
          f"config.store.locator={address}: cannot be bound: {error}"
      ) from error
    self.port = self._socket.getsockname()[1]
    # Open connections, oldest first.
    self._writers: dict[asyncio.StreamWriter, None] = {}
    self._worker = background.Thread(
        "announcer", lambda stop: asyncio.run(self._serve(stop)), close_s=5.0
    )

  def find(self) -> Locator | None:
    """Returns the locator to announce; raises ValueError for a damaged file."""
    return read_locator(self._path)

  def check(self) -> None:
    """Raises the thread's error, if any."""
    self._worker.check()

  def close(self) -> None:
    self._worker.close()

  async def _serve(self, stop: threading.Event) -> None:
    server = await asyncio.start_server(self._answer, sock=self._socket)
    while not stop.is_set():
      await asyncio.sleep(0.1)
    server.close()

  async def _answer(
      self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
  ) -> None:
    if len(self._writers) >= MAX_CONNECTIONS:
      oldest = next(iter(self._writers))
      del self._writers[oldest]
      # Ends the task by EOF: asyncio logs a traceback for each cancelled task.
      oldest.transport.abort()
    self._writers[writer] = None
    try:
      async with asyncio.timeout(self._deadline_s):
        nonce = await reader.readexactly(_NONCE_BYTES)
        run = self.find()
        if run is not None:
          message = {"nonce": nonce.hex(), **dataclasses.asdict(run)}
          writer.write(wire.encode_message(message, self._secret))
          await writer.drain()
    # A broken or slow connection, or a damaged locator file.
    except (OSError, EOFError, ValueError) as error:
      logging.debug("announcer: %s", error)
    finally:
      self._writers.pop(writer, None)
      writer.close()


class RemoteLocator:
  """Finds a store by the announcer at "host:port"."""

  def __init__(self, address: str, secret: bytes):
    self._address = address
    self._secret = secret
    self._asked_at = -_EVERY_S
    self._last: Locator | None = None

  def __str__(self) -> str:
    return f"announced at {self._address}"

  def __call__(self) -> Locator | None:
    """Returns the locator; without an answer in 2 s, the last one or None.

    Raises:
      ValueError: the answer is forged or replayed.
    """
    if time.monotonic() - self._asked_at >= _EVERY_S:
      try:
        self._last = ask_announcer(self._address, self._secret) or self._last
      finally:
        self._asked_at = time.monotonic()
    return self._last


def ask_announcer(
    address: str, secret: bytes, deadline_s: float = _DEADLINE_S
) -> Locator | None:
  """Returns the announcer's locator; None if it has none or does not answer.

  Raises:
    WireError: the answer is forged or replayed.
  """
  nonce = secrets.token_bytes(_NONCE_BYTES)
  deadline = time.monotonic() + deadline_s
  data = b""
  try:
    with socket.create_connection(
        split_address(address), deadline_s
    ) as connection:
      connection.sendall(nonce)
      while len(data) < _MAX_ANSWER_BYTES:
        # The deadline is for the whole answer, however slowly it arrives.
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = connection.recv(_MAX_ANSWER_BYTES - len(data))
        if not part:
          break
        data += part
  except OSError:
    return None
  if not data:
    return None
  try:
    answer = wire.decode_message(data, secret, {"nonce": str, **_FIELDS})
  except wire.WireError as error:
    raise wire.WireError(
        error.reason,
        f"config.store.locator={address}: the store has another secret than"
        " config.store.secret_file (or TBA_JAX_SECRET) here, or something else"
        " listens there",
    ) from error
  if answer["nonce"] != nonce.hex():
    raise wire.WireError("header", f"replayed answer from {address}")
  return _locator(answer)


def split_address(address: str) -> tuple[str, int]:
  """Returns the parts of "host:port"; raises ValueError for anything else."""
  host, _, port = address.rpartition(":")
  if not host or not port.isdecimal() or int(port) > 65535:
    raise ValueError(f"address {address!r}: must be host:port")
  return host.strip("[]"), int(port)
