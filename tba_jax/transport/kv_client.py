# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The transport over JAX's key-value store: generations, retries, deadlines.

Every operation runs on a worker thread, because one on a hung service may
never return: at the deadline thread and client are abandoned, and the caller
goes on. A generation that was replaced is never spoken to again. One that only
missed a deadline, or that a cut link has hidden, is: through a new client, if
it answers that one.
"""

from collections.abc import Callable, Iterator
import contextlib
import functools
import os
import queue
import random
import threading
import time
from typing import Any

from tba_jax.transport import base
from tba_jax.transport import jax_kv
from tba_jax.transport import locator as locators

Finder = Callable[[], locators.Locator | None]

# gRPC codes that mean: this service is gone, or this client of it.
_LOST_CODES = ("UNAVAILABLE", "CANCELLED")
# Longest wait of one socket probe; a listening socket needs microseconds.
_PROBE_S = 2.0


class KvTransport(base.Transport):
  """One client of the store that a `KvHost` keeps alive.

  Attaches on construction, and waits for the store for at most `deadline_s`.

  Args:
    locator_path: the host's locator file, or a function that gives the locator
      (None where there is none; ValueError where it is not to be believed).
    deadline_s: longest wait of one operation or of `reconnect`.
    poll_s: time between two looks at the locator while the store is silent or
      away, on average.
    run_id: the run that the store must be of; None takes any.
    tls: files of mutual TLS, None where the store does without.

  Raises:
    DeadlineExceededError: no store answered in time.
    TransportError: the store is alive, but of another run.
  """

  def __init__(
      self,
      locator_path: str | os.PathLike[str] | Finder,
      *,
      deadline_s: float,
      poll_s: float = 0.05,
      run_id: str | None = None,
      tls: locators.Tls | None = None,
  ):
    self._locator_path = locator_path
    self._find = (
        locator_path
        if callable(locator_path)
        else functools.partial(locators.read, locator_path)
    )
    self._deadline_s = deadline_s
    self._poll_s = poll_s
    self._run_id = run_id
    self._tls = tls
    self._in_use = threading.Lock()
    self._closed = False
    self._session: _Session | None = None
    self._generation = 0
    self._lost_generation = 0
    self.reconnect()

  @property
  def generation(self) -> int:
    return self._generation

  def put(self, key: str, value: bytes, *, overwrite: bool = True) -> bool:
    base.check_key(key)
    base.check_value(key, value)
    return self._call("put", key, value, overwrite)

  def get(self, key: str) -> bytes | None:
    base.check_key(key)
    return self._call("get", key)

  def list(self, directory: str) -> dict[str, bytes]:
    base.check_key(directory)
    return self._call("list", directory)

  def delete(self, key: str) -> None:
    base.check_key(key)
    self._call("delete", key)

  def reconnect(self, deadline_s: float | None = None) -> int:
    wait_s = self._deadline_s if deadline_s is None else deadline_s
    deadline = time.monotonic() + wait_s
    with self._exclusive():
      if self._session is not None:
        try:
          self._ask(self._session, ("get", locators.IDENTITY_KEY), deadline)
        except base.TransportError:
          self._drop()
      obstacles = []
      while (obstacle := self._try_attach(deadline)) is not None:
        if obstacle not in obstacles[-1:]:
          obstacles.append(obstacle)
        # Jitter: a hundred clients do not come back at the same moment.
        pause_s = self._poll_s * random.uniform(0.5, 1.5)
        remaining_s = deadline - time.monotonic()
        time.sleep(max(0.0, min(remaining_s, pause_s)))
        if remaining_s <= pause_s:
          # The last try was cut short: the one before may tell more.
          reasons = "; before that: ".join(obstacles[:-3:-1])
          raise base.DeadlineExceededError(
              f"no store to attach to within {wait_s:.1f} s (locator"
              f" {self._locator_path}, last generation lost"
              f" {self._lost_generation}): {reasons}"
          )
      return self._generation

  def close(self) -> None:
    self._closed = True
    self._drop()

  def _call(self, *request: Any) -> Any:
    with self._exclusive():
      if self._session is None:
        raise base.TransportError(
            f"store generation {self._generation} is lost: reconnect first"
        )
      deadline = time.monotonic() + self._deadline_s
      return self._ask(self._session, request, deadline)

  def _ask(
      self, session: "_Session", request: tuple[Any, ...], deadline: float
  ) -> Any:
    """Returns the session's answer; drops a session that gave none."""
    start = time.monotonic()
    what = f"{request[0]} {request[1]!r}"
    session.send(request)
    while True:
      now = time.monotonic()
      try:
        wait_s = min(self._poll_s, deadline - now)
        return session.receive(max(0.0, wait_s))
      except _NoAnswerYet:
        if now >= deadline:
          # Dropped, not marked as lost: it may be alive and slow.
          self._drop(session)
          raise base.DeadlineExceededError(
              f"no answer to {what} within {now - start:.1f} s from the"
              f" {session.locator}"
          ) from None
        if self._newer_than(session.locator.generation):
          self._lose(session)
          raise base.TransportError(
              f"{what}: replaced while it did not answer: {session.locator}"
          ) from None
      except jax_kv.KvError as error:
        if jax_kv.error_code(error) in _LOST_CODES:
          # Gone, or the way to it is cut: the next attach finds out.
          self._drop(session)
        first_line = str(error).partition("\n")[0]
        raise base.TransportError(
            f"{what}: {first_line} ({session.locator})"
        ) from error

  def _try_attach(self, deadline: float) -> str | None:
    """Returns None when attached, else what stood in the way."""
    if self._session is not None:
      return None
    try:
      locator = self._find()
    except ValueError as error:
      return str(error)
    if locator is None:
      return "the store's host announces none"
    if locator.generation <= self._lost_generation:
      return f"still announced, but lost: {locator}"
    if locator.generation < self._generation:
      return f"older than generation {self._generation}: {locator}"
    # A failed connect would abort this process.
    if not locators.accepts(locator.address, _PROBE_S):
      return f"nothing listens there: {locator}"
    # After the probe: a file that a dead host left behind is no reason to
    # give up, a living store of another run is.
    if self._run_id is not None and locator.run != self._run_id:
      raise base.TransportError(
          f"refused, as this process is of run {self._run_id!r}: {locator}"
      )
    session = _Session(locator, self._tls)
    try:
      identity = self._ask(session, ("get", locators.IDENTITY_KEY), deadline)
    except base.TransportError as error:
      session.close()
      return str(error)
    if identity != locators.identity(locator.run, locator.generation):
      session.close()
      return f"another store answers, as {identity!r}: {locator}"
    self._session = session
    self._generation = locator.generation
    return None

  def _newer_than(self, generation: int) -> bool:
    try:
      locator = self._find()
    except ValueError:
      return False
    return locator is not None and locator.generation > generation

  def _lose(self, session: "_Session") -> None:
    self._lost_generation = session.locator.generation
    self._drop(session)

  def _drop(self, session: "_Session | None" = None) -> None:
    session = session or self._session
    if session is not None:
      session.close()
    if session is self._session:
      self._session = None

  @contextlib.contextmanager
  def _exclusive(self) -> Iterator[None]:
    """Refuses a second thread at the same time: answers would be mixed up."""
    if self._closed:
      raise base.TransportError("this client of the key-value store is closed")
    if not self._in_use.acquire(blocking=False):
      raise RuntimeError(
          "a transport client serves one thread at a time; make one for each"
      )
    try:
      yield
    finally:
      self._in_use.release()


