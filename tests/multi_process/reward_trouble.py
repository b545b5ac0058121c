# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes every kind of trouble that a reward can make; run as a worker's task.

`python -m tests.multi_process.reward_trouble` is a worker with this task.
"""

import contextlib
import io
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time

from tba_jax.rewards import worker
from tba_jax.tasks import arithmetic
from tba_jax.tasks import base
from tba_jax.tasks import task_table


# Starts in a third of the time of the fake task, which imports JAX.
class TroubleTask(arithmetic.Arithmetic):
  """Does what the completion says; the reward of a number is the number."""

  name = "trouble"
  FIELDS = {"folder": ""}

  def __init__(self, *, folder: str):
    super().__init__(**arithmetic.Arithmetic.FIELDS)
    if folder == "none":
      raise ValueError("the task cannot be made")
    self._folder = pathlib.Path(folder).absolute()
    if folder == "threads":
      wait = threading.Event().wait
      threading.Thread(target=wait, daemon=True).start()

  def prepare_judging(self) -> None:
    self._prepared_in = os.getcwd()
    self._started = time.monotonic()
    # In no text of the package: programs must not find it in the memory.
    self._answer = str(7 * 1_000_003**2)

  def judge(self, split: str, index: int, completion: str) -> base.Judgement:
    word, _, rest = completion.partition(" ")
    if word == "hang":
      time.sleep(600)
    elif word == "hang_child":
      child = subprocess.Popen(["sleep", "600"])
      (self._folder / "child").write_text(f"{child.pid}\n")  # A named pipe.
      child.wait()
    elif word == "die":
      os._exit(7)
    elif word == "exit":
      sys.exit(0)
    elif word == "raise":
      raise ZeroDivisionError("a bug of the user's")
    elif word == "named":
      raise base.RewardError("refused", "as the task calls it")
    elif word == "program":
      return _run(rest, self._answer)
    elif word == "exec":
      with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(rest, {"judging": sys.modules[__name__], "task": self})
      return base.Judgement(0.0, said.getvalue())
    elif word == "print":
      print("noise on the standard output", flush=True)
      os.write(1, b"\x00\x00\x00\x02{}")
      sys.stdin.read()
    elif word == "memory":
      self._kept = bytearray(1 << 31)
    elif word == "environment":
      return base.Judgement(0.0, " ".join(os.environ))
    elif word == "secret":
      return base.Judgement(0.0, _search_secret(*rest.split()))
    elif word == "descriptor":
      return base.Judgement(0.0, _state_of(int(rest)))
    elif word == "fork":
      return base.Judgement(_fork_without_end(), None)
    elif word == "leave":
      child = subprocess.Popen(["sleep", "600"], start_new_session=True)
      return base.Judgement(float(child.pid), None)
    elif word == "fill":
      return base.Judgement(_fill(), None)
    elif word == "fill_disk":
      return base.Judgement(_fill_disk(rest), None)
    elif word == "read":
      return base.Judgement(0.0, _read(rest))
    elif word == "signal":
      return base.Judgement(0.0, _signal(int(rest)))
    elif word == "processes":
      folders = pathlib.Path("/proc").glob("[0-9]*")
      return base.Judgement(float(len(list(folders))), None)
    elif word == "write":
      pathlib.Path(rest).write_text("elsewhere")
    elif word == "prepared":  # Before it was confined to its directory.
      return base.Judgement(float(self._prepared_in != os.getcwd()), None)
    elif word == "directory":
      return base.Judgement(0.0, os.getcwd())
    elif word == "network":
      return base.Judgement(0.0, _connect(("127.0.0.1", int(rest))))
    elif word == "abstract":  # A socket without a file.
      return base.Judgement(0.0, _connect("\0" + rest))
    elif word == "nothing":
      return base.Judgement(None, None)
    elif word == "start":
      return base.Judgement(self._started, None)
    elif word == "long":
      return base.Judgement(float(len(rest)), None)
    reward = float(rest or 1.0)
    return base.Judgement(reward, completion, {"part": reward, "other": 2.0})

  def judge_cut_off(
      self, split: str, index: int, completion: str
  ) -> base.Judgement:
    return base.Judgement(0.25, None)

  def explain(self, split: str, index: int, completion: str) -> str:
    if completion == "hang":
      time.sleep(600)
    if completion == "raise":
      raise ZeroDivisionError("a bug of the user's")
    return f"{index}: {completion} is wrong"


def _run(program: str, answer: str) -> base.Judgement:
  """Runs a program; the reward is 1 if it prints the answer."""
  process = subprocess.run(
      [sys.executable, "-c", program],
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      check=False,
  )
  said = process.stdout.strip()
  return base.Judgement(float(said == answer), said[-1000:])


def _search_secret(pid: str, secret: str) -> str:
  if secret in map(str, os.environ.values()):
    return "in its own environment"
  try:
    result = pathlib.Path(f"/proc/{pid}/environ").read_bytes()
  except OSError:
    return "out of reach"
  return "in another process" if secret.encode() in result else "nowhere"


def _state_of(fd: int) -> str:
  try:
    os.fstat(fd)
  except OSError:
    return "closed"
  return "open"


def _fork_without_end() -> float:
  children = []
  try:
    while len(children) < 1000:
      children.append(subprocess.Popen(["sleep", "600"]))
  except OSError:
    pass
  for child in children:
    child.kill()
    child.wait()
  return float(len(children))


def _fill() -> float:
  path = pathlib.Path("large")
  try:
    with path.open("wb", buffering=0) as f:
      for size in range(0, 1 << 30, 1 << 24):
        f.truncate(size)
  except OSError:
    pass
  return float(path.stat().st_size)


def _fill_disk(folder: str) -> float:
  """Returns the bytes that fit into files of 64 MiB; removes them."""
  paths = [pathlib.Path(folder, f"part{count}") for count in range(10)]
  count = 0
  try:
    for count, path in enumerate(paths):
      path.write_bytes(bytes(1 << 26))
  except OSError:
    pass
  for path in paths:
    with contextlib.suppress(OSError):
      path.unlink()
  return float(count << 26)


def _read(path: str) -> str:
  try:
    return pathlib.Path(path).read_text()
  except OSError:
    return "out of reach"


def _signal(pid: int) -> str:
  try:
    os.kill(pid, 0)
  except OSError:
    return "out of reach"
  return "reached"


def _connect(address: tuple[str, int] | str) -> str:
  family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
  try:
    with socket.socket(family) as connection:
      connection.settimeout(10)
      connection.connect(address)
  except OSError:
    return "no network"
  return "network"


task_table.TASKS = {
    **task_table.TASKS,
    "trouble": "tests.multi_process.reward_trouble:TroubleTask",
}


if __name__ == "__main__":
  sys.exit(worker.main())
