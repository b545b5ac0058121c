# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes every kind of trouble that a reward can make; run as a worker's task.

`python -m tests.multi_process.reward_trouble` is a worker with this task.
"""

import os
import pathlib
import subprocess
import sys
import time

from tba_jax.rewards import worker
from tba_jax.tasks import base
from tba_jax.tasks import build
from tests.support import fakes


class TroubleTask(fakes.FakeTask):
  """Does what the completion says; a number is its own reward."""

  name = "trouble"
  FIELDS = {"folder": ""}

  def __init__(self, *, folder: str):
    super().__init__({})
    if folder == "none":
      raise ValueError("the task cannot be made")
    self._folder = pathlib.Path(folder)

  def judge(self, split: str, index: int, completion: str) -> base.Judgement:
    word, _, rest = completion.partition(" ")
    if word == "hang":
      time.sleep(600)
    elif word == "hang_child":
      child = subprocess.Popen(["sleep", "600"])
      (self._folder / "child").write_text(str(child.pid))
      child.wait()
    elif word == "die":
      os._exit(7)
    elif word == "exit":
      sys.exit(0)
    elif word == "raise":
      raise ZeroDivisionError("a bug of the user's")
    elif word == "named":
      raise base.RewardError("refused", "as the task calls it")
    elif word == "print":
      print("noise on the standard output", flush=True)
      os.write(1, b"\x00\x00\x00\x02{}")
      sys.stdin.read()
    elif word == "memory":
      self._kept = bytearray(1 << 31)
    elif word == "nothing":
      return base.Judgement(None, None)
    elif word == "pid":
      return base.Judgement(float(os.getpid()), "pid")
    elif word == "long":
      return base.Judgement(float(len(rest)), None)
    reward = float(rest or 1.0)
    return base.Judgement(reward, completion, {"part": reward, "other": 2.0})

  def explain(self, split: str, index: int, completion: str) -> str:
    if completion == "hang":
      time.sleep(600)
    if completion == "raise":
      raise ZeroDivisionError("a bug of the user's")
    return f"{index}: {completion} is wrong"


build.TASKS = {**build.TASKS, "trouble": TroubleTask}


if __name__ == "__main__":
  sys.exit(worker.main())
