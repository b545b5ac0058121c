# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Hands journaled records from a receiver's threads to the trainer's thread."""

import dataclasses
import threading
from typing import Any

from tba_jax import types


@dataclasses.dataclass(frozen=True)
class Record:
  """A record of the journal.

  offset: end of the record in the journal.
  header: kind and fields: a block, a lost searcher (`kind` "gone"), blocks that
    never arrive ("missing"), or unknown losses ("unknown").
  groups: content of a block; None if its arrays are invalid.
  """

  offset: int
  header: dict[str, Any]
  groups: list[types.Group] | None = None

  @property
  def kind(self) -> str:
    return "block" if "sequence" in self.header else self.header["kind"]


class Inbox:
  """Queue of records in journal order, from any thread to the trainer's.

  Nothing else is shared between a receiver and the trainer's thread, so neither
  holds a lock that the other waits for.
  """

  def __init__(self):
    self._changed = threading.Condition()
    self._records: list[Record] = []

  def put(self, record: Record) -> None:
    """Adds a record that is in the journal."""
    with self._changed:
      self._records.append(record)
      self._changed.notify_all()

  def take(self) -> list[Record]:
    """Removes and returns all records, without waiting."""
    with self._changed:
      records, self._records = self._records, []
    return records

  def wait(self, timeout_s: float) -> bool:
    """Waits for a record; returns False if none came in time."""
    with self._changed:
      return self._changed.wait_for(lambda: bool(self._records), timeout_s)
