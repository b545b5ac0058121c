# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tells other hosts where the store is: one question, one signed answer.

The store's address changes with every generation, so hosts that share no
directory ask at one that does not. A question is 16 random bytes; the answer is
the locator with these bytes, authenticated with the run's secret: nobody else
can give it, and an old one does not fit. What is asked is no secret.
"""

from collections.abc import Callable
import dataclasses
import logging
import secrets
import socket
import threading
import time

from tba_jax.transport import locator as locators
from tba_jax.transport import wire

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
      find: Callable[[], locators.Locator | None],
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
    self._last: locators.Locator | None = None

  def __str__(self) -> str:
    return f"announced at {self._address}"

  def __call__(self) -> locators.Locator | None:
    """Returns the locator; the last one, or None, where nobody answers.

    Waits for an answer for at most two seconds.

    Raises:
      ValueError: the answer is forged, or replayed.
    """
    if time.monotonic() - self._asked >= _EVERY_S:
      try:
        self._last = ask(self._address, self._secret) or self._last
      finally:
        self._asked = time.monotonic()
    return self._last


def ask(address: str, secret: bytes) -> locators.Locator | None:
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
  return locators.from_dict(answer, address)


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
