# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests that kill the process, for example by exhausting its memory."""

from collections.abc import Sequence
import contextlib
import json
import pathlib

from absl import logging

# Process deaths during a request after which the request is not retried.
MOST_DEATHS = 3
DEADLY = (
    f"the server was killed {MOST_DEATHS} times during it, and does"
    " not try again"
)


class CrashGuard:
  """Persistent record of the requests in progress."""

  def __init__(self, path: pathlib.Path):
    self._path = path
    # Number of deaths of the process during a request, by id.
    self._deaths: dict[str, int] = {}
    # The file is missing at first, and may be empty after a power cut.
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
      self._deaths = json.loads(path.read_text())

  def is_suspect(self, id: str) -> bool:
    """Returns whether the process has died during a request."""
    return id in self._deaths

  def may_begin(self, ids: Sequence[str]) -> bool:
    """Returns whether these requests may run, and if so records them."""
    deaths = {id: self._deaths.get(id, 0) for id in ids}
    if max(deaths.values()) >= MOST_DEATHS:
      return False
    text = json.dumps({id: count + 1 for id, count in deaths.items()})
    new = self._path.with_suffix(".new")
    try:
      new.write_text(text)
      new.replace(self._path)
    except OSError as error:
      logging.error("%s", error)  # A full disk does not stop the request.
    return True

  def clear(self) -> None:
    """Records a clean shutdown."""
    self._path.unlink(missing_ok=True)
