# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A pool of worker processes that judge completions and may be killed.

Each worker has one request at a time. Where no answer comes before the
deadline, the worker is killed with all that it started (its process group), and
the next request gets a new one.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
import json
import os
import queue
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from typing import Any, BinaryIO

import ml_collections

from tba_jax.rewards import judges
from tba_jax.tasks import base

# JSON messages over pipes, with deadlines: four bytes of length, then text.


_HEADER = struct.Struct(">I")
_MAX_BYTES = 64 << 20


class BrokenPipe(Exception):
  """The other side is gone, or says what is no message."""


class LateReply(Exception):
  """The deadline passed."""


def write_frame(stream: BinaryIO, message: Any) -> None:
  """Writes a message; waits as long as the other side does not read."""
  data = json.dumps(message).encode()
  stream.write(_HEADER.pack(len(data)) + data)
  stream.flush()


def read_frame(stream: BinaryIO) -> Any:
  """Waits for a message and returns it; None where the other side closed."""
  header = stream.read(_HEADER.size)
  if len(header) < _HEADER.size:
    return None
  return json.loads(stream.read(*_HEADER.unpack(header)))


def send_message(fd: int, message: Any, deadline: float) -> None:
  """Writes a message to a pipe that does not block.

  Args:
    fd: of the pipe, set to not block.
    message: plain enough for JSON.
    deadline: by `time.monotonic()`.

  Raises:
    Late: the other side did not read in time.
    Broken: it is gone.
  """
  data = json.dumps(message).encode()
  left = memoryview(_HEADER.pack(len(data)) + data)
  while left:
    _wait(fd, select.POLLOUT, deadline)
    try:
      left = left[os.write(fd, left) :]
    except BlockingIOError:
      continue
    except OSError as error:
      raise BrokenPipe(str(error)) from error


def receive_message(fd: int, deadline: float) -> Any:
  """Returns the next message of a pipe; args and errors as of `send`."""
  (length,) = _HEADER.unpack(_read_exactly(fd, _HEADER.size, deadline))
  if length > _MAX_BYTES:
    raise BrokenPipe(f"a message of {length} bytes")
  try:
    return json.loads(_read_exactly(fd, length, deadline))
  except ValueError as error:
    raise BrokenPipe(str(error)) from error


def _read_exactly(fd: int, size: int, deadline: float) -> bytes:
  data = b""
  while len(data) < size:
    _wait(fd, select.POLLIN, deadline)
    try:
      chunk = os.read(fd, size - len(data))
    except BlockingIOError:
      continue
    if not chunk:
      raise BrokenPipe("it ended")
    data += chunk
  return data


def _wait(fd: int, what: int, deadline: float) -> None:
  left_s = deadline - time.monotonic()
  poll = select.poll()
  poll.register(fd, what)
  if left_s <= 0 or not poll.poll(left_s * 1000):
    raise LateReply()


_END_S = 2.0
_COMMAND = ("-m", "tba_jax.rewards.worker")


