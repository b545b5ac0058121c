# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A pool of sandboxed worker processes that judge completions.

Each worker serves one request at a time. After a missed deadline it is killed
with all that it started, and the next request gets a new worker.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
import contextlib
import json
import os
import pathlib
import queue
import shlex
import shutil
import sys
import tempfile
import threading
import time
from typing import Any

import ml_collections

from tba_jax.config import load
from tba_jax.config import settings
from tba_jax.models import hf_hub
from tba_jax.rewards import child
from tba_jax.rewards import judges
from tba_jax.system import frames
from tba_jax.system import processes
from tba_jax.system import sandbox
from tba_jax.tasks import base
from tba_jax.tasks import build as tasks_build

_MAX_BYTES = 64 << 20
_START_DEADLINE_S = 60.0
# Seconds within which a process that was killed is gone.
_KILL_S = 30.0
_WORKER = ("-m", "tba_jax.rewards.worker")
_ENVIRONMENT = ("-m", "tba_jax.rewards.environment_worker")
STDERR = "stderr"  # in a worker's directory
_SOURCES = frozenset(("data", "test", "train", "validation"))  # fields of tasks
_SEES = (
    "a worker sees the files of its task and those of config.reward.readable"
)


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
    super().__init__(on_event=on_event)
    self._config = config_reward
    self._index_of = index_of
    fields = dict(task_fields)
    self._workers = Workers(
        {"task": fields, "links": _cached_data(fields)},
        config_reward,
        make_box(fields, config_reward, hidden),
        on_event=on_event,
        command=command,
    )
    self._threads = self._workers.threads

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
    index = self._index_of(request.split, request.index)
    with self._workers.hold() as ask:
      return ask([what, request.split, index, request.completion])

  def close(self) -> None:
    """Kills the workers and waits until they have exited."""
    self._workers.close()


# Message -> a worker's answer, or `failure` and `message`.
AskFn = Callable[[Any], dict[str, Any]]


class Workers:
  """Worker processes that are started when first needed.

  threads: executor of as many threads as workers.
  longest_s: most seconds of a worker's answer, with the start of a process.
  """

  def __init__(
      self,
      hello: Mapping[str, Any],
      config_reward: ml_collections.ConfigDict,
      box: sandbox.Box,
      *,
      on_event: judges.OnEvent | None,
      command: Sequence[str],
  ):
    """Starts the threads, one per worker; tells what is not confined.

    Args:
      hello: fields of a worker's first message.
      config_reward: `config.reward`.
      box: confinement of the workers.
      on_event: event sink, see `Judge`.
      command: Python's arguments for a worker.
    """
    self._hello = hello
    self._config = config_reward
    self._box = box
    self._command = command
    if on_event is not None and box.missing:
      on_event("sandbox_limited", box.warning())
    self.longest_s = _START_DEADLINE_S + config_reward.deadline_s + _KILL_S
    count = config_reward.num_workers
    # A worker dies with the thread that started it, so threads last as long.
    self.threads = futures.ThreadPoolExecutor(count, "reward")
    self._idle: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()
    for _ in range(count):
      self._idle.put(None)
    self._workers: set[Worker] = set()
    self._workers_lock = threading.Lock()

  @contextlib.contextmanager
  def hold(self) -> Iterator[AskFn]:
    """Yields a function that asks one worker, for one of `threads`.

    After a failure the function asks a new worker.
    """
    worker = self._idle.get_nowait()  # Every thread has a worker.
    deadline_s = self._config.deadline_s

    def ask(message: Any) -> dict[str, Any]:
      nonlocal worker
      if worker is None:
        try:
          worker = self._start()
        except (child.LateReply, child.BrokenPipe, OSError) as error:
          return {"failure": "start", "message": repr(error)}
      try:
        return worker.exchange(message, deadline_s)
      except child.LateReply:
        self._end(worker)
        worker = None
        message = f"no answer in {deadline_s:g} s"
        return {"failure": "deadline", "message": message}
      except child.BrokenPipe as error:
        status, said = worker.status(), worker.last_words()
        self._end(worker)
        worker = None
        message = f"{error}, status {status} {said}"
        return {"failure": "crash", "message": message}

    try:
      yield ask
    finally:
      self._idle.put(worker)

  def _start(self) -> "Worker":
    passed = [n.strip() for n in self._config.environment.split(",")]
    worker = Worker(self._command, passed, self._box)
    with self._workers_lock:
      self._workers.add(worker)
    try:
      hello = {
          **self._hello,
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

  def _end(self, worker: "Worker") -> None:
    with self._workers_lock:
      self._workers.discard(worker)
    worker.kill()

  def close(self) -> None:
    """Kills the workers and waits until they have exited."""
    self.threads.shutdown(wait=False, cancel_futures=True)
    with self._workers_lock:
      workers, self._workers = self._workers, set()
    for worker in workers:
      worker.kill()


class Worker(child.Child):
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
    self.write(frames.pack(message), deadline)
    (length,) = frames.HEADER.unpack(
        self._read_exactly(frames.HEADER.size, deadline)
    )
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
  return judges.InProcess(task, on_event=on_event)


def make_environments(
    config: ml_collections.ConfigDict,
    workdir: str | pathlib.Path,
    on_event: judges.OnEvent | None,
) -> Workers:
  """Returns the processes of `config.task.source`, which do not see `workdir`.

  There are up to `reward.num_workers`.
  """
  hidden = hidden_paths(config, workdir)
  task = tasks_build.with_defaults(config.task.to_dict())
  return Workers(
      {name: task[name] for name in ("source", "opponent")},
      config.reward,
      make_box(config.task.to_dict(), config.reward, hidden),
      on_event=on_event,
      command=_ENVIRONMENT,
  )
