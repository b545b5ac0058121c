# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Searchers' leases, as the trainer reads them from the store."""

from collections.abc import Callable
import dataclasses
import time
from typing import Any

from tba_jax.replay import messages
from tba_jax.transport import base
from tba_jax.transport import wire

# Time between reads: at least, and as a multiple of the time that a read takes
# (there may be thousands of leases).
_EVERY_S = 0.25
_EVERY_TIMES = 20

# Fields of `messages` of kind "lease".
Lease = dict[str, Any]


@dataclasses.dataclass
class _Entry:
  lease: Lease
  changed_at: float


class LeaseTable:
  """Leases by searcher, timed by the reader's own clock.

  A searcher is gone when its lease has not changed for `lease_s`, is final, or
  a newer process has joined in the same slot. Not thread-safe.
  """

  def __init__(
      self,
      run: messages.RunIdentity,
      refusals: messages.Refusals,
      *,
      lease_s: float,
      clock: Callable[[], float] = time.monotonic,
  ):
    self._run = run
    self._refusals = refusals
    self._lease_s = lease_s
    self._clock = clock
    self._due_at = clock()
    self._read: dict[str, bytes] = {}
    self._entries: dict[str, _Entry] = {}
    self._gone: set[str] = set()
    self._replaced: set[str] = set()
    # Cache of `alive`; None after a change.
    self._alive: dict[str, Lease] | None = None

  def is_due(self) -> bool:
    """Returns whether it is time to read the leases again."""
    return self._clock() >= self._due_at

  def read(self, transport: base.Transport) -> dict[str, Lease]:
    """Returns the leases that changed, by searcher; deletes invalid ones."""
    start = self._clock()
    before, self._read = self._read, transport.list("live")
    found = {}
    for key, data in self._read.items():
      if before.get(key) == data:
        continue
      try:
        lease, _ = messages.decode(self._run, key, data, "lease")
        if key != messages.lease_key(lease["sid"]):
          raise wire.WireError("header", f"sid is {lease['sid']!r}")
        found[lease["sid"]] = lease
      except wire.WireError as error:
        self._refusals.add(key, error)
        transport.delete(key)
    took_s = self._clock() - start
    self._due_at = start + max(_EVERY_S, _EVERY_TIMES * took_s)
    return found

  def update(self, leases: dict[str, Lease]) -> None:
    """Updates leases; a missing one is kept, since the store may be lost."""
    self._alive = None
    for sid, lease in leases.items():
      entry = self._entries.get(sid)
      # A lower beat is a copy of an old lease.
      if entry is None or lease["beat"] > entry.lease["beat"]:
        self._entries[sid] = _Entry(lease, self._clock())
        # An expired searcher may come back; a replaced one stays gone.
        if not lease["final"] and sid not in self._replaced:
          self._gone.discard(sid)

  def restart_times(self) -> None:
    """Restarts the time of every lease, after the store was unreachable."""
    for entry in self._entries.values():
      entry.changed_at = self._clock()

  def alive(self) -> dict[str, Lease]:
    """Returns the leases of searchers that are not gone; read-only."""
    if self._alive is None:
      self._alive = {
          sid: entry.lease
          for sid, entry in sorted(self._entries.items())
          if sid not in self._gone and not entry.lease["final"]
      }
    return self._alive

  def all(self) -> dict[str, Lease]:
    """Returns every searcher's last lease, with its `age_s` and `alive`."""
    alive = self.alive()
    return {
        sid: {**entry.lease, "age_s": self.age_s(sid), "alive": sid in alive}
        for sid, entry in sorted(self._entries.items())
    }

  def age_s(self, sid: str) -> float:
    """Returns the seconds since a searcher's lease changed."""
    return self._clock() - self._entries[sid].changed_at

  def take_gone(self) -> dict[str, str]:
    """Returns sid -> cause of the searchers gone since the last call."""
    newest: dict[str, tuple[list[int], str]] = {}
    for sid, entry in self._entries.items():
      candidate = entry.lease["joined"], sid
      slot = entry.lease["slot"]
      newest[slot] = max(newest.get(slot, candidate), candidate)
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
    """Returns the totals that the searcher last announced."""
    return self._entries[sid].lease["totals"]
