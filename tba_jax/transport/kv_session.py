# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A client of one store generation, and the worker threads that use it.

An operation on a hung service may never return, so none runs on the caller's
thread. Several run at once: what takes their time is the way to the service
and back.
"""

from collections.abc import Sequence
import queue
import threading
from typing import Any

from tba_jax.transport import jax_kv
from tba_jax.transport import locator as locators

# Operations of one `send` that are under way at a time.
_WORKERS = 4


class Session:
  """A detached client and the worker threads that alone touch it."""

  def __init__(self, locator: locators.Locator, tls: locators.Tls | None):
    self.locator = locator
    self._tls = tls
    self._client: jax_kv.Client | None = None
    self._num_workers = 0
    self._requests: queue.SimpleQueue = queue.SimpleQueue()
    self._answers: queue.SimpleQueue = queue.SimpleQueue()

  def send(self, requests: Sequence[tuple[Any, ...]]) -> None:
    """Hands over operations' names and arguments; does not wait."""
    # The first worker connects, and has answered before others are needed.
    while self._num_workers < min(len(requests), _WORKERS):
      # Daemon: a thread that hangs in the library must not hold up the exit.
      threading.Thread(
          target=self._work,
          name=f"kv-generation-{self.locator.generation}",
          daemon=True,
      ).start()
      self._num_workers += 1
    for index, request in enumerate(requests):
      self._requests.put((index, request))

  def receive(self, wait_s: float) -> tuple[int, Any, Exception | None]:
    """Returns the index of a request, its answer and what it raised.

    Raises:
      queue.Empty: there was none in time.
    """
    return self._answers.get(timeout=wait_s)

  def close(self) -> None:
    """Lets the workers end by themselves, when the library lets go of them."""
    for _ in range(self._num_workers):
      self._requests.put(None)

  def _work(self) -> None:
    """Connects, if nobody has, then serves requests until a None."""
    if self._client is None:
      self._client = jax_kv.connect(self.locator.address, self._tls)
    client = self._client
    while (item := self._requests.get()) is not None:
      index, (operation, *args) = item
      try:
        answer = _OPERATIONS[operation](client, *args), None
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


_OPERATIONS = {"put": _put, "get": _get, "list": _list, "delete": _delete}
