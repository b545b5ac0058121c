# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Searchers' leases, as the trainer reads them from the store and the disk."""

from collections.abc import Callable, Collection
import dataclasses
import os
import pathlib
import time
from typing import Any

from tba_jax.transport import byte_store
from tba_jax.transport import wire
from tba_jax.transport.groups import messages

# Least time between reads, in seconds and as a multiple of the duration of a
# read (there may be thousands of leases).
_EVERY_S = 0.25
_EVERY_TIMES = 20
# Most invalid leases that one read deletes.
_MAX_DELETED = 1000
# Most departed searchers that a table lists.
_MAX_DEPARTED = 100

FOLDER = "leases"
_SUFFIX = ".lease"
# A file has two slots, written in turn: a torn write leaves the other intact.
_SLOT_BYTES = 4096

# Fields of `messages` of kind "lease".
_Lease = dict[str, Any]


class LeaseFile:
  """File with a searcher's newest lease, on the searcher's disk.

  Each lease is written here before it is written to the store. So even if
  searcher and store are lost together, its totals are known after a restart of
  the trainer on this machine, or of the searcher on another. The file outlives
  the process, but maybe not a crash of the machine.
  """

  def __init__(self, workdir: pathlib.Path, sid: str):
    """Creates the file; raises OSError."""
    folder = workdir / FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{sid}{_SUFFIX}"
    self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    self._count = 0

  def write(self, data: bytes) -> None:
    """Replaces the lease; raises OSError."""
    slot = data.ljust(_SLOT_BYTES, b"\0")
    os.pwrite(self._fd, slot, _SLOT_BYTES * (self._count % 2))
    self._count += 1

  def close(self) -> None:
    os.close(self._fd)


def read_files(
    run: wire.RunIdentity,
) -> tuple[dict[str, tuple[_Lease, bytes]], list[str]]:
  """Returns the leases on this process's disk, and the damaged files.

  Returns:
    sid -> lease and its message, oldest file first; paths of files that have
    no valid lease.
  """
  if run.workdir is None:
    return {}, []
  leases, damaged, times = {}, [], {}
  for path in (run.workdir / FOLDER).glob(f"*{_SUFFIX}"):
    try:
      times[path.stem] = path.stat().st_mtime
      data = path.read_bytes()
      newest = _newest(run, path.stem, data)
      if newest is not None:
        leases[path.stem] = newest
      elif data.strip(b"\0"):  # An empty file was not written yet.
        damaged.append(str(path))
    except FileNotFoundError:
      pass  # Removed by another process.
  return {sid: leases[sid] for sid in sorted(leases, key=times.get)}, damaged


def _newest(
    run: wire.RunIdentity, sid: str, data: bytes
) -> tuple[_Lease, bytes] | None:
  """Returns the newer lease of a file's two slots, None if neither is valid."""
  key, valid = messages.lease_key(sid), []
  for start in (0, _SLOT_BYTES):
    message = data[start : start + _SLOT_BYTES].rstrip(b"\0")
    try:
      lease, _ = messages.decode(run, key, message, "lease")
      valid.append((lease, message))
    except wire.WireError:
      pass  # Torn, or not used yet.
  return max(valid, key=lambda item: item[0]["beat"], default=None)


def remove_files(run: wire.RunIdentity, sids: Collection[str]) -> None:
  """Removes the lease files of searchers that have ended."""
  for sid in sids:
    path = run.workdir / FOLDER / f"{sid}{_SUFFIX}"
    path.unlink(missing_ok=True)


@dataclasses.dataclass
class _Entry:
  """A lease as this process last read it.

  changed_at: time of its last change in the store.
  is_live: whether this process has ever read it from a store.
  """

  lease: _Lease
  changed_at: float
  is_live: bool


