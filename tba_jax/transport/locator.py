# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""How a client finds the store: the file in which its host announces it."""

from collections.abc import Callable
import dataclasses
import json
import logging
import os
import pathlib
import secrets
import socket
import threading
import time
from typing import Any

from tba_jax.transport import wire

FILE_NAME = "locator.json"

# Under this key a service says which one it is; a client compares that with
# the locator before it trusts an address.
IDENTITY_KEY = "meta/store"


@dataclasses.dataclass(frozen=True)
class Locator:
  """What the store's host announces.

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
  """Files (PEM) by which store and clients know each other: mutual TLS.

  cert_file, key_file: of this host.
  ca_file: of the authority that both sides trust.
  """

  cert_file: str
  key_file: str
  ca_file: str


def identity(run_id: str, generation: int) -> bytes:
  """Returns the value of `IDENTITY_KEY` in that generation of that run."""
  return json.dumps({"run": run_id, "generation": generation}).encode()


def read_locator(path: str | os.PathLike[str]) -> Locator | None:
  """Returns the locator in `path`; None where there is no file.

  Raises:
    ValueError: the file holds something else.
  """
  try:
    text = pathlib.Path(path).read_text()
  except FileNotFoundError:
    return None
  try:
    fields = json.loads(text)
  except ValueError as error:
    raise ValueError(f"{path} is no store locator: {error}") from error
  return locator_from_dict(fields, path)


def locator_from_dict(fields: Any, source: str | os.PathLike[str]) -> Locator:
  """Returns the locator of parsed fields.

  Raises:
    ValueError: they are something else; `source` is named.
  """
  try:
    locator = Locator(**fields)
  except TypeError as error:
    raise ValueError(f"{source} is no store locator: {error}") from error
  for field in dataclasses.fields(Locator):
    value = getattr(locator, field.name)
    if type(value) is not field.type:
      raise ValueError(f"{source} is no store locator: {field.name}={value!r}")
  return locator


def write_locator(path: str | os.PathLike[str], locator: Locator) -> None:
  """Replaces the file at `path`; a reader sees the old or the new one."""
  write_atomically(path, json.dumps(dataclasses.asdict(locator)))


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
  """Replaces the file at `path` by one that holds `text`."""
  path = pathlib.Path(path)
  temporary = path.with_name(f".{path.name}.{os.getpid()}")
  temporary.write_text(text)
  os.replace(temporary, path)


def accepts(address: str, wait_s: float) -> bool:
  """Returns whether something listens at `address`; tries for `wait_s`."""
  try:
    if address.startswith("unix:"):
      with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(wait_s)
        probe.connect(address.removeprefix("unix:"))
    else:
      host, _, port = address.rpartition(":")
      target = (host.strip("[]"), int(port))
      socket.create_connection(target, timeout=wait_s).close()
  except OSError:
    return False
  return True


# Tells other hosts where the store is: one question, one signed answer.
#
# The store's address changes with every generation, so hosts that share no
# directory ask at one that does not. A question is 16 random bytes; the answer
# is
# the locator with these bytes, authenticated with the run's secret: nobody else
# can give it, and an old one does not fit. What is asked is no secret.


_NONCE_BYTES = 16
_MAX_ANSWER_BYTES = 1 << 16
_WAIT_S = 2.0
# Between two questions of one client; in between it has its last answer.
_EVERY_S = 0.25


class Announcer:
  """Answers, in a thread, until it is closed."""

  def __init__(
      self,
      address: str,
      secret: bytes,
      find: Callable[[], Locator | None],
  ):
    """Binds the address and starts the thread.

    Args:
      address: "host:port", port 0 for a free one.
      secret: key of the run's messages.
      find: returns what to announce, None for nothing yet.

    Raises:
      OSError: the address cannot be bound; the message names it.
    """
    self._secret = secret
    self._find = find
    self._stop = threading.Event()
    host, port = split_address(address)
    try:
      family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
      self._server = socket.create_server((host, port), family=family)
    except OSError as error:
      raise OSError(
          f"config.store.locator={address}: cannot be bound: {error}"
      ) from error
    self._server.settimeout(0.2)
    self._thread = threading.Thread(
        target=self._run, name="announcer", daemon=True
    )
    self._thread.start()

  @property
  def port(self) -> int:
    return self._server.getsockname()[1]

  def close(self) -> None:
    self._stop.set()
    self._thread.join(timeout=5.0)
    self._server.close()

  def _run(self) -> None:
    while not self._stop.is_set():
      try:
        connection, _ = self._server.accept()
      except TimeoutError:
        continue
      except OSError as error:
        logging.warning("announcer: %s", error)
        self._stop.wait(0.2)
        continue
      # A thread each: who connects and says nothing keeps nobody waiting.
      threading.Thread(
          target=self._answer, args=(connection,), daemon=True
      ).start()

  def _answer(self, connection: socket.socket) -> None:
    try:
      with connection:
        connection.settimeout(_WAIT_S)
        nonce = _receive(connection, _NONCE_BYTES)
        found = self._find()
        if len(nonce) < _NONCE_BYTES or found is None:
          return
        answer = {"nonce": nonce.hex(), **dataclasses.asdict(found)}
        connection.sendall(wire.encode_message(answer, self._secret))
    except (OSError, ValueError) as error:
      logging.info("announcer: %s", error)


class RemoteLocator:
  """Finds a store by its announcer; to be called like `locator.read`."""

  def __init__(self, address: str, secret: bytes):
    """Asks nothing yet.

    Args:
      address: "host:port" of the announcer.
      secret: key of the run's messages.
    """
    self._address = address
    self._secret = secret
    self._asked = -_EVERY_S
    self._last: Locator | None = None

  def __str__(self) -> str:
    return f"announced at {self._address}"

  def __call__(self) -> Locator | None:
    """Returns the locator; the last one, or None, where nobody answers.

    Waits for an answer for at most two seconds.

    Raises:
      ValueError: the answer is forged, or replayed.
    """
    if time.monotonic() - self._asked >= _EVERY_S:
      try:
        self._last = ask_announcer(self._address, self._secret) or self._last
      finally:
        self._asked = time.monotonic()
    return self._last


def ask_announcer(address: str, secret: bytes) -> Locator | None:
  """Returns what an announcer says, None where it is away or has none.

  Raises:
    WireError: the answer is forged, or replayed.
  """
  nonce = secrets.token_bytes(_NONCE_BYTES)
  try:
    with socket.create_connection(split_address(address), _WAIT_S) as asked:
      asked.settimeout(_WAIT_S)
      asked.sendall(nonce)
      data = _receive(asked, _MAX_ANSWER_BYTES)
  except OSError:
    return None
  if not data:
    return None
  try:
    answer = wire.decode_message(data, secret)
  except wire.WireError as error:
    raise wire.WireError(
        error.reason,
        f"what config.store.locator={address} answered: the store has another"
        " secret than config.store.secret_file here (or TBA_JAX_SECRET), or"
        " something else listens there",
    ) from error
  if answer.pop("nonce", None) != nonce.hex():
    raise wire.WireError("header", f"a replayed answer of {address}")
  return locator_from_dict(answer, address)


def split_address(address: str) -> tuple[str, int]:
  """Returns host and port of "host:port".

  Raises:
    ValueError: it is something else.
  """
  host, _, port = address.rpartition(":")
  if not host or not port.isdecimal() or int(port) > 65535:
    raise ValueError(f"address {address!r}: allowed is host:port")
  return host.strip("[]"), int(port)


def _receive(connection: socket.socket, size: int) -> bytes:
  """Returns so many bytes, or fewer where the other side ends before."""
  parts, left = [], size
  while left and (part := connection.recv(left)):
    parts.append(part)
    left -= len(part)
  return b"".join(parts)
