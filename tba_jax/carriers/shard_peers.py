# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""How the processes of one trainer write a version of params together.

Process 0 decides which versions are written. Of each it tells the others the
folder, and waits for what they say they have written there: place and digest of
their shards. All this goes through the key-value store of the trainer's own
coordinator, between threads that no step waits for.
"""

from collections.abc import Callable, Mapping
import threading
import time
from typing import Any

from absl import logging
from etils import epath

from tba_jax.carriers import orbax_folder
from tba_jax.transport import jax_kv
from tba_jax.transport import wire

_PREFIX = "tba_shards"
# Of one wait in the client, which cannot be interrupted.
_LOOK_S = 1.0


class Leader:
  """Process 0's end; one thread uses it."""

  def __init__(
      self,
      client: jax_kv.Client,
      num_processes: int,
      *,
      secret: bytes,
      deadline_s: float,
  ):
    """Says nothing yet.

    Args:
      client: of the trainer's coordinator.
      num_processes: of the trainer.
      secret: key of the messages.
      deadline_s: in which each process must have written a version.
    """
    self._client = client
    self._others = range(1, num_processes)
    self._secret = secret
    self._deadline_s = deadline_s
    self._count = -1
    self._tag = ""

  def begin(self, tag: str, path: str) -> None:
    """Has each of the others write its shards of a version into a folder.

    Args:
      tag: of the version.
      path: of the folder, which is there.
    """
    self._count += 1
    self._tag = tag
    for process in self._others:
      header = {"count": self._count, "tag": tag, "path": path}
      self._client.key_value_set_bytes(
          _ask_key(process, self._count),
          wire.encode(header, {}, self._secret),
      )

  def collect(self) -> list[orbax_folder.Shards]:
    """Returns what each of them has written, in the order of the processes.

    Raises:
      OSError: one could not, or did not within the deadline; it is named.
    """
    until = time.monotonic() + self._deadline_s
    return [self._answer(process, until) for process in self._others]

  def close(self) -> None:
    """Has nothing to end: the publisher's thread does all of it."""

  def _answer(self, process: int, until: float) -> orbax_folder.Shards:
    key = _answer_key(process, self._count)
    left_ms = int(1e3 * max(until - time.monotonic(), 0.001))
    try:
      data = self._client.blocking_key_value_get_bytes(key, left_ms)
      self._client.key_value_delete(key)
      header, _ = wire.decode(data, self._secret)
    except (jax_kv.KvError, wire.WireError) as error:
      raise OSError(
          f"process {process} of the trainer has not written its shards of"
          f" version {self._tag} within {self._deadline_s:.0f} s: {error}"
      ) from error
    if header["error"]:
      raise OSError(f"process {process} of the trainer: {header['error']}")
    return header["shards"]


class Helper:
  """The end of another process; its thread writes what process 0 asks for."""

  def __init__(
      self,
      client: jax_kv.Client,
      process: int,
      copy: Callable[[Any], Mapping[str, Any]],
      *,
      secret: bytes,
      deadline_s: float,
  ):
    """Starts the thread.

    Args:
      client: of the trainer's coordinator.
      process: this one.
      copy: returns what is published of params, by path.
      secret: key of the messages.
      deadline_s: in which a version that is asked for must be here.
    """
    self._client = client
    self._process = process
    self._copy = copy
    self._secret = secret
    self._deadline_s = deadline_s
    # In the order in which they came; process 0 asks in that order.
    self._held: list[tuple[int, Mapping[str, Any]]] = []
    self._changed = threading.Condition()
    self._stop = threading.Event()
    self._thread = threading.Thread(
        target=self._run, name="shards", daemon=True
    )
    self._thread.start()

  def submit(self, version: int, params: Any) -> None:
    """Keeps a copy of a version, on its devices, until it is written."""
    leaves = self._copy(params)
    with self._changed:
      self._held.append((version, leaves))
      self._changed.notify_all()

  def forget(self, version: int) -> None:
    """Lets go of a version, the older of two: process 0 asks for it no more."""
    with self._changed:
      self._take(version)

  def close(self) -> None:
    """Ends the thread; what it was not asked for is dropped."""
    self._stop.set()
    self._thread.join(timeout=2 * _LOOK_S)

  def _run(self) -> None:
    count = 0
    while not self._stop.is_set():
      key = _ask_key(self._process, count)
      try:
        data = self._client.blocking_key_value_get_bytes(
            key, int(1e3 * _LOOK_S)
        )
      except jax_kv.KvError as error:
        if jax_kv.error_code(error) == "DEADLINE_EXCEEDED":
          continue
        # The role hears of it too, and ends.
        logging.warning("no more shards are written: %s", error)
        return
      answer = {"error": "", "shards": {}}
      try:
        answer["shards"] = self._write(data)
      # Process 0 raises it, whatever it is.
      except Exception as error:
        answer["error"] = f"its shards could not be written: {error}"
      self._client.key_value_set_bytes(
          _answer_key(self._process, count),
          wire.encode(answer, {}, self._secret),
      )
      self._client.key_value_delete(key)
      count += 1

  def _write(self, data: bytes) -> orbax_folder.Shards:
    header, _ = wire.decode(data, self._secret)
    version = int(header["tag"].rpartition(".")[2])
    with self._changed:
      found = self._changed.wait_for(
          lambda: any(held == version for held, _ in self._held),
          self._deadline_s,
      )
      if not found:
        raise TimeoutError(f"version {version} did not come to be")
      leaves = self._take(version)
    return orbax_folder.write(epath.Path(header["path"]), leaves)

  def _take(self, version: int) -> Mapping[str, Any]:
    at = [held for held, _ in self._held].index(version)
    return self._held.pop(at)[1]


def _ask_key(process: int, count: int) -> str:
  return f"{_PREFIX}/ask/{process}/{count:012d}"


def _answer_key(process: int, count: int) -> str:
  return f"{_PREFIX}/done/{process}/{count:012d}"