class LeaseTable:
  """Leases by searcher, timed by the reader's own clock.

  A searcher is gone when its lease has not changed for `lease_s`, is final, or
  a newer process has joined in the same slot. Not thread-safe.
  """

  def __init__(
      self,
      run: wire.RunIdentity,
      refusals: wire.Refusals,
      *,
      lease_s: float,
      clock: Callable[[], float] = time.monotonic,
  ):
    self._run = run
    self._refusals = refusals
    self.lease_s = lease_s
    self._clock = clock
    self._due_at = clock()
    self._read: dict[str, bytes] = {}
    self.entries: dict[str, _Entry] = {}
    self._gone: set[str] = set()
    self._replaced: set[str] = set()
    # Searchers that were written off, oldest first.
    self._departed: dict[str, None] = {}
    # Cache of `alive`; None after a change.
    self._alive: dict[str, _Lease] | None = None

  def is_due(self) -> bool:
    """Returns whether it is time to read the leases again."""
    return self._clock() >= self._due_at

  def read(self, transport: byte_store.Transport) -> dict[str, _Lease]:
    """Returns the leases that changed, by searcher; deletes invalid ones."""
    start = self._clock()
    before, self._read = self._read, transport.list("live")
    leases, invalid = {}, []
    for key, data in self._read.items():
      if before.get(key) == data:
        continue
      try:
        lease, _ = messages.decode(self._run, key, data, "lease")
        if key != messages.lease_key(lease["sid"]):
          raise wire.WireError("header", f"sid is {lease['sid']!r}")
        leases[lease["sid"]] = lease
      except wire.WireError as error:
        self._refusals.add(key, error)
        invalid.append(key)
    transport.delete_all(invalid[:_MAX_DELETED])
    took_s = self._clock() - start
    self._due_at = start + max(_EVERY_S, _EVERY_TIMES * took_s)
    return leases

  def update(self, leases: dict[str, _Lease], *, is_live: bool = True) -> None:
    """Updates leases; keeps missing ones, since the store may have been lost.

    Args:
      is_live: whether the leases are from the store, not from files.
    """
    self._alive = None
    for sid, lease in leases.items():
      entry = self.entries.get(sid)
      if entry is None:
        self.entries[sid] = _Entry(lease, self._clock(), is_live)
        continue
      # A lease with a lower beat is an old copy.
      is_newer = lease["beat"] > entry.lease["beat"]
      if is_live and (is_newer or not entry.is_live):
        entry.is_live, entry.changed_at = True, self._clock()
      if is_newer:
        # An expired searcher may come back; a replaced one stays gone, but its
        # totals may have grown.
        comes_back = not lease["final"] and sid not in self._replaced
        if comes_back or lease["totals"] != entry.lease["totals"]:
          self._gone.discard(sid)
        # Files have no statistics.
        stats = lease["stats"] if is_live else entry.lease["stats"]
        entry.lease = {**lease, "stats": stats}

  def restart_times(self) -> None:
    """Restarts the age of every lease, after the store was unreachable."""
    for entry in self.entries.values():
      entry.changed_at = self._clock()

  def alive(self) -> dict[str, _Lease]:
    """Returns the leases of searchers that are not gone; read-only."""
    if self._alive is None:
      self._alive = {
          sid: entry.lease
          for sid, entry in sorted(self.entries.items())
          if entry.is_live
          and sid not in self._gone
          and not entry.lease["final"]
      }
    return self._alive

  def all(self) -> dict[str, _Lease]:
    """Returns the last lease, with its `age_s` and `alive`, by searcher.

    Leases known only from files are left out.
    """
    alive = self.alive()
    return {
        sid: {**entry.lease, "age_s": self.age_s(sid), "alive": sid in alive}
        for sid, entry in sorted(self.entries.items())
        if entry.is_live
    }

  def age_s(self, sid: str) -> float:
    """Returns the seconds since a searcher's lease changed."""
    return self._clock() - self.entries[sid].changed_at

  def take_gone(self, generation: int) -> dict[str, str]:
    """Returns sid -> cause of the searchers gone since the last call.

    Args:
      generation: counter of the store. A searcher that joined a later
        generation is older than all others: the counter has restarted since.
    """
    newest: dict[str, tuple[bool, list[int], str]] = {}
    for sid, entry in self.entries.items():
      joined = entry.lease["joined"]
      candidate = joined[0] <= generation, joined, sid
      slot = entry.lease["slot"]
      newest[slot] = max(newest.get(slot, candidate), candidate)
    out = {}
    for sid, entry in self.entries.items():
      if sid in self._gone:
        continue
      if entry.lease["final"]:
        out[sid] = "finished"
      elif newest[entry.lease["slot"]][-1] != sid:
        out[sid] = "replaced"
        self._replaced.add(sid)
      elif self.age_s(sid) > self.lease_s:
        out[sid] = "expired"
    self._gone.update(out)
    self._alive = None
    return out

  def depart(self, sid: str) -> None:
    """Notes a written-off searcher; forgets all but the newest of these."""
    self._departed.pop(sid, None)
    self._departed[sid] = None
    while len(self._departed) > _MAX_DEPARTED:
      oldest = next(iter(self._departed))
      del self._departed[oldest]
      if oldest in self._gone:  # Otherwise it came back.
        del self.entries[oldest]
        self._gone.remove(oldest)
        self._replaced.discard(oldest)

  def totals(self, sid: str) -> dict[str, int]:
    """Returns the totals that the searcher last announced."""
    return self.entries[sid].lease["totals"]

  def announced(self) -> dict[str, dict[str, int]]:
    """Returns the totals of all searchers."""
    return {sid: entry.lease["totals"] for sid, entry in self.entries.items()}

  def knows(self, sid: str) -> bool:
    """Returns whether a searcher ever had a valid lease."""
    return sid in self.entries

  def is_gone(self, sid: str) -> bool:
    return sid in self._gone

  def dropped(self) -> dict[str, tuple[int, dict[str, int]]]:
    """Returns how far each searcher has dropped its acknowledged blocks.

    Returns:
      sid -> number of the oldest block that it keeps, and the totals before it.
    """
    return {
        sid: (entry.lease["first"], entry.lease["acked"])
        for sid, entry in self.entries.items()
    }
