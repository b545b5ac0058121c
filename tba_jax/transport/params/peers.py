# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Shards of a version from every process of the trainer.

Process 0 (`Leader`) asks the others (`Helper`) for their shards through the
key-value store of the trainer's coordinator, in background threads.
"""

from collections.abc import Callable, Mapping
import threading
import time
from typing import Any

from absl import logging
from etils import epath
import jax
import ml_collections

from tba_jax import types
from tba_jax.system import background
from tba_jax.transport import wire
from tba_jax.transport.kv import jax_kv
from tba_jax.transport.params import carrier
from tba_jax.transport.params import orbax_shards
from tba_jax.transport.params import version

_PREFIX = "tba_shards"
# Longest wait in the coordinator's client, which cannot be interrupted.
_POLL_S = 1.0


class Leader:
  """Process 0's end: asks the other processes for their shards.

  Args:
    client: client of the trainer's coordinator.
    num_processes: number of the trainer's processes.
    secret: key of the messages.
    deadline_s: time for the other processes to write a version.
  """

  def __init__(
      self,
      client: jax_kv.Client,
      num_processes: int,
      *,
      secret: bytes,
      deadline_s: float,
  ):
    self._client = client
    self._others = range(1, num_processes)
    self._secret = secret
    self._deadline_s = deadline_s
    self._count = -1
    self._tag = ""

  def begin(self, tag: str, path: str) -> None:
    """Asks the other processes to write their shards of a version."""
    self._count += 1
    self._tag = tag
    message = {"tag": tag, "path": path}
    for process in self._others:
      self._client.key_value_set_bytes(
          _ask_key(process, self._count),
          wire.encode_message(message, self._secret),
      )

  def collect(self) -> list[orbax_shards.Shards]:
    """Waits for the others; returns what each has written.

    Raises:
      OSError: a process failed, or was late; it is named.
    """
    until = time.monotonic() + self._deadline_s
    return [self._answer(process, until) for process in self._others]

  def close(self) -> None:
    """Does nothing; for symmetry with `Helper`."""

  def _answer(self, process: int, until: float) -> orbax_shards.Shards:
    key = _answer_key(process, self._count)
    left_ms = int(1e3 * max(until - time.monotonic(), 0.001))
    try:
      data = self._client.blocking_key_value_get_bytes(key, left_ms)
      self._client.key_value_delete(key)
      answer = wire.decode_message(
          data, self._secret, {"error": str, "shards": {"*": [list]}}
      )
    except (jax_kv.KvError, wire.WireError) as error:
      raise OSError(
          f"process {process} of the trainer has not written its shards of"
          f" version {self._tag} within {self._deadline_s:.0f} s: {error}"
      ) from error
    if answer["error"]:
      raise OSError(f"process {process} of the trainer: {answer['error']}")
    return answer["shards"]


class Helper:
  """Another process's end: writes the shards that process 0 asks for.

  Args:
    client: client of the trainer's coordinator.
    process: number of this process.
    copy: returns a copy of the published leaves of params, by path.
    secret: key of the messages.
    deadline_s: time for a requested version to be submitted.
  """

  def __init__(
      self,
      client: jax_kv.Client,
      process: int,
      copy: Callable[[Any], Mapping[str, Any]],
      *,
      secret: bytes,
      deadline_s: float,
  ):
    self._client = client
    self._process = process
    self._copy = copy
    self._secret = secret
    self._deadline_s = deadline_s
    # Versions in order of submission, in which process 0 asks for them.
    self._copies: list[tuple[int, Mapping[str, Any]]] = []
    self._changed = threading.Condition()
    # The thread may be writing.
    close_s = max(deadline_s, 2 * _POLL_S)
    self._worker = background.Thread("shards", self._run, close_s=close_s)

  def submit(self, version: int, params: Any) -> None:
    """Keeps a copy of a version on devices until it is written.

    Raises the writing thread's error, if any.
    """
    self._worker.check()
    leaves = self._copy(params)
    with self._changed:
      self._copies.append((version, leaves))
      self._changed.notify_all()

  def forget(self, version: int) -> None:
    """Drops the oldest copy of a version, which process 0 will not ask for."""
    with self._changed:
      self._take(version)

  def close(self) -> None:
    """Ends the thread; raises its error, if any."""
    self._worker.close()

  def _run(self, stop: threading.Event) -> None:
    count = 0
    try:
      while not stop.is_set():
        if self._serve(count):
          count += 1
    except jax_kv.KvError as error:
      # The coordinator is lost, which the role finds out by itself.
      logging.warning("no more shards are written: %s", error)

  def _serve(self, count: int) -> bool:
    """Answers a request of process 0; False if none came."""
    key = _ask_key(self._process, count)
    try:
      data = self._client.blocking_key_value_get_bytes(key, int(1e3 * _POLL_S))
    except jax_kv.KvError as error:
      if jax_kv.error_code(error) == "DEADLINE_EXCEEDED":
        return False
      raise
    answer = {"error": "", "shards": {}}
    try:
      answer["shards"] = self._write(data)
    except Exception as error:  # Process 0 raises it.
      answer["error"] = f"its shards could not be written: {error}"
    self._client.key_value_set_bytes(
        _answer_key(self._process, count),
        wire.encode_message(answer, self._secret),
    )
    self._client.key_value_delete(key)
    return True

  def _write(self, data: bytes) -> orbax_shards.Shards:
    request = wire.decode_message(data, self._secret, {"tag": str, "path": str})
    version = int(request["tag"].rpartition(".")[2])
    with self._changed:
      done = self._changed.wait_for(
          lambda: any(submitted == version for submitted, _ in self._copies),
          self._deadline_s,
      )
      if not done:
        raise TimeoutError(f"version {version} was not submitted")
      leaves = self._take(version)
    return orbax_shards.write_folder(epath.Path(request["path"]), leaves)

  def _take(self, version: int) -> Mapping[str, Any]:
    at = [submitted for submitted, _ in self._copies].index(version)
    return self._copies.pop(at)[1]


def _ask_key(process: int, count: int) -> str:
  return f"{_PREFIX}/ask/{process}/{count:012d}"


def _answer_key(process: int, count: int) -> str:
  return f"{_PREFIX}/done/{process}/{count:012d}"


def make_peers(
    config: ml_collections.ConfigDict,
    secret: bytes,
    copy: Callable[[types.PyTree], dict[str, Any]],
    params: types.PyTree,
    *,
    client: jax_kv.Client | None,
    process: int,
) -> Leader | Helper | None:
  """Returns this process's end of writing shards from every process.

  None if process 0 writes everything.

  Args:
    config: reads `publish`, `store` and `trainer`.
    secret: key of the messages.
    copy: returns a copy of the published leaves of params, by path.
    params: params of the train state; may be abstract.
    client: client of the trainer's coordinator; None for a single process.
    process: number of this process.
  """
  num_processes = config.trainer.num_processes
  specs = version.specs_of(jax.eval_shape(copy, params))
  name = carrier.choose_carrier(config, version.num_bytes(specs))
  if client is None or name != "orbax":
    return None
  settings = {"secret": secret, "deadline_s": config.store.deadline_s}
  if process == 0:
    return Leader(client, num_processes, **settings)
  return Helper(client, process, copy, **settings)
