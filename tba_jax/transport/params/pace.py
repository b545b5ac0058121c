# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Deadlines of transfers that report no progress: by bytes and rate seen."""

from collections.abc import Iterator
import contextlib
import time

# Rate that is taken for possible before one was seen.
FIRST_BYTES_PER_S = 5e6
# Times that a transfer may take longer than at the rate seen.
_SLACK = 4.0
# Smaller ones measure latencies.
_LEAST_BYTES = 1 << 20


class Pace:
  """Rate of transfers, and the deadline that it gives the next.

  Args:
    floor_s: deadline of a transfer of nothing.
  """

  def __init__(self, floor_s: float):
    self._floor_s = floor_s
    self._bytes_per_s = FIRST_BYTES_PER_S
    self._until = 0.0

  def deadline_s(self, num_bytes: float) -> float:
    """Returns the longest time that a transfer may take."""
    return self._floor_s + num_bytes / self._bytes_per_s

  def done(self, num_bytes: float, seconds: float) -> None:
    """Notes the time that a transfer took."""
    if num_bytes >= _LEAST_BYTES:
      self._bytes_per_s = num_bytes / seconds / _SLACK

  def missed(self) -> None:
    """Notes a transfer that was late: the next gets twice the time."""
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
