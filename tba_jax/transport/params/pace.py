# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Deadlines of transfers without progress reports, from bytes and past rate."""

from collections.abc import Iterator
import contextlib
import time

# Rate assumed before the first measurement.
FIRST_BYTES_PER_S = 5e6
# Factor by which a transfer may be slower than the measured rate.
_SLACK = 4.0
# Smaller transfers would measure latency, not rate.
_LEAST_BYTES = 1 << 20


class Pace:
  """Measured rate of transfers, and the deadline that it sets for the next.

  Args:
    floor_s: deadline of an empty transfer.
  """

  def __init__(self, floor_s: float):
    self._floor_s = floor_s
    self._bytes_per_s = FIRST_BYTES_PER_S
    self._until = 0.0

  def deadline_s(self, num_bytes: float) -> float:
    """Returns the longest time that a transfer may take."""
    return self._floor_s + num_bytes / self._bytes_per_s

  def done(self, num_bytes: float, seconds: float) -> None:
    """Notes the duration of a completed transfer."""
    if num_bytes >= _LEAST_BYTES:
      self._bytes_per_s = num_bytes / seconds / _SLACK

  def missed(self) -> None:
    """Notes a late transfer: the next gets about twice the time."""
    self._bytes_per_s /= 2

  @contextlib.contextmanager
  def moving(self, num_bytes: float) -> Iterator[None]:
    """Marks a transfer as in progress."""
    self._until = time.monotonic() + self.deadline_s(num_bytes)
    try:
      yield
    finally:
      self._until = 0.0

  def is_moving(self) -> bool:
    """Returns whether a transfer is in progress and not late."""
    return time.monotonic() < self._until
