# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Transport between threads of one process; the reference for tests."""

from collections.abc import Iterator
import contextlib
import threading

from tba_jax.transport import byte_store


class InProcessStore:
  """In-memory key-value map with one generation at a time."""

  def __init__(self):
    self.changed = threading.Condition()
    self.data: dict[str, bytes] = {}
    self.generation = 1
    self.alive = True

  def lose(self, *, restart: bool = True) -> None:
    """Drops everything; starts the next generation if `restart`."""
    with self.changed:
      self.data, self.alive = {}, False
    if restart:
      self.restart()

  def restart(self) -> None:
    """Starts the next generation after `lose(restart=False)`."""
    with self.changed:
      if not self.alive:
        self.generation += 1
        self.alive = True
        self.changed.notify_all()


class InProcessTransport(byte_store.Transport):
  """A client of an `InProcessStore`."""

  def __init__(self, store: InProcessStore, *, deadline_s: float = 10.0):
    self._store = store
    self._deadline_s = deadline_s
    self._closed = False
    self._generation = 0
    self.reconnect()

  @property
  def generation(self) -> int:
    return self._generation

  def put(self, key: str, value: bytes, *, overwrite: bool = True) -> bool:
    byte_store.check_value(key, value)
    with self._open(key) as data:
      if not overwrite and key in data:
        return False
      data[key] = value
      return True

  def get(self, key: str) -> bytes | None:
    with self._open(key) as data:
      return data.get(key)

  def list(self, directory: str) -> dict[str, bytes]:
    with self._open(directory) as data:
      keys = [key for key in data if key.startswith(f"{directory}/")]
      return {key: data[key] for key in sorted(keys, key=str.encode)}

  def delete(self, key: str) -> None:
    with self._open(key) as data:
      for name in list(data):
        if name == key or name.startswith(f"{key}/"):
          del data[name]

  def reconnect(self, deadline_s: float | None = None) -> int:
    self._check_open()
    store, lost = self._store, self._generation
    wait_s = self._deadline_s if deadline_s is None else deadline_s
    with store.changed:
      if not store.changed.wait_for(lambda: store.alive, wait_s):
        raise byte_store.DeadlineExceededError(
            "the in-process store did not start a generation after"
            f" {lost} within {wait_s:.1f} s"
        )
      self._generation = store.generation
      return store.generation

  def close(self) -> None:
    self._closed = True

  def _check_open(self) -> None:
    if self._closed:
      raise byte_store.TransportError(
          "this client of the in-process store is closed"
      )

  @contextlib.contextmanager
  def _open(self, key: str) -> Iterator[dict[str, bytes]]:
    """Locks the data of this client's generation."""
    byte_store.check_key(key)
    self._check_open()
    with self._store.changed:
      if not self._store.alive or self._generation != self._store.generation:
        raise byte_store.TransportError(
            f"generation {self._generation} of the in-process store is lost"
        )
      yield self._store.data
