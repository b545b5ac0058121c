# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Transport interface: a small ordered map of bytes shared between processes.

A client is attached to one *generation* of a store. A generation may be lost at
any time with all of its content; the next one starts empty. After a loss every
call raises `TransportError` until the client's owner calls `reconnect` and
writes its data again.
"""

import abc
from collections.abc import Iterable, Mapping

from absl import logging

from tba_jax.system import background


class TransportError(RuntimeError):
  """The store's generation is lost, or the store refused the operation."""


class DeadlineExceededError(TransportError):
  """A wait reached its deadline."""


# Values above 4 MB are slow, and gRPC fails above 2 GiB.
MAX_VALUE_BYTES = 1 << 28


def check_key(key: str) -> None:
  """Raises ValueError for a key that the store would change silently."""
  if not key or "\0" in key or "" in key.split("/"):
    raise ValueError(
        f"transport key {key!r}: must be non-empty parts joined by one"
        " '/', without NUL"
    )


def check_value(key: str, value: bytes) -> None:
  """Raises TypeError or ValueError for a value that cannot be written."""
  if not isinstance(value, bytes):
    raise TypeError(
        f"value of transport key {key!r} is {type(value).__name__}; must be"
        " bytes"
    )
  if len(value) > MAX_VALUE_BYTES:
    raise ValueError(
        f"value of transport key {key!r} has {len(value)} bytes; must have at"
        f" most {MAX_VALUE_BYTES}"
    )


class Transport(abc.ABC):
  """A client of the shared map; each thread needs its own.

  Keys are `/`-separated, with numbers zero-padded to sort in order. A call
  blocks for at most the constructor's `deadline_s`; with several keys, for at
  most that long between two answers.
  """

  @property
  @abc.abstractmethod
  def generation(self) -> int:
    """Number of the store generation that this client uses."""

  @abc.abstractmethod
  def put(self, key: str, value: bytes, *, overwrite: bool = True) -> bool:
    """Writes atomically; False if the key exists and `overwrite` is False.

    Raises:
      TransportError: the generation is lost; the write may be lost with it.
      DeadlineExceededError: no answer in time; the write may be lost.
    """

  @abc.abstractmethod
  def get(self, key: str) -> bytes | None:
    """Returns the value, or None."""

  @abc.abstractmethod
  def list(self, directory: str) -> dict[str, bytes]:
    """Returns all values below `directory/` by key, sorted bytewise."""

  @abc.abstractmethod
  def delete(self, key: str) -> None:
    """Removes the key and everything below it; a missing key is no error."""

  def put_all(self, values: Mapping[str, bytes]) -> None:
    """Writes several keys, in any order."""
    for key, value in values.items():
      self.put(key, value)

  def delete_all(self, keys: Iterable[str]) -> None:
    """Removes several keys as `delete` does, in any order."""
    for key in keys:
      self.delete(key)

  @abc.abstractmethod
  def reconnect(self, deadline_s: float | None = None) -> int:
    """Attaches to the current or next live generation; returns its number.

    Args:
      deadline_s: longest wait; None for the constructor's.

    Raises:
      DeadlineExceededError: no generation was live in time.
    """

  @abc.abstractmethod
  def close(self) -> None:
    """Disconnects without blocking; no other call may follow."""


def check_thread(thread: background.Thread, what: str) -> None:
  """Raises TransportError if a thread has failed."""
  try:
    thread.check()
  except Exception as error:
    raise TransportError(f"{what} has ended: {error}") from error


def close_thread(thread: background.Thread, what: str) -> None:
  """Ends a thread; logs its error or a missed deadline, and never raises."""
  try:
    thread.close()
  except Exception as error:  # A lost store may block the thread for long.
    logging.warning("%s: %s", what, error)
