# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which searchers are alive, by their leases and the reader's own clock."""

import dataclasses
import time
from typing import Any


@dataclasses.dataclass
class _Entry:
  lease: dict[str, Any]
  changed_at: float


class LeaseTable:
  """Leases as last read. A searcher is gone when its lease stands still, when
  it said goodbye, or when a newer process took its slot."""

  def __init__(self, lease_s: float, *, clock=time.monotonic):
    self._lease_s = lease_s
    self._clock = clock
    self._entries: dict[str, _Entry] = {}
    self._gone: set[str] = set()
    self._replaced: set[str] = set()
    # As `alive` returned it last; None once that may be wrong.
    self._alive: dict[str, dict[str, Any]] | None = None

  def update(self, leases: dict[str, dict[str, Any]]) -> None:
    """Takes the leases by sid as the store holds them now.

    A lease that is missing (the store may have been lost) is kept as it was.
    """
    now = self._clock()
    self._alive = None
    for sid, lease in leases.items():
      entry = self._entries.get(sid)
      # A lower one is a copy of an old lease, whoever put it there.
      if entry is None or lease["beat"] > entry.lease["beat"]:
        self._entries[sid] = _Entry(lease, now)
        # Somebody who was only slow is back; a replaced one stays gone.
        if not lease["final"] and sid not in self._replaced:
          self._gone.discard(sid)

  def excuse(self) -> None:
    """Starts everybody's patience anew: it was the reader that was away."""
    now = self._clock()
    for entry in self._entries.values():
      entry.changed_at = now

  def alive(self) -> dict[str, dict[str, Any]]:
    """Returns the leases of the searchers that are not gone, by sid.

    Not to be changed: it is the same one until something has changed.
    """
    if self._alive is None:
      self._alive = {
          sid: entry.lease
          for sid, entry in sorted(self._entries.items())
          if sid not in self._gone and not entry.lease["final"]
      }
    return self._alive

  def heard(self) -> dict[str, dict[str, Any]]:
    """Returns the last lease of every searcher, who is gone included.

    Each with `age_s`, seconds since it changed, and `alive`.
    """
    alive = self.alive()
    return {
        sid: {**entry.lease, "age_s": self.age_s(sid), "alive": sid in alive}
        for sid, entry in sorted(self._entries.items())
    }

  def age_s(self, sid: str) -> float:
    """Seconds since the lease of a known searcher changed."""
    return self._clock() - self._entries[sid].changed_at

  def take_gone(self) -> dict[str, str]:
    """Returns sid -> cause of the searchers newly gone; each is named once."""
    newest = {}
    for sid, entry in self._entries.items():
      slot, started = entry.lease["slot"], entry.lease["started"]
      if started >= newest.get(slot, (-1.0, ""))[0]:
        newest[slot] = (started, sid)
    out = {}
    for sid, entry in self._entries.items():
      if sid in self._gone:
        continue
      if entry.lease["final"]:
        out[sid] = "finished"
      elif newest[entry.lease["slot"]][1] != sid:
        out[sid] = "replaced"
        self._replaced.add(sid)
      elif self.age_s(sid) > self._lease_s:
        out[sid] = "expired"
    self._gone.update(out)
    self._alive = None
    return out

  def totals(self, sid: str) -> dict[str, int]:
    """Returns what the searcher last announced to have generated."""
    return self._entries[sid].lease["totals"]
