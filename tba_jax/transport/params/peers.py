# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Shards of a version from every process of the trainer.

Process 0 (`Leader`) asks the others (`Helper`) to make their shards readable,
through the key-value store of the trainer's coordinator, in background threads.
Each answers with a part of the manifest.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
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
from tba_jax.transport.params import carriers
from tba_jax.transport.params import network
from tba_jax.transport.params import orbax_shards
from tba_jax.transport.params import pace as pace_lib
from tba_jax.transport.params import version

# (tag, leaves, path, tags to keep) -> part of the manifest.
Write = Callable[[str, Mapping[str, Any], str, Sequence[str]], dict[str, Any]]

_PREFIX = "tba_shards"
# Longest wait in the coordinator's client, which cannot be interrupted.
_POLL_S = 1.0


class Leader:
  """Process 0's end: asks the other processes for their shards.

  Args:
    client: connected to the trainer's coordinator.
    num_processes: number of the trainer's processes.
    pace: deadlines for the other processes to write a version.
  """

  def __init__(
      self,
      client: jax_kv.Client,
      num_processes: int,
      *,
      secret: bytes,
      pace: pace_lib.Pace,
  ):
    self._client = client
    self._followers = range(1, num_processes)
    self._secret = secret
    self._pace = pace
    self._count = -1
    self._tag = ""
    self._began = 0.0

  def begin(
      self, tag: str, *, path: str = "", keep: Sequence[str] = ()
  ) -> None:
    """Asks the other processes to write their shards of a version.

    Args:
      path: folder to write to; "" for the network.
      keep: tags of the versions to keep serving.
    """
    self._count += 1
    self._tag = tag
    self._began = time.monotonic()
    message = {"tag": tag, "path": path, "keep": list(keep)}
    for process in self._followers:
      self._client.key_value_set_bytes(
          _ask_key(process, self._count),
          wire.encode_message(message, self._secret),
      )

  def collect(self, num_bytes: float) -> list[dict[str, Any]]:
    """Waits for the other processes; returns each one's part of the manifest.

    Args:
      num_bytes: approximate bytes that each process has to write.

    Raises:
      OSError: a process failed or was late; the error names it.
    """
    deadline_s = self._pace.deadline_s(num_bytes)
    parts = [self._answer(process, deadline_s) for process in self._followers]
    self._pace.done(num_bytes, time.monotonic() - self._began)
    return parts

  def close(self) -> None:
    """Does nothing; for symmetry with `Helper`."""

  def _answer(self, process: int, deadline_s: float) -> dict[str, Any]:
    key = _answer_key(process, self._count)
    left_s = self._began + deadline_s - time.monotonic()
    left_ms = int(1e3 * max(left_s, 0.001))
    try:
      data = self._client.blocking_key_value_get_bytes(key, left_ms)
      self._client.key_value_delete(key)
      answer = wire.decode_message(
          data, self._secret, {"error": str, "part": dict}
      )
    except (jax_kv.KvError, wire.WireError) as error:
      self._pace.missed()
      raise OSError(
          f"process {process} of the trainer has not written its shards of"
          f" version {self._tag} within {deadline_s:.0f} s: {error}"
      ) from error
    if answer["error"]:
      raise OSError(f"process {process} of the trainer: {answer['error']}")
    return answer["part"]


