# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Store, trainer and searchers started one by one, as on separate hosts.

Each has a directory of its own and shares nothing with the others but the
config, a file with the run's secret and the address of the store.
"""

from collections.abc import Callable, Mapping, Sequence
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = "configs/countdown.py:smoke"
NUM_SEARCHERS = 3
OVERRIDES = {
    "init": "scratch",
    "train.num_steps": 100_000,
    "checkpoint.every_steps": 50,
    "evaluate.every_steps": 0,
    "replay.recent_fraction": 0.75,
    "search.num_searchers": NUM_SEARCHERS,
    "search.lease_s": 5.0,
    "store.probe_timeout_s": 5.0,
}


class Roles:
  """The processes of one run, each with its own directory."""

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    self.secret_file = folder / "secret"
    self.secret_file.touch(mode=0o600)
    self.secret_file.write_bytes(os.urandom(32))
    self._processes: dict[str, subprocess.Popen] = {}
    self._commands: dict[str, list[str]] = {}

  def start(
      self,
      program: str,
      locator: str,
      *,
      index: int = 0,
      prefix: Sequence[str] = (),
      changes: Mapping[str, Any] | None = None,
      **settings: Any,
  ) -> None:
    """Starts a role.

    Args:
      program: name of it.
      locator: `store.locator`.
      index: of a searcher.
      prefix: of its command.
      changes: of settings, by key.
      **settings: of `config.store`.
    """
    name = f"{program}-{index}"
    store = {
        "locator": locator,
        "secret_file": self.secret_file,
        **settings,
    }
    overrides = {
        **OVERRIDES,
        **{f"store.{key}": value for key, value in store.items()},
        **(changes or {}),
    }
    self._commands[name] = [
        *prefix,
        sys.executable,
        "-m",
        "tba_jax.main",
        f"--program={program}",
        f"--config={CONFIG}",
        f"--workdir={self.folder / name}",
        *(f"--config.{key}={value}" for key, value in overrides.items()),
        *([str(index)] if program == "searcher" else []),
    ]
    self._spawn(name, self._commands[name])

  def interrupt(self, name: str) -> None:
    """Ends a role by SIGTERM; it must save."""
    self._processes[name].terminate()
    if self.wait(name, 60) != 75:
      raise AssertionError(f"{name} did not save:\n{self.text()}")

  def resume(self, name: str, **settings: Any) -> None:
    """Starts an interrupted role with other settings."""
    more = [f"--config.{key}={value}" for key, value in settings.items()]
    self._spawn(name, self._commands[name] + more)

  def _spawn(self, name: str, command: list[str]) -> None:
    with (self.folder / f"{name}.log").open("ab") as log:
      self._processes[name] = subprocess.Popen(
          command,
          cwd=ROOT,
          stdin=subprocess.DEVNULL,
          stdout=log,
          stderr=subprocess.STDOUT,
          env={**os.environ, "JAX_PLATFORMS": "cpu"},
      )

  def close(self) -> None:
    """Kills what still runs."""
    for process in self._processes.values():
      process.kill()
      process.wait()

  def wait(self, name: str, timeout_s: float) -> int:
    """Returns the exit status of a role."""
    try:
      return self._processes[name].wait(timeout_s)
    except subprocess.TimeoutExpired as error:
      raise AssertionError(f"{name} still runs:\n{self.text()}") from error

  def is_running(self, name: str) -> bool:
    return self._processes[name].poll() is None

  def wait_for(self, condition: Callable[[], Any], what: str) -> Any:
    """Waits until a condition holds; no process may end meanwhile."""
    deadline = time.monotonic() + 150
    while not (found := condition()):
      gone = [name for name in self._processes if not self.is_running(name)]
      if gone or time.monotonic() > deadline:
        raise AssertionError(f"no {what}; ended: {gone}\n{self.text()}")
      time.sleep(0.05)
    return found

  def read(self, name: str) -> Any:
    """Returns a JSON file of the trainer's directory, None where none is."""
    try:
      return json.loads((self.folder / "trainer-0" / name).read_text())
    except FileNotFoundError:
      return None

  def step(self) -> int:
    """Returns the last step that the trainer has written."""
    try:
      text = (self.folder / "trainer-0" / "metrics.jsonl").read_text()
    except FileNotFoundError:
      return -1
    steps = [
        json.loads(line)["step"]
        for line in text.splitlines(keepends=True)
        if line.endswith("\n") and "train/loss" in line
    ]
    return max(steps, default=-1)

  def events(self, kind: str) -> list[dict[str, Any]]:
    """Returns the events of a kind of all roles."""
    out = []
    for path in self.folder.glob("*/events.jsonl"):
      lines = [json.loads(line) for line in path.read_text().splitlines()]
      out += [line for line in lines if line["kind"] == kind]
    return out

  def text(self) -> str:
    """Returns the ends of all logs."""
    return "\n".join(
        f"== {path.name}\n{path.read_text()[-2500:]}"
        for path in sorted(self.folder.glob("*.log"))
    )


def check_ledger(ledger: dict[str, Any]) -> None:
  """Raises where what was generated is not accounted for to the last one."""
  terms = ("trained_first_time", "in_buffer_untrained", "evicted_untrained",
           "queued")  # fmt: skip
  for unit in ("prompts", "completions", "tokens"):
    accounted = sum(ledger[term][unit] for term in terms) + sum(
        amount[unit]
        for term in ("rejected", "lost")
        for amount in ledger[term].values()
    )
    if ledger["generated"][unit] != accounted or ledger["queued"][unit]:
      raise AssertionError(f"{unit} do not close: {ledger}")
