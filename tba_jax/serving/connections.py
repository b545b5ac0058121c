# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""HTTP connections that strangers cannot hold.

Whoever reaches the port can open connections without a key, send nothing or a
byte now and then, and so take every place (uvicorn has a deadline for the next
request of a connection, and none for its first one or its slow bytes). Here a
connection that waits for a request is closed at a deadline, and the oldest one
as soon as too many wait. h11 bounds the head of a request (64 KiB), which
uvicorn's other parser, the one it takes if it is installed, does not.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http import h11_impl

# Seconds from the first byte of a connection, or after an answer, to a request
# whose head is complete.
REQUEST_S = 10.0
# Connections that wait for one; a request takes milliseconds to come.
_MAX_WAITING = 256


class Protocol(h11_impl.H11Protocol):
  """A connection of uvicorn that waits for a request only so long.

  waiting: connections that wait for a request, oldest first.
  """

  waiting: dict["Protocol", None] = {}
  _deadline: asyncio.TimerHandle | None = None

  def connection_made(self, transport: Any) -> None:
    super().connection_made(transport)
    self._wait()

  def data_received(self, data: bytes) -> None:
    super().data_received(data)
    if self._has_request():
      self._end_wait()
    else:
      self._wait()

  def connection_lost(self, exc: Exception | None) -> None:
    self._end_wait()
    super().connection_lost(exc)

  def on_response_complete(self) -> None:
    super().on_response_complete()
    if not self.transport.is_closing() and not self._has_request():
      self._wait()

  def _has_request(self) -> bool:
    return self.cycle is not None and not self.cycle.response_complete

  def _wait(self) -> None:
    """Begins to wait, unless it does."""
    if self in self.waiting or self.transport.is_closing():
      return
    if len(self.waiting) >= _MAX_WAITING:
      next(iter(self.waiting)).close()
    self.waiting[self] = None
    self._deadline = self.loop.call_later(REQUEST_S, self.close)

  def _end_wait(self) -> None:
    self.waiting.pop(self, None)
    if self._deadline is not None:
      self._deadline.cancel()
      self._deadline = None

  def close(self) -> None:
    """Ends the connection without an answer."""
    self._end_wait()
    self.transport.close()