class Pool(judges.Judge):
  """Judges in `num_workers` processes, started when they are first needed."""

  def __init__(
      self,
      task_fields: Mapping[str, Any],
      *,
      num_workers: int,
      deadline_s: float,
      start_deadline_s: float,
      memory_mb: int,
      fallback: float,
      on_event: judges.OnEvent | None = None,
      index_of: Callable[[str, int], int] = lambda split, index: index,
      command: Sequence[str] = _COMMAND,
  ):
    """Takes the settings.

    Args:
      task_fields: `config.task` as a plain mapping; each worker builds the task
        from it.
      num_workers: processes, at least 1.
      deadline_s: of one completion, from when a worker has it.
      start_deadline_s: of a worker's start, the task's making included.
      memory_mb: address space of a worker; 0 = not limited.
      fallback, on_event: as `Judge` has them.
      index_of: from (split, index) of a request to the index that the workers'
        task has for the prompt.
      command: Python's arguments for a worker.
    """
    super().__init__(fallback=fallback, on_event=on_event)
    self._hello = {"task": dict(task_fields), "memory_mb": memory_mb}
    self._command = command
    self._index_of = index_of
    self._deadline_s = deadline_s
    self._start_deadline_s = start_deadline_s
    # A worker dies with the thread that started it: these live as the pool.
    self._threads = futures.ThreadPoolExecutor(num_workers, "reward")
    self._idle: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
    for _ in range(num_workers):
      self._idle.put(None)
    self._workers: set[_Worker] = set()
    self._workers_lock = threading.Lock()

  def _judge(self, requests: Sequence[judges.Request]) -> list[base.Judgement]:
    return list(self._threads.map(self._judge_one, requests))

  def _explain(self, requests: Sequence[judges.Request]) -> list[str]:
    # One that hangs must not cost the deadline once for each of the others.
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
    answer = self._ask("judge", request)
    if answer.get("failure"):
      return self._failed(request, answer["failure"], answer["message"])
    return self._checked(
        request,
        base.Judgement(answer["reward"], answer["key"], answer["parts"]),
    )

  def _ask(self, what: str, request: judges.Request) -> dict[str, Any]:
    """Returns a worker's answer, or `failure` and `message`."""
    # As many threads as places: one is always free.
    worker = self._idle.get_nowait()
    try:
      if worker is None:
        try:
          worker = self._start()
        except (LateReply, BrokenPipe, OSError) as error:
          return {"failure": "start", "message": repr(error)}
      return worker.ask(
          [
              what,
              request.split,
              self._index_of(request.split, request.index),
              request.completion,
          ],
          self._deadline_s,
      )
    except LateReply:
      self._end(worker)
      worker = None
      message = f"no answer in {self._deadline_s:g} s"
      return {"failure": "deadline", "message": message}
    except BrokenPipe as error:
      status = worker.status()
      self._end(worker)
      worker = None
      return {"failure": "crash", "message": f"{error}, status {status}"}
    finally:
      self._idle.put(worker)

  def _start(self) -> "_Worker":
    worker = _Worker(self._command)
    with self._workers_lock:
      self._workers.add(worker)
    try:
      worker.greet(self._hello, self._start_deadline_s)
    except BaseException:
      self._end(worker)
      raise
    return worker

  def _end(self, worker: "_Worker") -> None:
    with self._workers_lock:
      self._workers.discard(worker)
    worker.kill()

  def close(self) -> None:
    """Kills the workers and waits for their ends."""
    self._threads.shutdown(wait=False, cancel_futures=True)
    with self._workers_lock:
      workers, self._workers = self._workers, set()
    for worker in workers:
      worker.kill()


class _Worker:
  """One process, and the pipes to it."""

  def __init__(self, command: Sequence[str]):
    self._process = subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # A group of its own, so that what it starts ends with it.
        start_new_session=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    self._to = self._process.stdin.fileno()
    self._from = self._process.stdout.fileno()
    os.set_blocking(self._to, False)
    os.set_blocking(self._from, False)

  def greet(self, hello: dict[str, Any], timeout_s: float) -> None:
    answer = self._exchange(hello, timeout_s)
    if "error" in answer:
      raise BrokenPipe(answer["error"])

  def ask(self, request: list[Any], timeout_s: float) -> dict[str, Any]:
    return self._exchange(request, timeout_s)

  def _exchange(self, message: Any, timeout_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    send_message(self._to, message, deadline)
    answer = receive_message(self._from, deadline)
    if not isinstance(answer, dict):
      raise BrokenPipe("an answer that is no object")
    return answer

  def status(self) -> int | None:
    """Returns how the process ended; None where it has not."""
    try:
      return self._process.wait(_END_S)
    except subprocess.TimeoutExpired:
      return None

  def kill(self) -> None:
    try:
      os.killpg(self._process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
      pass  # It has ended, and nothing is left of its group.
    try:
      self._process.wait(_END_S)
    except subprocess.TimeoutExpired:
      pass  # In the kernel; it ends when that lets it go.
    for pipe in (self._process.stdin, self._process.stdout):
      pipe.close()


# From `config.reward` to a judge.


WHERE = ("process", "pool", "model")


def make_judge(
    config: ml_collections.ConfigDict,
    task: base.Task,
    on_event: judges.OnEvent | None = None,
) -> judges.Judge:
  """Returns the judge of the task's own reward.

  Args:
    config: reads `reward` and, for a pool, `task`.
    task: judges in this process where `reward.where` says so.
    on_event: receives what failed.
  """
  c = config.reward
  if c.where != "pool":
    return judges.InProcess(task, fallback=c.fallback, on_event=on_event)
  return Pool(
      config.task.to_dict(),
      num_workers=c.num_workers,
      deadline_s=c.deadline_s,
      start_deadline_s=c.start_deadline_s,
      memory_mb=c.memory_mb,
      fallback=c.fallback,
      on_event=on_event,
      index_of=task.source_index,
  )
