# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Transport over JAX's key-value store.

An operation on a hung service returns only when that service ends, so
operations run in threads of a session, which is abandoned at the deadline. A
new session may use the same generation again if it was only slow or
unreachable, but never a replaced one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import functools
import os
import queue
import random
import threading
import time
import types
from typing import Any

from tba_jax.system import processes
from tba_jax.transport import byte_store
from tba_jax.transport.kv import certificates
from tba_jax.transport.kv import jax_kv
from tba_jax.transport.kv import locator as locator_lib

Finder = Callable[[], locator_lib.Locator | None]
# Name of an operation -> (client, key, arguments) -> answer.
Operations = Mapping[str, Callable[..., Any]]

# Concurrent operations of one client; round trips take most of their time.
_WORKERS = 4
# gRPC codes of a lost service or client.
_LOST_CODES = ("UNAVAILABLE", "CANCELLED")
# Timeout of a socket probe; a listening socket needs microseconds.
_PROBE_S = 2.0


class Session:
  """A detached client and the worker threads that use it."""

  def __init__(
      self,
      locator: locator_lib.Locator,
      tls: certificates.Tls | None,
      root: str,
      operations: Operations,
      connect_s: float,
  ):
    self.locator = locator
    self._connect_s = connect_s
    self._operations = operations
    self._tls = tls
    self._root = root
    self._client: jax_kv.Client | None = None
    self._num_workers = 0
    self._requests: queue.SimpleQueue = queue.SimpleQueue()
    self._answers: queue.SimpleQueue = queue.SimpleQueue()

  def send(self, requests: Sequence[tuple[Any, ...]]) -> None:
    """Queues operations, each a name and arguments, without waiting."""
    # The first worker connects; no other is needed until it has an answer.
    while self._num_workers < min(len(requests), _WORKERS):
      # A thread that hangs in the library must not block the exit, and one that
      # returns from it during the exit would abort the process.
      threading.Thread(
          target=self._work,
          name=f"{processes.LEFT_BEHIND}_kv_{self.locator.generation}",
          daemon=True,
      ).start()
      self._num_workers += 1
    for index, request in enumerate(requests):
      self._requests.put((index, request))

  def receive(self, wait_s: float) -> tuple[int, Any, Exception | None]:
    """Returns a request's index, answer and error; raises `queue.Empty`."""
    return self._answers.get(timeout=wait_s)

  def close(self) -> None:
    """Asks the workers to end, without waiting."""
    for _ in range(self._num_workers):
      self._requests.put(None)

  def _work(self) -> None:
    """Connects if needed, then runs operations until a None."""
    if self._client is None:
      try:
        self._client = jax_kv.connect(
            self.locator.address, self._tls, deadline_s=self._connect_s
        )
      except Exception as error:  # Raised again in the caller's thread.
        self._answers.put((0, None, error))
        return
    client = self._client
    while (item := self._requests.get()) is not None:
      index, (operation, key, *args) = item
      try:
        # Prepend the root here, so that no message shows it.
        key = self._root + key
        answer = self._operations[operation](client, key, *args), None
      except Exception as error:  # Raised again in the caller's thread.
        answer = None, error
      self._answers.put((index, *answer))


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


OPERATIONS: Operations = types.MappingProxyType(
    {"put": _put, "get": _get, "list": _list, "delete": _delete}
)


def connect(run: Any, deadline_s: float) -> "KvTransport":
  """Returns a new client of the store of a `run_directory.RunInfo`."""
  return KvTransport(
      run.finder,
      deadline_s=deadline_s,
      run_id=run.run_id,
      root=run.root,
      tls=run.tls,
  )


