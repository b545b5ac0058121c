# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Adaptive polling interval of store clients.

The store cannot notify clients, so they poll, at an interval in proportion to
the time since the last change:

    interval = min(max(share * time since the last change, floor), cap)

A change after t seconds is thus seen within `share * t`, between floor and cap.
While a caller waits, share and floor are smaller.
"""

from collections.abc import Callable
import time

# Largest share while a caller waits: adds at most 2 % to the wait.
_WAITING_SHARE = 0.02


class PollInterval:
  """Computes when the next poll is due. Not thread-safe.

  Args:
    floor_s: shortest interval.
    waiting_floor_s: shortest interval while a caller waits.
    share: interval as a share of the time since the last change, while no
      caller waits.
    cap_s: longest interval.
    clock: returns seconds.
  """

  def __init__(
      self,
      *,
      floor_s: float,
      waiting_floor_s: float,
      share: float,
      cap_s: float,
      clock: Callable[[], float] = time.monotonic,
  ):
    self._floors_s = {False: floor_s, True: min(floor_s, waiting_floor_s)}
    self._shares = {False: share, True: min(share, _WAITING_SHARE)}
    self._cap_s = cap_s
    self._clock = clock
    self._waiting = False
    self.changed_at = self._due_at = clock()

  @property
  def waiting(self) -> bool:
    return self._waiting

  def due_in_s(self) -> float:
    """Returns the seconds until the next poll, 0 if it is due."""
    return max(0.0, self._due_at - self._clock())

  def polled(self, changed: bool = False) -> None:
    """Records a poll, and whether it found a change."""
    now = self._clock()
    if changed:
      self.changed_at = now
    self._due_at = now + self._interval_s(now)

  def changed(self, *, at_once: bool = False) -> None:
    """Records a change by this client; a reply may follow soon.

    With `at_once`, a poll is due now instead of after an interval.
    """
    now = self._clock()
    self.changed_at = now
    interval_s = 0.0 if at_once else self._interval_s(now)
    self._due_at = min(self._due_at, now + interval_s)

  def start_waiting(self) -> bool:
    """Makes a poll due for a waiting caller; False if one already waits."""
    if self._waiting:
      return False
    self._waiting = True
    self.changed_at = self._due_at = self._clock()
    return True

  def stop_waiting(self) -> None:
    self._waiting = False

  def _interval_s(self, now: float) -> float:
    share, floor_s = self._shares[self._waiting], self._floors_s[self._waiting]
    interval_s = max(share * (now - self.changed_at), floor_s)
    return min(interval_s, self._cap_s)
