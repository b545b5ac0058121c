# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The transport interface: a small ordered map of bytes that processes share.

A client is attached to one *generation* of a store, which may be lost at any
moment with all of its content; the next generation starts empty. After a loss
every call raises `TransportError` until the client's owner calls `reconnect`
and writes again what must be there (unacknowledged groups, published params,
acknowledgements, grants).
"""

import abc
from collections.abc import Iterable, Mapping


class TransportError(RuntimeError):
  """The store's generation is lost, or it refused the operation."""


class DeadlineExceededError(TransportError):
  """A wait ended at its deadline; the message says for what."""


# Values above 4 MB are slow, and gRPC breaks above 2 GiB.
MAX_VALUE_BYTES = 1 << 28


def check_key(key: str) -> None:
  """Raises ValueError for a key that the store would change silently."""
  if not key or "\0" in key or "" in key.split("/"):
    raise ValueError(
        f"transport key {key!r}: allowed are non-empty parts joined by one"
        " '/', without NUL"
    )


def check_value(key: str, value: bytes) -> None:
  """Raises TypeError or ValueError for a value that cannot be written."""
  if not isinstance(value, bytes):
    raise TypeError(
        f"value of transport key {key!r} is {type(value).__name__}; allowed"
        " is bytes"
    )
  if len(value) > MAX_VALUE_BYTES:
    raise ValueError(
        f"value of transport key {key!r} has {len(value)} bytes; allowed are"
        f" {MAX_VALUE_BYTES}"
    )


class Transport(abc.ABC):
  """A client of the shared map; each thread needs its own.

  Keys are `/`-separated, with numbers zero-padded so that they list in order.
  A call blocks for at most the constructor's `deadline_s`; one with several
  keys for so long without any answer.
  """

  @property
  @abc.abstractmethod
  def generation(self) -> int:
    """Number of the store generation that this client uses; only grows."""

  @abc.abstractmethod
  def put(self, key: str, value: bytes, *, overwrite: bool = True) -> bool:
    """Writes atomically; False if the key exists and `overwrite` is False.

    Raises:
      TransportError: the generation is lost, and the write may be too.
      DeadlineExceededError: the store did not answer in time; likewise.
    """

  @abc.abstractmethod
  def get(self, key: str) -> bytes | None:
    """Returns the value; None where there is none now."""

  @abc.abstractmethod
  def list(self, directory: str) -> dict[str, bytes]:
    """Returns all values below `directory/` by full key, sorted bytewise."""

  @abc.abstractmethod
  def delete(self, key: str) -> None:
    """Removes the key and everything below it; a missing key is no error."""

  def put_all(self, values: Mapping[str, bytes]) -> None:
    """Writes several keys, in any order; the deadline is of the next answer."""
    for key, value in values.items():
      self.put(key, value)

  def delete_all(self, keys: Iterable[str]) -> None:
    """Removes several keys, in any order; as `delete` and `put_all`."""
    for key in keys:
      self.delete(key)

  @abc.abstractmethod
  def reconnect(self, deadline_s: float | None = None) -> int:
    """Attaches to a live generation and returns its number.

    That is the present one if it is alive, else the next one that the store's
    host announces.

    Args:
      deadline_s: of the wait; default: the constructor's.

    Raises:
      DeadlineExceededError: none came in time.
    """

  @abc.abstractmethod
  def close(self) -> None:
    """Disconnects without blocking; no other call may follow."""
