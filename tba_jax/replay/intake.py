# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What of a look at the queue is new, in order, and what can be thrown away.

Each searcher numbers its blocks from 0. Its *watermark* is the next number that
is wanted of it: a block below is a wire duplicate, one above waits for those
before it, and only an authenticated block of this run counts as either.
"""

from collections.abc import Callable, Mapping
import dataclasses
import time
from typing import Any

import numpy as np

from tba_jax.transport import wire

# A gap in a searcher's sequence that lasts so long will not be filled: the
# journal that held the missing blocks is gone.
GAP_S = 6.0

_UNITS = ("prompts", "completions", "tokens")


@dataclasses.dataclass(frozen=True)
class Message:
  """One block as it came.

  key: in the store.
  data: as sent, for the journal.
  header: of the wire message, its common fields checked.
  arrays: not checked yet.
  """

  key: str
  data: bytes
  header: dict[str, Any]
  arrays: dict[str, np.ndarray]


class Intake:
  """Sorts messages by the watermarks, which move only by `take`.

  watermarks: next sequence of each searcher.
  counts: messages refused, and wire duplicates.
  unanswered: searchers that are owed an acknowledgement; the owner takes them
    out.
  """

  def __init__(
      self,
      *,
      watermarks: Mapping[str, int],
      run_id: str,
      secret: bytes,
      on_event: Callable[[str, str], None],
      clock: Callable[[], float] = time.monotonic,
  ):
    self.watermarks = dict(watermarks)
    self.counts = {"wire_duplicates": 0, "refused": 0}
    self.unanswered: set[str] = set()
    self._run_id = run_id
    self._secret = secret
    self._on_event = on_event
    self._clock = clock
    self._gaps: dict[str, float] = {}

  def take(self, header: Mapping[str, Any]) -> None:
    """Notes that a block is safe: its copies are duplicates from now on."""
    self.watermarks[header["sid"]] = header["sequence"] + 1
    self.unanswered.add(header["sid"])

  def refuse(self, what: str) -> None:
    """Counts a message that is none of this run, and says which and why."""
    self.counts["refused"] += 1
    self._on_event("refused_message", what)

  def forget_gaps(self) -> None:
    """Begins the wait for missing blocks anew: everything is sent again."""
    self._gaps.clear()

  def sort(
      self, entries: Mapping[str, bytes]
  ) -> tuple[list[Message], list[str]]:
    """Returns the new blocks in order, and the keys of what is of no use.

    Args:
      entries: key to bytes, sorted by key.
    """
    fresh, useless = [], []
    expected: dict[str, int] = {}
    for key, data in entries.items():
      try:
        header, arrays = wire.decode(data, self._secret)
        self._check(key, header)
      except wire.WireError as error:
        self.refuse(f"{key}: {error}")
        useless.append(key)
        continue
      sid, sequence = header["sid"], header["sequence"]
      want = expected.get(sid, self.watermarks.get(sid, 0))
      if sequence < want:
        self.counts["wire_duplicates"] += 1
        self.unanswered.add(sid)
        useless.append(key)
      elif sequence == want or self._gap_is_old(sid, want):
        fresh.append(Message(key, data, header, arrays))
        expected[sid] = sequence + 1
        self._gaps.pop(sid, None)
    return fresh, useless

  def _check(self, key: str, header: Mapping[str, Any]) -> None:
    """Refuses what no searcher of this run puts under this key."""
    if header.get("run") != self._run_id:
      raise wire.WireError("header", f"of another run, {header.get('run')!r}")
    sid, sequence = header.get("sid"), header.get("sequence")
    if type(sequence) is not int or not key.endswith(f"/{sid}/{sequence:012d}"):
      raise wire.WireError("header", f"is block {sequence!r} of {sid!r}")
    for name in ("totals", "amount"):
      value = header.get(name)
      if not isinstance(value, dict) or any(
          type(value.get(u)) is not int or value[u] < 0 for u in _UNITS
      ):
        raise wire.WireError("header", f"{name} is {value!r}")

  def _gap_is_old(self, sid: str, want: int) -> bool:
    since = self._gaps.setdefault(sid, self._clock())
    if self._clock() - since < GAP_S:
      return False
    self._on_event("gap", f"{sid}: blocks from {want} on are lost")
    return True
