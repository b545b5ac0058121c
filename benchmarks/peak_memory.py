# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Peak memory of the processes that a benchmark starts."""

import collections
from collections.abc import Iterator
import os
import pathlib
import re
import threading
from typing import Any

from tba_jax.system import jsonl

ROLES = ("trainer", "searcher")


class PeakMemory:
  """Peak memory of this process's descendants.

  Includes the peak of earlier processes, kept in a file.

  peak_bytes: peak of the summed proportional memory (PSS), which counts a
    shared page once.
  of_roles: role -> peak bytes of its processes.
  """

  _PERIOD_S = 2.0

  def __init__(self, path: pathlib.Path):
    self._path = path
    saved = jsonl.read_json(path) or {"peak_bytes": 0, "of_roles": {}}
    self.peak_bytes: int = saved["peak_bytes"]
    self.of_roles: dict[str, int] = saved["of_roles"]
    self._ended = threading.Event()
    self._thread = threading.Thread(target=self._watch, daemon=True)

  def __enter__(self) -> "PeakMemory":
    self._thread.start()
    return self

  def __exit__(self, *_: Any) -> None:
    self._ended.set()
    self._thread.join()
    peaks = {"peak_bytes": self.peak_bytes, "of_roles": self.of_roles}
    jsonl.atomic_write_json(self._path, peaks)

  def _watch(self) -> None:
    while True:
      bytes_of = collections.Counter()
      for role, num_bytes in _memory_below(os.getpid()):
        bytes_of[role] += num_bytes
      self.peak_bytes = max(self.peak_bytes, bytes_of.total())
      for role in ROLES:
        peak = max(self.of_roles.get(role, 0), bytes_of[role])
        self.of_roles |= {role: peak} if peak else {}
      if self._ended.wait(self._PERIOD_S):
        return


def _memory_below(pid: int) -> Iterator[tuple[str, int]]:
  """Yields the role, "" without one, and PSS of a process's descendants."""
  try:
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
      for child in map(int, (task / "children").read_text().split()):
        lines = pathlib.Path(f"/proc/{child}/smaps_rollup").read_text()
        (kilobytes,) = re.findall(r"^Pss:\s+(\d+) kB", lines, re.MULTILINE)
        command = pathlib.Path(f"/proc/{child}/cmdline").read_bytes().decode()
        role = re.search(r"tba_jax\.system\.role\0([a-z]+)-\d+\0", command)
        yield role[1] if role else "", 1024 * int(kilobytes)
        yield from _memory_below(child)
  except (OSError, ValueError):  # A process has ended.
    pass
