# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""How often a process asks the store whether something has changed.

The store cannot call anybody, so whoever waits for news has to ask. The pause
after a question is a share of the time that nothing has changed:

    pause = min(max(share * time since the last change, floor), cap)

so that news that came after t seconds is heard within `share * t` of its
coming, and a change every 30 s costs a few dozen questions, not thousands.
While somebody waits for the answer, share and floor are smaller.
"""

from collections.abc import Callable
import time

# Of the time that somebody has waited: what a wait is longer at most, and half
# of it on average.
_WAITING_SHARE = 0.02


class Pace:
  """When the next question is due. Not thread-safe: its owner locks."""

  def __init__(
      self,
      *,
      floor_s: float,
      waiting_floor_s: float,
      share: float,
      cap_s: float,
      clock: Callable[[], float] = time.monotonic,
  ):
    """The first question is due at once.

    Args:
      floor_s: the shortest pause.
      waiting_floor_s: the shortest one while somebody waits.
      share: of the time since the last change, while nobody waits.
      cap_s: the longest pause.
      clock: seconds.
    """
    self._floors_s = {False: floor_s, True: min(floor_s, waiting_floor_s)}
    self._shares = {False: share, True: min(share, _WAITING_SHARE)}
    self._cap_s = cap_s
    self._clock = clock
    self._waiting = False
    self._changed_at = self._due_at = clock()

  @property
  def waiting(self) -> bool:
    """True while somebody waits for the answer."""
    return self._waiting

  def due_in_s(self) -> float:
    """Returns the seconds until the next question, 0 where it is due."""
    return max(0.0, self._due_at - self._clock())

  def asked(self, changed: bool = False) -> None:
    """Notes a question, and whether the answer was news."""
    now = self._clock()
    if changed:
      self._changed_at = now
    self._due_at = now + self._pause_s(now)

  def changed(self, *, at_once: bool = False) -> None:
    """Notes that the asking side has done something, so news may come of it.

    Args:
      at_once: whether a question is due now, and not only after a pause.
    """
    now = self._clock()
    self._changed_at = now
    pause_s = 0.0 if at_once else self._pause_s(now)
    self._due_at = min(self._due_at, now + pause_s)

  def wait(self) -> bool:
    """Notes that somebody waits: a question is due at once.

    Returns:
      False where somebody did already, and nothing has changed by that.
    """
    if self._waiting:
      return False
    self._waiting = True
    self._changed_at = self._due_at = self._clock()
    return True

  def rest(self) -> None:
    """Notes that nobody waits any more."""
    self._waiting = False

  def _pause_s(self, now: float) -> float:
    share, floor_s = self._shares[self._waiting], self._floors_s[self._waiting]
    pause_s = max(share * (now - self._changed_at), floor_s)
    return min(pause_s, self._cap_s)
