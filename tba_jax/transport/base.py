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


class TransportError(RuntimeError):
  """The store (this generation of it) is gone or refused the operation."""


class DeadlineExceededError(TransportError):
  """A wait ended at its deadline; the message names who was waited for."""


class Transport(abc.ABC):
  """One client's view of the shared map.

  Keys are `/`-separated; numbers in them are zero-padded, so that the order of
  `list` is the order of numbers. Every call blocks for at most `deadline_s` of
  the constructor. A client belongs to one thread; a process may hold several.
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