class KvTransport(byte_store.Transport):
  """A client of the store of a `KvHost`; attaches on construction.

  Args:
    locator_path: the host's locator file, or a function that returns the
      locator or None, and raises ValueError for a forged one.
    deadline_s: longest time of one operation or `reconnect`.
    poll_s: mean time between two reads of the locator while the store does not
      answer.
    run_id: run that the store must belong to; None for any.
    root: directory of all keys, from `locator.root`; "" for none.
    tls: files of mutual TLS; not used with a unix socket.
    operations: functions of JAX's client that do the work.

  Raises:
    DeadlineExceededError: no store answered in time.
    TransportError: the store is another run's, or only one side uses TLS.
  """

  def __init__(
      self,
      locator_path: str | os.PathLike[str] | Finder,
      *,
      deadline_s: float,
      poll_s: float = 0.05,
      run_id: str | None = None,
      root: str = "",
      tls: certificates.Tls | None = None,
      operations: Operations = OPERATIONS,
  ):
    self._operations = operations
    self._locator_path = locator_path
    self._find = (
        locator_path
        if callable(locator_path)
        else functools.partial(locator_lib.read_locator, locator_path)
    )
    self.deadline_s = deadline_s
    self._poll_s = poll_s
    self._run_id = run_id
    self._root = f"{root}/" if root else ""
    self._tls = tls
    self._in_use = threading.Lock()
    self._closed = False
    self._session: Session | None = None
    self._generation = 0
    self._lost_generation = 0
    self.reconnect()

  @property
  def generation(self) -> int:
    return self._generation

  def put(self, key: str, value: bytes, *, overwrite: bool = True) -> bool:
    byte_store.check_key(key)
    byte_store.check_value(key, value)
    return self._call("put", key, value, overwrite)

  def get(self, key: str) -> bytes | None:
    byte_store.check_key(key)
    return self._call("get", key)

  def list(self, directory: str) -> dict[str, bytes]:
    byte_store.check_key(directory)
    start = len(self._root)
    entries = self._call("list", directory)
    return {key[start:]: value for key, value in entries.items()}

  def delete(self, key: str) -> None:
    byte_store.check_key(key)
    self._call("delete", key)

  def put_all(self, values: Mapping[str, bytes]) -> None:
    for key, value in values.items():
      byte_store.check_key(key)
      byte_store.check_value(key, value)
    self._call_all([("put", k, value, True) for k, value in values.items()])

  def delete_all(self, keys: Iterable[str]) -> None:
    keys = list(keys)
    for key in keys:
      byte_store.check_key(key)
    self._call_all([("delete", key) for key in keys])

  def reconnect(self, deadline_s: float | None = None) -> int:
    wait_s = self.deadline_s if deadline_s is None else deadline_s
    deadline = time.monotonic() + wait_s
    with self.exclusive():
      if self._session is not None:
        try:
          self._ask(
              self._session, [("get", locator_lib.IDENTITY_KEY)], deadline
          )
        except byte_store.TransportError:
          self._drop()
      obstacles = []
      while (obstacle := self._try_attach(deadline)) is not None:
        if obstacle not in obstacles[-1:]:
          obstacles.append(obstacle)
        # Jitter: many clients may reconnect at once.
        pause_s = self._poll_s * random.uniform(0.5, 1.5)
        remaining_s = deadline - time.monotonic()
        time.sleep(max(0.0, min(remaining_s, pause_s)))
        if remaining_s <= pause_s:
          # The last attempt was cut short; the one before may explain it.
          reasons = "; before that: ".join(obstacles[:-3:-1])
          raise byte_store.DeadlineExceededError(
              f"no store to attach to within {wait_s:.1f} s (locator"
              f" {self._locator_path}, last generation lost"
              f" {self._lost_generation}): {reasons}"
          )
      return self._generation

  def close(self) -> None:
    self._closed = True
    self._drop()

  def _call(self, *request: Any) -> Any:
    return self._call_all([request])[0]

  def _call_all(self, requests: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
    with self.exclusive():
      if self._session is None:
        raise byte_store.TransportError(
            f"store generation {self._generation} is lost: reconnect first"
        )
      deadline = time.monotonic() + self.deadline_s
      return self._ask(self._session, requests, deadline)

  def _ask(
      self,
      session: Session,
      requests: Sequence[tuple[Any, ...]],
      deadline: float,
  ) -> Sequence[Any]:
    """Returns the session's answers; drops the session at the deadline.

    Each answer restarts the deadline.
    """
    start = time.monotonic()
    patience_s = deadline - start
    session.send(requests)
    answers: dict[int, tuple[Any, Exception | None]] = {}
    while len(answers) < len(requests):
      now = time.monotonic()
      try:
        index, *answer = session.receive(
            max(0.0, min(self._poll_s, deadline - now))
        )
        answers[index] = answer
        deadline = time.monotonic() + patience_s
      except queue.Empty:
        missing = [r for i, r in enumerate(requests) if i not in answers]
        what = _name(missing[0])
        if now >= deadline:
          # The session is not marked as lost: it may just be slow.
          self._drop(session)
          raise byte_store.DeadlineExceededError(
              f"no answer to {what} within {patience_s:.1f} s from the"
              f" {session.locator}"
          ) from None
        if self._newer_than(session.locator.generation):
          self._lose(session)
          raise byte_store.TransportError(
              f"{what}: replaced while it did not answer: {session.locator}"
          ) from None
    for index, request in enumerate(requests):
      self._check(session, request, answers[index][1])
    return [answers[index][0] for index in range(len(requests))]

  def _check(
      self,
      session: Session,
      request: tuple[Any, ...],
      error: Exception | None,
  ) -> None:
    """Raises the error of a request, if any."""
    if error is None:
      return
    if not isinstance(error, jax_kv.KvError | jax_kv.ConnectError):
      raise error
    if jax_kv.error_code(error) in _LOST_CODES:
      # Lost or unreachable: the next attach shows which.
      self._drop(session)
    first_line = str(error).partition("\n")[0].replace(self._root, "")
    raise byte_store.TransportError(
        f"{_name(request)}: {first_line} ({session.locator})"
    ) from error

  def _try_attach(self, deadline: float) -> str | None:
    """Returns None if attached, else the obstacle."""
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
    # Probe first: a connect takes seconds to fail.
    if not locator_lib.accepts(locator.address, _PROBE_S):
      return f"nothing listens there: {locator}"
    # Check only now: the file may be left over from a dead host.
    if self._run_id is not None and locator.run != self._run_id:
      raise byte_store.TransportError(
          f"refused, as this process is of run {self._run_id!r}: {locator}"
      )
    tls = None if locator.address.startswith("unix:") else self._tls
    if locator.tls != (tls is not None):
      raise byte_store.TransportError(_tls_mismatch(locator))
    left_s = max(0.0, deadline - time.monotonic())
    session = Session(locator, tls, self._root, self._operations, left_s)
    try:
      request = ("get", locator_lib.IDENTITY_KEY)
      (identity,) = self._ask(session, [request], deadline)
    except byte_store.TransportError as error:
      session.close()
      return str(error)
    if identity != locator_lib.identity(locator.run, locator.generation):
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

  def _lose(self, session: Session) -> None:
    self._lost_generation = session.locator.generation
    self._drop(session)

  def _drop(self, session: Session | None = None) -> None:
    session = session or self._session
    if session is not None:
      session.close()
    if session is self._session:
      self._session = None

  @contextlib.contextmanager
  def exclusive(self) -> Iterator[None]:
    """Raises RuntimeError if two threads use the client at the same time."""
    if self._closed:
      raise byte_store.TransportError(
          "this client of the key-value store is closed"
      )
    if not self._in_use.acquire(blocking=False):
      raise RuntimeError(
          "a transport client serves one thread at a time; make one for each"
      )
    try:
      yield
    finally:
      self._in_use.release()


def _tls_mismatch(locator: locator_lib.Locator) -> str:
  """Returns the error for a store and a client of which only one uses TLS."""
  jaxlib = f"jaxlib {certificates.NEEDED} or newer"
  if locator.tls:
    problem = (
        f"the store uses mutual TLS, which needs {jaxlib}; this process has"
        f" {certificates.jaxlib_version()}"
    )
  else:
    problem = (
        "this process uses mutual TLS and the store does not; its host needs"
        f" {jaxlib}"
    )
  return (
      f"refused: {problem}; config.store.insecure=True on all hosts does"
      f" without ({locator})"
  )


def _name(request: tuple[Any, ...]) -> str:
  return f"{request[0]} {request[1]!r}"
