# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""HTTP connections with deadlines, so that strangers cannot exhaust them.

Anyone who reaches the port can open connections without a key and, by sending
nothing or a byte now and then, occupy every slot: uvicorn has a deadline for
the next request of a connection, but none for its first request or for slow
bytes. Here a connection that waits for a request is closed at a deadline, and
the oldest waiting one as soon as too many wait. h11 bounds the head of a
request (64 KiB); uvicorn's other parser, its default if installed, does not.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http import h11_impl

# Seconds from the opening of a connection, or from its last answer, until the
# head of a request is complete.
REQUEST_S = 10.0
# Most connections that wait for a request; it normally takes milliseconds.
_MAX_WAITING = 256


class Protocol(h11_impl.H11Protocol):
  """A uvicorn connection with a deadline for its next request.

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
    """Starts the deadline, unless one is running."""
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