class _NoAnswerYet(Exception):
  """The worker thread has not answered so far."""


class _Session:
  """A detached client and the worker thread that alone touches it."""

  def __init__(self, locator: locators.Locator, tls: locators.Tls | None):
    self.locator = locator
    self._requests: queue.SimpleQueue = queue.SimpleQueue()
    self._answers: queue.SimpleQueue = queue.SimpleQueue()
    # Daemon: a thread that hangs in the library must not hold up the exit.
    threading.Thread(
        target=_work,
        args=(locator.address, tls, self._requests, self._answers),
        name=f"kv-generation-{locator.generation}",
        daemon=True,
    ).start()

  def send(self, request: tuple[Any, ...]) -> None:
    """Hands over an operation's name and arguments; does not wait."""
    self._requests.put(request)

  def receive(self, wait_s: float) -> Any:
    """Returns the answer to the oldest request; raises what it raised."""
    try:
      answer, error = self._answers.get(timeout=wait_s)
    except queue.Empty:
      raise _NoAnswerYet from None
    if error is not None:
      raise error
    return answer

  def close(self) -> None:
    """Lets the worker end by itself, whenever the library lets go of it."""
    self._requests.put(None)


def _work(
    address: str,
    tls: locators.Tls | None,
    requests: queue.SimpleQueue,
    answers: queue.SimpleQueue,
) -> None:
  """Connects, then serves requests in order until a None."""
  client = jax_kv.connect(address, tls)
  while (request := requests.get()) is not None:
    operation, *args = request
    try:
      answers.put((_OPERATIONS[operation](client, *args), None))
    except Exception as error:  # Raised again in the caller's thread.
      answers.put((None, error))


def _put(
    client: jax_kv.Client, key: str, value: bytes, overwrite: bool
) -> bool:
  try:
    client.key_value_set_bytes(key, value, allow_overwrite=overwrite)
  except jax_kv.KvError as error:
    if jax_kv.error_code(error) == "ALREADY_EXISTS":
      return False
    raise
  return True


def _get(client: jax_kv.Client, key: str) -> bytes | None:
  try:
    return client.key_value_try_get_bytes(key)
  except jax_kv.KvError as error:
    if jax_kv.error_code(error) == "NOT_FOUND":
      return None
    raise


def _list(client: jax_kv.Client, directory: str) -> dict[str, bytes]:
  return dict(client.key_value_dir_get_bytes(directory))


def _delete(client: jax_kv.Client, key: str) -> None:
  client.key_value_delete(key)


_OPERATIONS = {"put": _put, "get": _get, "list": _list, "delete": _delete}