class Helper:
  """End of a process other than 0: writes the shards that process 0 requests.

  Args:
    client: connected to the trainer's coordinator.
    copy: returns a copy of the published leaves of params, by path.
    write: makes leaves readable: (tag, leaves, path, tags to keep) -> part.
    deadline_s: time for a requested version to be submitted.
  """

  def __init__(
      self,
      client: jax_kv.Client,
      process: int,
      copy: Callable[[Any], Mapping[str, Any]],
      write: Write,
      *,
      secret: bytes,
      deadline_s: float,
  ):
    self._client = client
    self._process = process
    self._copy = copy
    self._write_part = write
    self._secret = secret
    self._deadline_s = deadline_s
    # Copies in order of submission, the order in which process 0 requests them.
    self._copies: list[_Copy] = []
    self._changed = threading.Condition()
    # Long enough for a thread that is writing.
    close_s = max(deadline_s, 2 * _POLL_S)
    self._worker = background.Thread("shards", self._run, close_s=close_s)

  def submit(self, version: int, params: Any) -> None:
    """Keeps a copy of a version on devices until it is written.

    Raises the writing thread's error, if any.
    """
    self._worker.check()
    leaves = self._copy(params)
    with self._changed:
      self._copies = [copy for copy in self._copies if not copy.is_written]
      self._copies.append(_Copy(version, leaves))
      self._changed.notify_all()

  def forget(self, version: int) -> None:
    """Drops the oldest copy of a version that process 0 will not request."""
    with self._changed:
      self._copies.remove(self._find(version))

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
      # The coordinator is lost; the role will notice by itself.
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
    answer = {"error": "", "part": {}}
    try:
      answer["part"] = self._write(data)
    except Exception as error:  # Process 0 raises it.
      answer["error"] = f"its shards could not be written: {error}"
    self._client.key_value_set_bytes(
        _answer_key(self._process, count),
        wire.encode_message(answer, self._secret),
    )
    self._client.key_value_delete(key)
    return True

  def _write(self, data: bytes) -> dict[str, Any]:
    schema = {"tag": str, "path": str, "keep": [str]}
    request = wire.decode_message(data, self._secret, schema)
    version = int(request["tag"].rpartition(".")[2])
    with self._changed:
      copy = self._changed.wait_for(
          lambda: self._find(version), self._deadline_s
      )
      if copy is None:
        raise TimeoutError(f"version {version} was not submitted")
    part = self._write_part(
        request["tag"], copy.leaves, request["path"], request["keep"]
    )
    # Kept until the next version: if another process fails, all try again.
    copy.is_written = True
    return part

  def _find(self, version: int) -> "_Copy | None":
    """Returns the copy of a version that is written next, under the lock."""
    copies = [copy for copy in self._copies if copy.version == version]
    # A version may be published twice; the copy not yet written is next.
    return min(copies, key=lambda copy: copy.is_written, default=None)


@dataclasses.dataclass(eq=False)
class _Copy:
  """A version on a helper's devices."""

  version: int
  leaves: Mapping[str, Any]
  is_written: bool = False


def _ask_key(process: int, count: int) -> str:
  return f"{_PREFIX}/ask/{process}/{count:012d}"


def _answer_key(process: int, count: int) -> str:
  return f"{_PREFIX}/done/{process}/{count:012d}"


class _Serving:
  """A helper's server of its shards, for the carrier "network"."""

  def __init__(self, config: ml_collections.ConfigDict, run: wire.RunIdentity):
    self._config = config
    self._run = run
    self._server: network.ParamsServer | None = None
    # Tag -> salt of the versions that are served.
    self._salts: dict[str, str] = {}

  def write(
      self,
      tag: str,
      leaves: Mapping[str, Any],
      path: str,
      keep: Sequence[str],
  ) -> dict[str, Any]:
    del path
    if self._server is None:
      self._server = network.ParamsServer(
          carrier.serve_address(self._config),
          run_id=self._run.run_id,
          secret=self._run.secret,
          stall_s=self._config.store.deadline_s,
      )
    part = self._server.add(tag, leaves)
    salts = {**self._salts, tag: part["salt"]}
    self._salts = {tag: salts[tag] for tag in keep if tag in salts}
    self._server.keep(list(self._salts.values()))
    return part


def _write_folder(
    tag: str, leaves: Mapping[str, Any], path: str, keep: Sequence[str]
) -> dict[str, Any]:
  """Writes shards for the carrier "orbax"."""
  del tag, keep
  return {"shards": orbax_shards.write_folder(epath.Path(path), leaves)}


def make_peers(
    config: ml_collections.ConfigDict,
    run: wire.RunIdentity,
    copy: Callable[[types.PyTree], dict[str, Any]],
    params: types.PyTree,
    *,
    client: jax_kv.Client | None,
    process: int,
) -> Leader | Helper | None:
  """Returns this process's `Leader` or `Helper` for writing shards.

  None if process 0 writes everything.

  Args:
    config: reads `publish`, `store` and `trainer`.
    copy: returns a copy of the published leaves of params, by path.
    params: train state params; may be abstract.
    client: connected to the trainer's coordinator; None for a single process.
  """
  num_processes = config.trainer.num_processes
  specs = version.specs_of(jax.eval_shape(copy, params))
  name = carrier.choose_carrier(config, version.num_bytes(specs))
  if client is None or not carriers.CARRIERS[name].moves_shards:
    return None
  deadline_s = config.store.deadline_s
  if process == 0:
    pace = pace_lib.Pace(deadline_s)
    return Leader(client, num_processes, secret=run.secret, pace=pace)
  write = _write_folder if name == "orbax" else _Serving(config, run).write
  return Helper(
      client, process, copy, write, secret=run.secret, deadline_s=deadline_s
  )
