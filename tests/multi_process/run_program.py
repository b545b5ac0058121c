# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Starts the `train` program as a user does, and plays tricks on it."""

from collections.abc import Callable, Mapping
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = "configs/countdown.py:smoke"


class Run:
  """One `train` process on one run directory."""

  def __init__(
      self,
      workdir: str | os.PathLike[str],
      overrides: Mapping[str, Any],
      config: str = CONFIG,
  ):
    """Starts it; what it prints goes to WORKDIR/out.txt."""
    self.workdir = pathlib.Path(workdir)
    self.workdir.mkdir(parents=True, exist_ok=True)
    with (self.workdir / "out.txt").open("ab") as out:
      self.process = subprocess.Popen(
          [
              sys.executable,
              "-m",
              "tba_jax.main",
              "--program=train",
              f"--config={config}",
              f"--workdir={self.workdir}",
              *(f"--config.{k}={v}" for k, v in overrides.items()),
          ],
          cwd=ROOT,
          stdin=subprocess.DEVNULL,
          stdout=out,
          stderr=subprocess.STDOUT,
      )

  def wait(self, timeout_s: float = 300.0) -> int:
    """Returns the exit status; ends the process at the time limit."""
    try:
      return self.process.wait(timeout_s)
    except subprocess.TimeoutExpired as error:
      self.close()
      raise AssertionError(
          f"still running after {timeout_s} s:\n{self.text()}"
      ) from error

  def close(self) -> None:
    """Ends the process, if it still runs."""
    if self.process.poll() is None:
      self.process.send_signal(signal.SIGTERM)
      try:
        self.process.wait(30)
      except subprocess.TimeoutExpired:
        self.process.kill()
        self.process.wait()

  def text(self) -> str:
    """Returns what it printed, and the ends of its children's logs."""
    parts = [(self.workdir / "out.txt").read_text()[-3000:]]
    for log in sorted((self.workdir / "logs").glob("*.log")):
      parts.append(f"== {log.name}\n{log.read_text()[-3000:]}")
    return "\n".join(parts)

  def read(self, name: str) -> Any:
    """Returns a JSON file of the run directory, None where it is not there."""
    try:
      return json.loads((self.workdir / name).read_text())
    except FileNotFoundError:
      return None

  def steps(self) -> list[dict[str, Any]]:
    """Returns the metrics of training steps as written, repeats included."""
    return [r for r in self._lines("metrics.jsonl") if "train/loss" in r]

  def events(self, kind: str) -> list[dict[str, Any]]:
    return [r for r in self._lines("events.jsonl") if r["kind"] == kind]

  def pids(self, role: str) -> list[int]:
    return [
        row["pid"]
        for row in self.read("processes.json") or ()
        if row["role"] == role
    ]

  def wait_for(
      self, condition: Callable[[], Any], what: str, timeout_s: float = 180.0
  ) -> Any:
    """Waits until a condition holds, or the process has ended."""
    deadline = time.monotonic() + timeout_s
    while True:
      found = condition()
      if found:
        return found
      if self.process.poll() is not None or time.monotonic() > deadline:
        self.close()
        raise AssertionError(f"no {what}:\n{self.text()}")
      time.sleep(0.02)

  def wait_for_step(self, step: int) -> None:
    self.wait_for(
        lambda: any(r["step"] >= step for r in self.steps()), f"step {step}"
    )

  def kill(
      self, role: str, number: int = signal.SIGKILL, index: int = 0
  ) -> int:
    """Sends a signal to a process of a role; returns its pid."""
    pids = self.wait_for(lambda: self.pids(role), f"process of {role}")
    pid = pids[index]
    os.kill(pid, number)
    return pid

  def _lines(self, name: str) -> list[dict[str, Any]]:
    try:
      lines = (self.workdir / name).read_text().splitlines()
    except FileNotFoundError:
      return []
    out = []
    for line in lines:
      try:
        out.append(json.loads(line))
      except ValueError:
        continue  # The line that is just being written.
    return out


def params_of(workdir: str | os.PathLike[str], step: int) -> dict[str, Any]:
  """Returns the policy's leaves by path from a checkpoint."""
  path = pathlib.Path(workdir) / "checkpoints" / str(step) / "state"
  restored = ocp.StandardCheckpointer().restore(path)
  leaves = {}

  def visit(prefix: str, node: Any) -> None:
    if isinstance(node, Mapping):
      for name, child in node.items():
        visit(f"{prefix}['{name}']", child)
    else:
      leaves[prefix] = np.asarray(node)

  visit("", restored["params"])
  return leaves


def leftovers(workdir: str | os.PathLike[str]) -> list[str]:
  """Returns the processes and sockets that a run has left behind."""
  found = [str(p) for p in pathlib.Path(workdir).rglob("*.sock")]
  for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
      command = path.read_bytes().replace(b"\0", b" ").decode()
    except OSError:
      continue
    if str(workdir) in command and "tba_jax" in command:
      found.append(command)
  return found
