# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A pool of sandboxed worker processes that judge completions.

Each worker serves one request at a time, in a process of the completion
(`system/keeper.py`). A worker that does not answer, or not to this request, is
killed with all that it started, and the next request gets a new one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
import contextlib
import functools
import hmac
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

from tba_jax.models import hf_hub
from tba_jax.rewards import child
from tba_jax.rewards import judges
from tba_jax.rewards import settings as settings_lib
from tba_jax.system import frames
from tba_jax.system import keeper
from tba_jax.system import named_paths
from tba_jax.system import processes
from tba_jax.system import sandbox
from tba_jax.tasks import base
from tba_jax.tasks import build as tasks_build
from tba_jax.tasks import settings as task_settings

_START_DEADLINE_S = 60.0
# Seconds for a worker to end what has missed its deadline.
_GRACE_S = 15.0
# Seconds within which a process that was killed is gone.
_KILL_S = 30.0
_WORKER = ("-m", "tba_jax.rewards.worker")
_ENVIRONMENT = ("-m", "tba_jax.rewards.environment_worker")
_SOURCES = frozenset(("data", "test", "train", "validation"))  # fields of tasks
_THREADS = (
    "; it had {} threads before it forked, which the fork has not: start them"
    " when they are first used"
)
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
      judges_groups: bool = False,
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
      judges_groups: whether a request has the completions of a prompt.
      on_event: event sink, see `Judge`.
      hidden: paths that workers must not see.
      command: Python's arguments for a worker.
    """
    super().__init__(on_event=on_event)
    self._config = config_reward
    self._index_of = index_of
    self._judges_groups = judges_groups
    fields = dict(task_fields)
    self._workers = Workers(
        {"task": fields},
        config_reward,
        make_box(fields, config_reward, hidden),
        links=_cached_data(fields),
        on_event=on_event,
        command=command,
    )
    self._threads = self._workers.threads

  def _judge(self, requests: Sequence[judges.Request]) -> list[base.Judgement]:
    if self._judges_groups:
      judged = self._threads.map(self._judge_group, judges.of_groups(requests))
      return [one for group in judged for one in group]
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
    return self._judgement(request, self._ask(what, request))

  def _judge_group(
      self, group: Sequence[judges.Request]
  ) -> list[base.Judgement]:
    texts = [request.completion for request in group]
    answer = self._ask("judge_group", group[0], texts)
    # A failure of the worker, such as a deadline, is of all of them.
    answers = answer.get("group", [answer] * len(group))
    return [self._judgement(*one) for one in zip(group, answers, strict=True)]

  def _judgement(
      self, request: judges.Request, answer: Mapping[str, Any]
  ) -> base.Judgement:
    if answer.get("failure"):
      return self._failed(request, answer["failure"], answer["message"])
    return self._checked(
        request,
        base.Judgement(answer["reward"], answer["key"], answer["parts"]),
    )

  def _ask(
      self,
      what: str,
      request: judges.Request,
      completions: Sequence[str] | None = None,
  ) -> dict[str, Any]:
    """Returns a worker's answer, or `failure` and `message`."""
    index = self._index_of(request.split, request.index)
    texts = request.completion if completions is None else completions
    with self._workers.hold() as ask:
      return ask([what, request.split, index, texts])

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
      links: Mapping[str, str],
      on_event: judges.OnEvent | None,
      command: Sequence[str],
  ):
    """Starts the threads, one per worker; tells what is not confined.

    Args:
      hello: fields of a worker's first message.
      config_reward: `config.reward`.
      box: confinement of the workers.
      links: links in a completion's directory, {path in it: folder}.
      on_event: event sink, see `Judge`.
      command: Python's arguments for a worker.
    """
    self._hello = {
        **hello,
        "links": dict(links),
        "memory_mb": config_reward.memory_mb,
        "deadline_s": config_reward.deadline_s,
    }
    self._config = config_reward
    self._box = box
    self._command = command
    if on_event is not None and box.missing:
      on_event("sandbox_limited", box.warning())
    self._deadline_s = config_reward.deadline_s + _GRACE_S
    self.longest_s = _START_DEADLINE_S + self._deadline_s + _KILL_S
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

    After a failure the function may ask a new worker.
    """
    worker = self._idle.get_nowait()  # Every thread has a worker.

    def ask(message: Any) -> dict[str, Any]:
      nonlocal worker
      flag, answer = keeper.RETRY, {}
      while flag == keeper.RETRY:
        if worker is None:
          try:
            worker = self._start()
          except (child.LateReply, child.BrokenPipe, OSError) as error:
            return {"failure": "start", "message": repr(error)}
        try:
          flag, answer = worker.exchange(message, self._deadline_s)
        except child.LateReply:
          flag = keeper.LAST
          answer = _failure("deadline", f"no answer in {self._deadline_s:g} s")
        except child.BrokenPipe as error:
          flag, answer = keeper.LAST, _failure("crash", str(error))
        cause = answer.get("failure")
        if cause == "crash":
          answer["message"] += f" {worker.last_words()}"
        if cause == "deadline" and worker.num_threads > 1:
          answer["message"] += _THREADS.format(worker.num_threads)
        if flag != keeper.MORE:
          self._end(worker)
          worker = None
      return answer

    try:
      yield ask
    finally:
      self._idle.put(worker)

  def _start(self) -> "Worker":
    passed = [n.strip() for n in self._config.env_vars.split(",")]
    worker = Worker(self._command, passed, self._box)
    with self._workers_lock:
      self._workers.add(worker)
    try:
      hello = {**self._hello, "sandbox": self._box.arguments(worker.home)}
      _, answer = worker.exchange(hello, _START_DEADLINE_S)
      if "error" in answer:
        sees = "" if self._box.reason else f"; {_SEES}"
        raise child.BrokenPipe(answer["error"] + sees)
      worker.num_threads = answer["threads"]
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


def _failure(cause: str, message: str) -> dict[str, Any]:
  return {"failure": cause, "message": message}


class Worker(child.Child):
  """A worker process with a directory of its own.

  home: temporary directory.
  num_threads: threads that it has before it forks.
  """

  def __init__(
      self, command: Sequence[str], passed: Sequence[str], box: sandbox.Box
  ):
    self._folder = sandbox.Home()
    self.home = self._folder.path
    self.num_threads = 1
    # A file, where sizes are limited.
    self._stderr = tempfile.TemporaryFile(buffering=0)
    super().__init__(
        box.command([sys.executable, *command], self.home),
        {"HF_HUB_OFFLINE": "1", **sandbox.environment(self.home, passed)},
        self._stderr,
    )

  def exchange(
      self, message: Any, timeout_s: float
  ) -> tuple[bytes, dict[str, Any]]:
    """Sends a message; returns the flag and the answer, raises as `write`."""
    deadline = time.monotonic() + timeout_s
    nonce = frames.nonce()
    self.write(frames.pack(message) + nonce, deadline)
    read = functools.partial(self._read_exactly, deadline=deadline)
    try:
      if not hmac.compare_digest(read(len(nonce)), nonce):
        raise frames.FrameError("an answer that is not to this request")
      return read(1), frames.parse(frames.unpack(read))
    except frames.FrameError as error:
      raise child.BrokenPipe(str(error)) from error

  def _read_exactly(self, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
      data += self.read(size - len(data), deadline)
    return data

  def last_words(self) -> str:
    """Returns the end of its standard error."""
    descriptor = self._stderr.fileno()
    end = os.fstat(descriptor).st_size
    data = os.pread(descriptor, 200, max(0, end - 200))
    return data.decode("utf-8", "replace").strip()

  def kill(self) -> None:
    super().kill()
    self._folder.close()
    self._stderr.close()


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
  readable = settings_lib.listed_paths(config_reward.readable)
  shown = list(_cached_data(task_fields).values())
  for name, value in task_fields.items():
    if not isinstance(value, str):
      continue
    if name == "verifier":
      readable += named_paths.existing(value)
      shown += _programs(value)
    elif name in task_settings.NAMING_FILES:
      shown += named_paths.existing(value)
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
  if config.reward.backend != "pool":
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
  if config.reward.backend == "pool":
    return Pool(
        config.task.to_dict(),
        config.reward,
        index_of=task.source_index,
        # Loads functions, and so finds the folders of their modules.
        judges_groups=task.judges_groups,
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
      links={},
      on_event=on_event,
      command=_ENVIRONMENT,
  )
