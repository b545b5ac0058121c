# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the store by its host's locator file, or by an announcer.

The store's address changes with every generation, so hosts without a shared
directory ask an announcer at a fixed address. The request is a nonce of 16
bytes; the answer is the locator with this nonce, authenticated with the run's
secret, so that it can be neither forged nor replayed.
"""

from collections.abc import Callable
import dataclasses
import json
import logging
import os
import pathlib
import secrets
import selectors
import socket
import threading
import time
from typing import Any

from tba_jax.system import jsonl
from tba_jax.system import worker
from tba_jax.transport import wire

FILE_NAME = "locator.json"

# Key of a service's run and generation, which a client compares with the
# locator before it trusts an address.
IDENTITY_KEY = "meta/store"

_NONCE_BYTES = 16
_MAX_ANSWER_BYTES = 1 << 16
# Of one request and its answer, on both sides.
_DEADLINE_S = 2.0
# The oldest of too many connections is closed, so idle ones block nobody.
_MAX_CONNECTIONS = 64
# Time between two requests of one client, which keeps the last answer.
_EVERY_S = 0.25


@dataclasses.dataclass(frozen=True)
class Locator:
  """Address of one generation of a run's store.

  run: id of the run.
  generation: number of the store generation.
  address: "unix:/path" or "host:port".
  pid: process id of the service.
  """

  run: str
  generation: int
  address: str
  pid: int

  def __str__(self) -> str:
    return (
        f"key-value store of run {self.run!r}, generation {self.generation},"
        f" at {self.address} (process {self.pid})"
    )


@dataclasses.dataclass(frozen=True)
class Tls:
  """PEM files of mutual TLS.

  cert_file, key_file: of this host.
  ca_file: of the authority that both sides trust.
  """

  cert_file: str
  key_file: str
  ca_file: str

  def jax_options(self) -> dict[str, Any]:
    """Returns the keyword arguments of JAX's services and clients."""
    options = {f"mtls_{k}": v for k, v in dataclasses.asdict(self).items()}
    # No fallback to an insecure connection.
    return options | {"verify_secure_credentials": True}


def identity(run_id: str, generation: int) -> bytes:
  """Returns the value of `IDENTITY_KEY` in a generation of a run."""
  return json.dumps({"run": run_id, "generation": generation}).encode()


def read_locator(path: str | os.PathLike[str]) -> Locator | None:
  """Returns the locator in a file, None without a file.

  Raises:
    ValueError: the file is not a locator.
  """
  try:
    text = pathlib.Path(path).read_text()
  except FileNotFoundError:
    return None
  try:
    fields = json.loads(text)
  except ValueError as error:
    raise ValueError(f"{path} is not a store locator: {error}") from error
  return locator_from_dict(fields, path)


def locator_from_dict(fields: Any, source: str | os.PathLike[str]) -> Locator:
  """Returns the locator of parsed fields; raises ValueError naming `source`."""
  types = {field.name: field.type for field in dataclasses.fields(Locator)}
  error = jsonl.schema_error(fields, types)
  if not error and fields.keys() != types.keys():
    error = f"fields {sorted(fields)}"
  if error:
    raise ValueError(f"{source} is not a store locator: {error}")
  return Locator(**fields)


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


@dataclasses.dataclass
class _Connection:
  """One request to the announcer.

  deadline: when the connection is closed, by the monotonic clock.
  received: part of the nonce.
  answer: rest to be sent; None until the nonce is complete.
  """

  deadline: float
  received: bytes = b""
  answer: bytes | None = None


