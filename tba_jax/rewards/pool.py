# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A pool of sandboxed worker processes that judge completions.

Each worker serves one request at a time. After a missed deadline it is killed
with all that it started, and the next request gets a new worker. Messages are
JSON over pipes: four bytes of length, then the text.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
import json
import os
import pathlib
import queue
import shlex
import shutil
import struct
import sys
import tempfile
import threading
import time
from typing import Any, BinaryIO

import ml_collections

from tba_jax.config import load
from tba_jax.config import settings
from tba_jax.models import hf_hub
from tba_jax.rewards import child
from tba_jax.rewards import judges
from tba_jax.system import processes
from tba_jax.system import sandbox
from tba_jax.tasks import base

_HEADER = struct.Struct(">I")
_MAX_BYTES = 64 << 20
_START_DEADLINE_S = 60.0
_WORKER = ("-m", "tba_jax.rewards.worker")
STDERR = "stderr"  # in a worker's directory
_SOURCES = frozenset(("data", "test", "train", "validation"))  # fields of tasks
_SEES = (
    "a worker sees the files of its task and those of config.reward.readable"
)


def write_frame(stream: BinaryIO, message: Any) -> None:
  """Writes a message; blocks while the other side does not read."""
  stream.write(_frame(message))
  stream.flush()


def read_frame(stream: BinaryIO) -> Any:
  """Waits for a message; returns None once the other side has closed."""
  header = stream.read(_HEADER.size)
  if len(header) < _HEADER.size:
    return None
  return json.loads(stream.read(*_HEADER.unpack(header)))


def _frame(message: Any) -> bytes:
  data = json.dumps(message).encode()
  return _HEADER.pack(len(data)) + data


class Pool(judges.Judge):
  """Judges in worker processes that are started when first needed."""

  def __init__(
      self,
      task_fields: Mapping[str, Any],
      config_reward: ml_collections.ConfigDict,
      *,
      index_of: Callable[[str, int], int] = lambda split, index: index,
      on_event: judges.OnEvent | None = None,
      hidden: Sequence[str] = (),
      command: Sequence[str] = _WORKER,
  ):
    """Starts the threads, one per worker; tells what is not confined.

    Args:
      task_fields: `config.task`; each worker builds the task from it.
      config_reward: `config.reward`.
      index_of: function from (split, index) of a request to the prompt's index
        in the workers' task.
      on_event: event sink, see `Judge`.
      hidden: paths that workers must not see.
      command: Python's arguments for a worker.
    """
    super().__init__(fallback=config_reward.fallback, on_event=on_event)
    self._task_fields = dict(task_fields)
    self._config = config_reward
    self._index_of = index_of
    self._command = command
    self._box = make_box(self._task_fields, config_reward, hidden)
    if on_event is not None and self._box.missing:
      on_event("sandbox_limited", self._box.warning())
    count = config_reward.num_workers
    # A worker dies with the thread that started it, so threads last as long.
    self._threads = futures.ThreadPoolExecutor(count, "reward")
    self._idle: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
    for _ in range(count):
      self._idle.put(None)
    self._workers: set[_Worker] = set()
    self._workers_lock = threading.Lock()

  def _judge(self, requests: Sequence[judges.Request]) -> list[base.Judgement]:
    return list(self._threads.map(self._judge_one, requests))

  def _explain(self, requests: Sequence[judges.Request]) -> list[str]:
    # Several hanging explanations cost the deadline once.
    late = threading.Event()

    def one(request: judges.Request) -> str:
      if late.is_set():
        return judges.no_reason("another one was late")
      answer = self._ask("explain", request)
      if answer.get("failure") == "deadline":
        late.set()
      if answer.get("failure"):
        return judges.no_reason(f"{answer['failure']}, {answer['message']}")
      return answer["reason"]

    return list(self._threads.map(one, requests))

  def _judge_one(self, request: judges.Request) -> base.Judgement:
    what = "judge" if request.stopped else "judge_cut_off"
    answer = self._ask(what, request)
    if answer.get("failure"):
      return self._failed(request, answer["failure"], answer["message"])
    return self._checked(
        request,
        base.Judgement(answer["reward"], answer["key"], answer["parts"]),
    )

  def _ask(self, what: str, request: judges.Request) -> dict[str, Any]:
    """Returns a worker's answer, or `failure` and `message`."""
    worker = self._idle.get_nowait()  # Every thread has a worker.
    deadline_s = self._config.deadline_s
    try:
      if worker is None:
        try:
          worker = self._start()
        except (child.LateReply, child.BrokenPipe, OSError) as error:
          return {"failure": "start", "message": repr(error)}
      index = self._index_of(request.split, request.index)
      return worker.exchange(
          [what, request.split, index, request.completion], deadline_s
      )
    except child.LateReply:
      self._end(worker)
      worker = None
      message = f"no answer in {deadline_s:g} s"
      return {"failure": "deadline", "message": message}
    except child.BrokenPipe as error:
      status, said = worker.status(), worker.last_words()
      self._end(worker)
      worker = None
      return {"failure": "crash", "message": f"{error}, status {status} {said}"}
    finally:
      self._idle.put(worker)

  def _start(self) -> "_Worker":
    passed = [n.strip() for n in self._config.environment.split(",")]
    worker = _Worker(self._command, passed, self._box)
    with self._workers_lock:
      self._workers.add(worker)
    try:
      hello = {
          "task": self._task_fields,
          "links": _cached_data(self._task_fields),
          "memory_mb": self._config.memory_mb,
          "sandbox": self._box.arguments(worker.home, worker.pid),
      }
      answer = worker.exchange(hello, _START_DEADLINE_S)
      if "error" in answer:
        sees = "" if self._box.reason else f"; {_SEES}"
        raise child.BrokenPipe(answer["error"] + sees)
      worker.uid = answer["uid"]
    except BaseException:
      self._end(worker)
      raise
    return worker

  def _end(self, worker: "_Worker") -> None:
    with self._workers_lock:
      self._workers.discard(worker)
    worker.kill()

  def close(self) -> None:
    """Kills the workers and waits until they have exited."""
    self._threads.shutdown(wait=False, cancel_futures=True)
    with self._workers_lock:
      workers, self._workers = self._workers, set()
    for worker in workers:
      worker.kill()


