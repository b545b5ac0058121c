# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The transport: a small ordered map of bytes that processes share.

A transport client speaks to one *generation* of a store. A store may vanish at
any moment with all that it held; a new generation then starts empty. No call
hides that: after a loss every call raises `TransportError` until the owner of
the client calls `reconnect` and then writes again what must be there (ring of
unacknowledged groups, published params, acks, grants). So the owner, not the
wire, decides what is repeated and in which order.
"""

import abc
from collections.abc import Iterable, Mapping


class TransportError(RuntimeError):
  """The store (this generation of it) is gone or refused the operation."""


class DeadlineExceededError(TransportError):
  """A wait ended at its deadline; the message names who was waited for."""


# Above 4 MB a value is slow and above 2 GiB the wire breaks; a message far
# beyond what the layout asks for is a mistake of the caller.
MAX_VALUE_BYTES = 1 << 28


def check_key(key: str) -> None:
  """Refuses a key that the store would silently read as another one.

  Raises:
    ValueError: `key` is empty, has an empty part (leading, trailing or double
      `/`) or a NUL character.
  """
  if not key or "\0" in key or "" in key.split("/"):
    raise ValueError(
        f"transport key {key!r}: allowed are non-empty parts joined by one"
        " '/', without NUL"
    )


def check_value(key: str, value: bytes) -> None:
  """Refuses what cannot be written under `key`.

  Raises:
    TypeError: `value` is not `bytes`.
    ValueError: `value` is longer than `MAX_VALUE_BYTES`.
  """
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
  """One client's view of the shared map.

  Keys are `/`-separated; numbers in them are zero-padded, so that the order of
  `list` is the order of numbers. Every call blocks for at most `deadline_s` of
  the constructor, one of several keys for so long without any answer. A client
  belongs to one thread; a process may hold several.
  """

  @property
  @abc.abstractmethod
  def generation(self) -> int:
    """Number of the store generation that this client speaks to; only grows."""

  @abc.abstractmethod
  def put(self, key: str, value: bytes, *, overwrite: bool = True) -> bool:
    """Writes atomically; False if the key exists and `overwrite` is False.

    Raises:
      TransportError: the generation is lost; nothing is known of the write.
      DeadlineExceededError: the store did not answer in time; as above.
    """

  @abc.abstractmethod
  def get(self, key: str) -> bytes | None:
    """Returns the value, None where there is none. Does not wait for a key."""

  @abc.abstractmethod
  def list(self, directory: str) -> dict[str, bytes]:
    """Returns all keys below `directory/`, full names, sorted bytewise."""

  @abc.abstractmethod
  def delete(self, key: str) -> None:
    """Removes the key and everything below it; a missing key is no error."""

  def put_all(self, values: Mapping[str, bytes]) -> None:
    """Writes several keys, in any order; as `put`.

    The deadline is that of the next answer: thousands of keys take their time,
    as long as some of them come through.
    """
    for key, value in values.items():
      self.put(key, value)

  def delete_all(self, keys: Iterable[str]) -> None:
    """Removes several keys, in any order; as `delete` and `put_all`."""
    for key in keys:
      self.delete(key)

  @abc.abstractmethod
  def reconnect(self, deadline_s: float | None = None) -> int:
    """Waits for a newer generation than the lost one and attaches to it.

    Returns at once where the present generation is alive. Waits for the store's
    host to announce a generation, for at most `deadline_s` (default: the
    constructor's).

    Returns:
      The generation attached to.

    Raises:
      DeadlineExceededError: no newer generation came in time.
    """

  @abc.abstractmethod
  def close(self) -> None:
    """Lets go of the store. No other call may follow. Never blocks."""