class Announcer:
  """Serves the current locator at a fixed address, in one thread.

  Args:
    address: "host:port", port 0 for a free one.
    secret: key of the run's messages.
    find: returns the locator, or None.

  Raises:
    OSError: the address cannot be bound.
  """

  def __init__(
      self, address: str, secret: bytes, find: Callable[[], Locator | None]
  ):
    self._secret = secret
    self._find = find
    host, port = split_address(address)
    try:
      family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
      self._server = socket.create_server((host, port), family=family)
    except OSError as error:
      raise OSError(
          f"config.store.locator={address}: cannot be bound: {error}"
      ) from error
    self._server.setblocking(False)
    # Oldest first.
    self._connections: dict[socket.socket, _Connection] = {}
    self._selector = selectors.DefaultSelector()
    self._selector.register(self._server, selectors.EVENT_READ)
    self._worker = worker.Worker("announcer", self._run, close_s=5.0)

  @property
  def port(self) -> int:
    return self._server.getsockname()[1]

  def check(self) -> None:
    """Raises the thread's error, if any."""
    self._worker.check()

  def close(self) -> None:
    try:
      self._worker.close()
    finally:
      for connection in list(self._connections):
        self._close(connection)
      self._selector.close()
      self._server.close()

  def _run(self, stop: threading.Event) -> None:
    while not stop.is_set():
      for key, _ in self._selector.select(timeout=0.2):
        try:
          if key.fileobj is self._server:
            self._accept()
          elif key.fileobj in self._connections:
            self._advance(key.fileobj)
        except BlockingIOError:
          pass
        # A broken connection, or an invalid locator file.
        except (OSError, ValueError) as error:
          logging.info("announcer: %s", error)
          if key.fileobj is self._server:
            stop.wait(0.2)  # Such as no free file descriptor.
          else:
            self._close(key.fileobj)
      now = time.monotonic()
      for connection, state in list(self._connections.items()):
        if now > state.deadline:
          self._close(connection)

  def _accept(self) -> None:
    connection, _ = self._server.accept()
    connection.setblocking(False)
    if len(self._connections) >= _MAX_CONNECTIONS:
      self._close(next(iter(self._connections)))
    self._connections[connection] = _Connection(time.monotonic() + _DEADLINE_S)
    self._selector.register(connection, selectors.EVENT_READ)

  def _advance(self, connection: socket.socket) -> None:
    """Reads part of a request, or sends part of an answer."""
    state = self._connections[connection]
    if state.answer is None:
      part = connection.recv(_NONCE_BYTES - len(state.received))
      state.received += part
      if not part:
        self._close(connection)
      if not part or len(state.received) < _NONCE_BYTES:
        return
      found = self._find()
      if found is None:
        self._close(connection)
        return
      message = {"nonce": state.received.hex(), **dataclasses.asdict(found)}
      state.answer = wire.encode_message(message, self._secret)
      self._selector.modify(connection, selectors.EVENT_WRITE)
    else:
      state.answer = state.answer[connection.send(state.answer) :]
      if not state.answer:
        self._close(connection)

  def _close(self, connection: socket.socket) -> None:
    del self._connections[connection]
    self._selector.unregister(connection)
    connection.close()


class RemoteLocator:
  """Finds a store by the announcer at "host:port"."""

  def __init__(self, address: str, secret: bytes):
    self._address = address
    self._secret = secret
    self._asked = -_EVERY_S
    self._last: Locator | None = None

  def __str__(self) -> str:
    return f"announced at {self._address}"

  def __call__(self) -> Locator | None:
    """Returns the locator; without an answer in 2 s, the last one or None.

    Raises:
      ValueError: the answer is forged or replayed.
    """
    if time.monotonic() - self._asked >= _EVERY_S:
      try:
        self._last = ask_announcer(self._address, self._secret) or self._last
      finally:
        self._asked = time.monotonic()
    return self._last


def ask_announcer(address: str, secret: bytes) -> Locator | None:
  """Returns the announcer's locator; None if it has none or does not answer.

  Raises:
    WireError: the answer is forged or replayed.
    ValueError: the answer is not a locator.
  """
  nonce = secrets.token_bytes(_NONCE_BYTES)
  deadline = time.monotonic() + _DEADLINE_S
  data = b""
  try:
    with socket.create_connection(split_address(address), _DEADLINE_S) as asked:
      asked.sendall(nonce)
      while len(data) < _MAX_ANSWER_BYTES:
        # One deadline for the whole answer, however slowly it comes.
        asked.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = asked.recv(_MAX_ANSWER_BYTES - len(data))
        if not part:
          break
        data += part
  except OSError:
    return None
  if not data:
    return None
  try:
    answer = wire.decode_message(data, secret)
  except wire.WireError as error:
    raise wire.WireError(
        error.reason,
        f"config.store.locator={address}: the store has another secret than"
        " config.store.secret_file (or TBA_JAX_SECRET) here, or something else"
        " listens there",
    ) from error
  if answer.pop("nonce", None) != nonce.hex():
    raise wire.WireError("header", f"replayed answer from {address}")
  return locator_from_dict(answer, address)


def split_address(address: str) -> tuple[str, int]:
  """Returns the parts of "host:port"; raises ValueError for anything else."""
  host, _, port = address.rpartition(":")
  if not host or not port.isdecimal() or int(port) > 65535:
    raise ValueError(f"address {address!r}: allowed is host:port")
  return host.strip("[]"), int(port)