class _Worker(child.Child):
  """A worker process with a directory of its own.

  home: temporary directory.
  """

  def __init__(
      self, command: Sequence[str], passed: Sequence[str], box: sandbox.Box
  ):
    self._folder = tempfile.TemporaryDirectory(
        prefix="reward-", ignore_cleanup_errors=True
    )
    self.home = self._folder.name
    # A file in its directory, where file sizes are limited.
    with open(os.path.join(self.home, STDERR), "wb") as stderr:
      super().__init__(
          box.command([sys.executable, *command], self.home),
          {"HF_HUB_OFFLINE": "1", **sandbox.environment(self.home, passed)},
          stderr,
      )

  def exchange(self, message: Any, timeout_s: float) -> dict[str, Any]:
    """Sends a message and returns the answer; raises as `Child.write`."""
    deadline = time.monotonic() + timeout_s
    self.write(_frame(message), deadline)
    (length,) = _HEADER.unpack(self._read_exactly(_HEADER.size, deadline))
    if length > _MAX_BYTES:
      raise child.BrokenPipe(f"a message of {length} bytes")
    try:
      answer = json.loads(self._read_exactly(length, deadline))
    except ValueError as error:
      raise child.BrokenPipe(str(error)) from error
    if not isinstance(answer, dict):
      raise child.BrokenPipe("an answer that is not an object")
    return answer

  def _read_exactly(self, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
      data += self.read(size - len(data), deadline)
    return data

  def last_words(self) -> str:
    """Returns the end of its standard error."""
    try:
      with pathlib.Path(self.home, STDERR).open("rb") as f:
        f.seek(max(0, f.seek(0, os.SEEK_END) - 200))
        return f.read().decode("utf-8", "replace").strip()
    except OSError:
      return ""

  def kill(self) -> None:
    super().kill()
    self._folder.cleanup()


def _cached_data(fields: Mapping[str, Any]) -> dict[str, str]:
  """Returns where the caches of a worker's home have a task's data of the hub.

  As {path below the home: folder}; the worker may have no network.
  """
  out = {}
  for name in _SOURCES.intersection(fields):
    repo = hf_hub.data_name(str(fields[name]).partition("[")[0])
    if repo is not None:
      out |= hf_hub.cache_folders(repo[0])
  return {f".cache/huggingface/{path}": real for path, real in out.items()}


def make_box(
    task_fields: Mapping[str, Any],
    config_reward: ml_collections.ConfigDict,
    hidden: Sequence[str] = (),
) -> sandbox.Box:
  """Returns how workers are confined here, after a trial.

  They see what the task's fields and `readable` name, and what lies beside a
  file with rewards.
  """
  readable = load.listed_paths(config_reward.readable)
  shown = list(_cached_data(task_fields).values())
  for name, value in task_fields.items():
    if not isinstance(value, str):
      continue
    if name == "verifier":
      readable += load.paths_in(value)
      shown += _programs(value)
    elif settings.names_files(f"task.{name}"):
      shown += load.paths_in(value)
    elif os.path.exists(value):  # Field of a user's task.
      shown.append(os.path.abspath(value))
  folders = [
      os.path.dirname(path)
      for path in (*readable, *shown)
      if path.endswith(".py")
  ]
  return sandbox.make_box(
      readable, shown, folders, hidden, network=config_reward.network
  )


def _programs(command: str) -> list[str]:
  """Returns the file of a command's program, and the file it links to."""
  try:
    path = shutil.which(shlex.split(command)[0])
  except (ValueError, IndexError):
    return []
  return [path, os.path.realpath(path)] if path else []


def warning(config: ml_collections.ConfigDict) -> str:
  """Returns what reward code can do here beyond its task, or ""."""
  if config.reward.where != "pool":
    return ""
  return make_box(config.task.to_dict(), config.reward).warning()


def hidden_paths(
    config: ml_collections.ConfigDict, workdir: str | pathlib.Path
) -> list[str]:
  """Returns the paths of a run that are hidden from its workers."""
  store = config.store
  paths = [
      str(workdir),
      str(processes.private_directory()),
      store.spool_dir,
      store.secret_file,
      store.tls_key_file,
  ]
  return [
      os.path.abspath(os.path.expanduser(path))
      for path in paths
      if path and "://" not in path
  ]


def make_judge(
    config: ml_collections.ConfigDict,
    workdir: str | pathlib.Path,
    task: base.Task,
    on_event: judges.OnEvent | None = None,
) -> judges.Judge:
  """Returns the judge by the task's own reward, in process or in a pool.

  Workers of a pool do not see `workdir`.
  """
  if config.reward.where == "pool":
    return Pool(
        config.task.to_dict(),
        config.reward,
        index_of=task.source_index,
        on_event=on_event,
        hidden=hidden_paths(config, workdir),
    )
  return judges.InProcess(
      task, fallback=config.reward.fallback, on_event=on_event
  )
