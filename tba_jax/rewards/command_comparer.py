# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A judge of the user's own: a command that reads pairs and writes verdicts.

The command is started once and gets one JSON object a line on its standard
input, `{"prompt": …, "first": …, "second": …}`; for each it writes one line to
its standard output, a JSON object with `winner`: "first", "second" or "tie".
Which of the two is the policy's completion is decided by a coin that only the
prompt and the texts throw, so that a liking for one place cancels out.

A verdict that does not come before the deadline, or is none, costs that contest
and is counted by its cause; the command is killed with all that it started, and
the next contest gets a new one.
"""

from collections.abc import Sequence
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import time
import zlib

from tba_jax.rewards import comparers
from tba_jax.rewards import judges

_LEASH = ("-m", "tba_jax.rewards.leash")
_END_S = 2.0
_MAX_LINE = 1 << 20


class _Failure(Exception):
  """No verdict; `args` are a cause of one word and a message."""


class CommandComparer(comparers.Comparer):
  """Asks the command about one contest after the other."""

  def __init__(
      self,
      command: str,
      *,
      deadline_s: float,
      on_event: judges.OnEvent | None = None,
  ):
    """Takes the settings; the command is started when it is first needed.

    Args:
      command: words as a shell would split them; no shell runs it.
      deadline_s: of one contest.
      on_event: receives ("judge_failed", message) at the first, second, fourth
        … failure of a cause.

    Raises:
      ValueError: the command cannot be split into words, or has none.
    """
    try:
      self._words = shlex.split(command)
    except ValueError as error:
      raise ValueError(
          f"config.evaluate.judge_command={command!r}: {error}"
      ) from error
    if not self._words:
      raise ValueError("config.evaluate.judge_command='': allowed a command")
    self._deadline_s = deadline_s
    self._on_event = on_event
    self._failures: dict[str, int] = {}
    self._process: subprocess.Popen | None = None

  def compare(
      self, contests: Sequence[comparers.Contest]
  ) -> list[comparers.Verdict]:
    return [self._compare_one(contest) for contest in contests]

  def _compare_one(self, contest: comparers.Contest) -> comparers.Verdict:
    texts = contest.request.completion, contest.reference
    swap = zlib.crc32("\0".join((contest.prompt, *texts)).encode()) % 2 == 1
    first, second = reversed(texts) if swap else texts
    question = {"prompt": contest.prompt, "first": first, "second": second}
    try:
      winner = self._ask(json.dumps(question).encode() + b"\n")
    except _Failure as failure:
      self.close()
      return self._failed(*failure.args)
    if winner == "tie":
      return comparers.Verdict(0.5)
    return comparers.Verdict(float((winner == "second") == swap))

  def _ask(self, line: bytes) -> str:
    """Returns the winner that the command names."""
    deadline = time.monotonic() + self._deadline_s
    # It ends with the thread that asked last, which may be one of another
    # evaluation; and it may end when it likes.
    if self._process is not None and self._process.poll() is not None:
      self.close()
    if self._process is None:
      self._start()
    if _ready(self._process.stdout, select.POLLIN, 0) & select.POLLIN:
      # It would be taken for the verdict of this contest.
      raise _Failure("verdict", "wrote more than it was asked")
    self._write(line, deadline)
    answer = self._read_line(deadline)
    try:
      winner = json.loads(answer)["winner"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
      raise _Failure("verdict", f"wrote {answer[:80]!r}") from error
    if winner not in ("first", "second", "tie"):
      raise _Failure("verdict", f"named {winner!r} as the winner")
    return winner

  def _start(self) -> None:
    try:
      self._process = subprocess.Popen(
          [sys.executable, *_LEASH, *self._words],
          stdin=subprocess.PIPE,
          stdout=subprocess.PIPE,
          # A group of its own, so that what it starts ends with it.
          start_new_session=True,
      )
    except OSError as error:
      raise _Failure("start", f"{self._words[0]}: {error}") from error
    for pipe in (self._process.stdin, self._process.stdout):
      os.set_blocking(pipe.fileno(), False)

  def _write(self, line: bytes, deadline: float) -> None:
    left = memoryview(line)
    while left:
      self._wait(self._process.stdin, select.POLLOUT, deadline)
      try:
        left = left[os.write(self._process.stdin.fileno(), left) :]
      except BlockingIOError:
        continue
      except OSError as error:
        raise _Failure("exit", str(error)) from error

  def _read_line(self, deadline: float) -> bytes:
    found = b""
    while not found.endswith(b"\n"):
      self._wait(self._process.stdout, select.POLLIN, deadline)
      part = os.read(self._process.stdout.fileno(), 1 << 16)
      if not part:
        raise _Failure("exit", "it ended")
      found += part
      if len(found) > _MAX_LINE or found.count(b"\n") > 1:
        raise _Failure("verdict", f"wrote more than a line: {found[:80]!r}")
    return found

  def _wait(self, pipe: object, what: int, deadline: float) -> None:
    left_s = deadline - time.monotonic()
    if left_s <= 0 or not _ready(pipe, what, left_s):
      raise _Failure("deadline", f"no verdict in {self._deadline_s:g} s")

  def _failed(self, cause: str, message: str) -> comparers.Verdict:
    count = self._failures[cause] = self._failures.get(cause, 0) + 1
    if self._on_event is not None and count & (count - 1) == 0:
      self._on_event("judge_failed", f"{cause}, {count} so far: {message}")
    return comparers.Verdict(None, failure=cause)

  def close(self) -> None:
    process, self._process = self._process, None
    if process is None:
      return
    try:
      os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
      pass  # It has ended, and nothing is left of its group.
    try:
      process.wait(_END_S)
    except subprocess.TimeoutExpired:
      pass  # In the kernel; it ends when that lets it go.
    for pipe in (process.stdin, process.stdout):
      pipe.close()


def _ready(pipe: object, what: int, wait_s: float) -> int:
  """Returns what a pipe is ready for, as `poll` names it; 0 after the wait."""
  poll = select.poll()
  poll.register(pipe, what)
  return sum(events for _, events in poll.poll(wait_s * 1000))
