# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A transport between the threads of one process; the reference for tests."""

import threading
import time

from tba_jax.transport import base


class InProcessStore:
  """The shared map: one generation at a time, in memory, thread-safe."""

  def __init__(self):
    self._condition = threading.Condition()
    self._data: dict[str, bytes] = {}
    self._generation = 1
    self._alive = True

  @property
  def generation(self) -> int:
    with self._condition:
      return self._generation

  def lose(self, *, restart: bool = True) -> None:
    """Drops everything; a new, empty generation starts if `restart`.

    Without it clients find no store until `restart` is called.
    """
    with self._condition:
      self._data = {}
      self._alive = False
    if restart:
      self.restart()

  def restart(self) -> None:
    """Starts the next generation after `lose(restart=False)`."""
    with self._condition:
      if not self._alive:
        self._generation += 1
        self._alive = True
        self._condition.notify_all()

  def attach(self, lost: int, deadline_s: float) -> int | None:
    """Returns a live generation above `lost`; None if none came in time."""
    deadline = time.monotonic() + deadline_s
    with self._condition:
      while not (self._alive and self._generation > lost):
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not self._condition.wait(remaining):
          if time.monotonic() >= deadline:
            return None
      return self._generation

  def is_alive(self, generation: int) -> bool:
    """Returns whether `generation` is the one that answers now."""
    with self._condition:
      return self._alive and generation == self._generation

  def put(
      self, generation: int, key: str, value: bytes, overwrite: bool
  ) -> bool:
    with self._condition:
      data = self._open(generation)
      if not overwrite and key in data:
        return False
      data[key] = value
      return True

  def get(self, generation: int, key: str) -> bytes | None:
    with self._condition:
      return self._open(generation).get(key)

  def list(self, generation: int, directory: str) -> dict[str, bytes]:
    prefix = directory + "/"
    with self._condition:
      data = self._open(generation)
      keys = [key for key in data if key.startswith(prefix)]
      return {key: data[key] for key in sorted(keys, key=str.encode)}

  def delete(self, generation: int, key: str) -> None:
    prefix = key + "/"
    with self._condition:
      data = self._open(generation)
      for name in [k for k in data if k == key or k.startswith(prefix)]:
        del data[name]

  def _open(self, generation: int) -> dict[str, bytes]:
    if not self._alive or generation != self._generation:
      raise base.TransportError(
          f"generation {generation} of the in-process store is lost"
      )
    return self._data


class InProcessTransport(base.Transport):
  """One client's view of an `InProcessStore`.

  Attaches on construction, and waits for the store for at most `deadline_s`.
  """

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
    self._check(key)
    base.check_value(key, value)
    return self._store.put(self._generation, key, value, overwrite)

  def get(self, key: str) -> bytes | None:
    self._check(key)
    return self._store.get(self._generation, key)

  def list(self, directory: str) -> dict[str, bytes]:
    self._check(directory)
    return self._store.list(self._generation, directory)

  def delete(self, key: str) -> None:
    self._check(key)
    self._store.delete(self._generation, key)

  def reconnect(self, deadline_s: float | None = None) -> int:
    if self._closed:
      raise base.TransportError("this client of the in-process store is closed")
    if self._store.is_alive(self._generation):
      return self._generation
    wait_s = self._deadline_s if deadline_s is None else deadline_s
    generation = self._store.attach(self._generation, wait_s)
    if generation is None:
      raise base.DeadlineExceededError(
          "the in-process store did not start a generation after"
          f" {self._generation} within {wait_s:.1f} s"
      )
    self._generation = generation
    return generation

  def close(self) -> None:
    self._closed = True

  def _check(self, key: str) -> None:
    base.check_key(key)
    if self._closed:
      raise base.TransportError("this client of the in-process store is closed")
