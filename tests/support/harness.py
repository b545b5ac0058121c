# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The package's programs as processes.

`Run` is the `train` program on one run directory; `Roles` starts store, trainer
and searchers separately, as on different hosts. Every wait has a deadline, and
its error shows the ends of all logs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any
import urllib.error
import urllib.request

import numpy as np
import orbax.checkpoint as ocp

from tba_jax.system import jsonl
from tba_jax.system import processes
from tests.support import waiting

# Seconds between polls of a run's files, which take CPU time from the run.
_EVERY_S = 0.05
ROOT = pathlib.Path(__file__).parents[2]
CONFIG = "configs/countdown.py:smoke"
SERVE_CONFIG = "configs/serve.py:smoke"


def environment(**more: str) -> dict[str, str]:
  return {
      **os.environ,
      "JAX_PLATFORMS": "cpu",
      "PYTHONPATH": str(ROOT),
      **more,
  }


def command(
    program: str,
    workdir: str | os.PathLike[str],
    *operands: str,
    config: str = "",
    overrides: Mapping[str, Any] | None = None,
) -> list[str]:
  """Returns the command line of a program."""
  return [
      *(sys.executable, "-m", "tba_jax.main", f"--program={program}"),
      *([f"--config={config}"] if config else []),
      f"--workdir={workdir}",
      *(f"--config.{k}={v}" for k, v in (overrides or {}).items()),
      *operands,
  ]


class Process:
  """A process whose output is appended to a log."""

  def __init__(
      self,
      argv: Sequence[str],
      log: pathlib.Path,
      env: Mapping[str, str] | None = None,
      **options: Any,
  ):
    self.log = log
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
      self.process = subprocess.Popen(
          argv,
          cwd=ROOT,
          stdin=subprocess.DEVNULL,
          stdout=out,
          stderr=subprocess.STDOUT,
          env=environment(**(env or {})),
          **options,
      )

  @property
  def is_running(self) -> bool:
    return self.process.poll() is None

  def wait(self, timeout_s: float = 300.0) -> int:
    """Returns the exit status; ends the process at the time limit."""
    try:
      return self.process.wait(timeout_s)
    except subprocess.TimeoutExpired as error:
      self.close()
      raise AssertionError(
          f"process {self.process.pid}, {self.log.name}: still running after"
          f" {timeout_s} s:\n{self.text()}"
      ) from error

  def close(self) -> None:
    """Ends the process; a supervisor ends its children."""
    if self.is_running:
      self.process.send_signal(signal.SIGTERM)
      try:
        self.process.wait(30)
      except subprocess.TimeoutExpired:
        self.process.kill()
        self.process.wait()

  def text(self) -> str:
    """Returns the end of the log."""
    return self.log.read_text()[-3000:]


class Run(Process):
  """The `train` program on a run directory."""

  def __init__(
      self,
      workdir: str | os.PathLike[str],
      overrides: Mapping[str, Any],
      config: str = CONFIG,
  ):
    """Starts the program; its output goes to WORKDIR/out.txt."""
    self.workdir = pathlib.Path(workdir)
    argv = command("train", workdir, config=config, overrides=overrides)
    super().__init__(argv, self.workdir / "out.txt")

  def text(self) -> str:
    """Returns the ends of the output and of the children's logs."""
    return tails([self.log, *sorted((self.workdir / "logs").glob("*.log"))])

  def read(self, name: str) -> Any:
    """Returns a JSON file of the run directory; None if it is missing."""
    try:
      return jsonl.loads((self.workdir / name).read_text())
    except FileNotFoundError:
      return None

  def steps(self) -> list[dict[str, Any]]:
    """Returns the metrics of training steps, including repeated ones."""
    records = lines(self.workdir / "metrics.jsonl")
    return [r for r in records if "train/loss" in r]

  def events(self, kind: str) -> list[dict[str, Any]]:
    records = lines(self.workdir / "events.jsonl")
    return [r for r in records if r["kind"] == kind]

  def pids(self, role: str) -> list[int]:
    return [
        row["pid"]
        for row in self.read("processes.json") or ()
        if row["role"] == role
    ]

  def wait_for(
      self, condition: Callable[[], Any], what: str, timeout_s: float = 180.0
  ) -> Any:
    """Waits until a condition holds; raises if the process ends first."""

    def tell() -> str:
      self.close()
      return f"{what}\n{self.text()}"

    return waiting.wait_until(
        condition,
        tell,
        timeout_s,
        is_lost=lambda: not self.is_running,
        every_s=_EVERY_S,
    )

  def wait_for_step(self, step: int) -> None:
    self.wait_for(
        lambda: any(r["step"] >= step for r in self.steps()), f"step {step}"
    )

  def kill(
      self, role: str, number: int = signal.SIGKILL, index: int = 0
  ) -> int:
    """Signals a process of a role; returns its pid."""
    pids = self.wait_for(lambda: self.pids(role), f"process of {role}")
    pid = pids[index]
    os.kill(pid, number)
    return pid


NUM_SEARCHERS = 2


class Roles:
  """Store, trainer and searchers of one run, as on separate hosts.

  Each has a separate directory; they share the config, the secret file and the
  store's address.
  """

  _OVERRIDES = {
      "init": "scratch",
      "train.num_steps": 100_000,
      "checkpoint.every_steps": 50,
      "evaluate.every_steps": 0,
      "replay.recent_fraction": 0.75,
      "search.num_searchers": NUM_SEARCHERS,
      "search.lease_s": 5.0,
  }

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    self.secret_file = folder / "secret"
    self.secret_file.touch(mode=0o600)
    self.secret_file.write_bytes(os.urandom(32))
    self._processes: dict[str, Process] = {}
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
      program: name of the program.
      locator: `store.locator`.
      index: index of a searcher.
      prefix: words put before its command.
      changes: other settings, by key.
      **settings: settings of `config.store`.
    """
    name = f"{program}-{index}"
    store = {"locator": locator, "secret_file": self.secret_file, **settings}
    overrides = {
        **self._OVERRIDES,
        **{f"store.{key}": value for key, value in store.items()},
        **(changes or {}),
    }
    self._commands[name] = [
        *prefix,
        *command(
            program,
            self.folder / name,
            *([str(index)] if program == "searcher" else []),
            config=CONFIG,
            overrides=overrides,
        ),
    ]
    self._spawn(name, self._commands[name])

  def interrupt(self, name: str) -> None:
    """Ends a role by SIGTERM, so that it saves."""
    self._processes[name].process.terminate()
    if self.wait(name, 60) != 75:
      raise AssertionError(f"{name} did not save:\n{self.text()}")

  def resume(self, name: str, **settings: Any) -> None:
    """Starts an interrupted role again, with other settings."""
    more = [f"--config.{key}={value}" for key, value in settings.items()]
    self._spawn(name, self._commands[name] + more)

  def _spawn(self, name: str, argv: list[str]) -> None:
    self._processes[name] = Process(argv, self.folder / f"{name}.log")

  def close(self) -> None:
    """Kills the remaining processes."""
    for process in self._processes.values():
      process.process.kill()
      process.process.wait()

  def wait(self, name: str, timeout_s: float) -> int:
    """Returns the exit status of a role."""
    return self._processes[name].wait(timeout_s)

  def is_running(self, name: str) -> bool:
    return self._processes[name].is_running

  def wait_for(self, condition: Callable[[], Any], what: str) -> Any:
    """Waits until a condition holds; raises if a process ends first."""
    return waiting.wait_until(
        condition,
        lambda: f"{what}\n{self.text()}",
        150.0,
        is_lost=lambda: [p for p in self._processes if not self.is_running(p)],
        every_s=_EVERY_S,
    )

  def read(self, name: str) -> Any:
    """Returns a JSON file of the trainer's directory."""
    return json.loads((self.folder / "trainer-0" / name).read_text())

  def step(self) -> int:
    """Returns the last step in the trainer's metrics, or -1."""
    records = lines(self.folder / "trainer-0" / "metrics.jsonl")
    return max((r["step"] for r in records if "train/loss" in r), default=-1)

  def events(self, kind: str) -> list[dict[str, Any]]:
    """Returns the events of a kind of all roles."""
    result = [lines(path) for path in self.folder.glob("*/events.jsonl")]
    return [one for some in result for one in some if one["kind"] == kind]

  def text(self) -> str:
    """Returns the ends of all logs."""
    return tails(sorted(self.folder.glob("*.log")))


def run_together(
    commands: Iterable[Sequence[Any]], timeout_s: float = 150.0
) -> list[tuple[str, str, int]]:
  """Returns stdout, stderr and status of concurrent Python processes."""
  children = [
      subprocess.Popen(
          [sys.executable, *map(str, one)],
          cwd=ROOT,
          stdin=subprocess.DEVNULL,
          stdout=subprocess.PIPE,
          stderr=subprocess.PIPE,
          text=True,
          env=environment(),
      )
      for one in commands
  ]
  deadline = time.monotonic() + timeout_s
  try:
    return [
        (
            *child.communicate(timeout=max(0.1, deadline - time.monotonic())),
            child.returncode,
        )
        for child in children
    ]
  except subprocess.TimeoutExpired as error:
    raise AssertionError(
        f"still running after {timeout_s} s: {error.cmd}\n{error.stderr}"
    ) from error
  finally:
    for child in children:
      child.kill()
      child.communicate()


def run_benchmark(
    folder: pathlib.Path,
    name: str,
    *operands: str,
    config: str = CONFIG,
    overrides: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    package: str = "benchmarks",
    timeout_s: float = 280.0,
) -> dict[str, Any]:
  """Runs `python -m PACKAGE NAME` in a folder; returns its line of results."""
  process = subprocess.run(
      [
          *(sys.executable, "-m", package, f"--config={ROOT / config}"),
          *(f"--config.{k}={v}" for k, v in (overrides or {}).items()),
          name,
          *operands,
      ],
      cwd=folder,
      stdin=subprocess.DEVNULL,
      capture_output=True,
      text=True,
      env=environment(**(env or {})),
      timeout=timeout_s,
  )
  if process.returncode:
    raise AssertionError(
        f"status {process.returncode}:\n{process.stderr[-3000:]}"
    )
  (line,) = process.stdout.splitlines()
  return json.loads(line)


def lines(path: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the complete records of a JSONL file; [] if it is missing."""
  return list(jsonl.read_jsonl(path))


def tails(logs: Iterable[pathlib.Path]) -> str:
  return "\n".join(f"== {p.name}\n{p.read_text()[-3000:]}" for p in logs)


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
  """Returns processes and sockets of a run that should have ended."""
  result = [str(p) for p in pathlib.Path(workdir).rglob("*.sock")]
  for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
      argv = path.read_bytes().replace(b"\0", b" ").decode()
    except OSError:
      continue
    if str(workdir) in argv and "tba_jax" in argv:
      result.append(argv)
  return result


def check_ledger(ledger: dict[str, Any]) -> None:
  """Raises unless every prompt, completion and token is accounted for."""
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


class Served:
  """Server of the `serve` program that can restart on the same port.

  url: address.
  key: API key.
  process: newest process.
  """

  def __init__(self, workdir: pathlib.Path, **overrides: Any):
    self._workdir, self._overrides = workdir, overrides
    self._port = processes.free_port()
    self._starts = 0
    self.url = f"http://127.0.0.1:{self._port}"
    self.start()

  def start(self) -> None:
    self._spawn()
    log = self.process.log
    waiting.wait_until(
        lambda: "\nkey " in log.read_text(),
        lambda: log.read_text(),
        180.0,
        is_lost=lambda: self.process.process.poll() is not None,
    )
    lines = log.read_text().splitlines()
    if f"serving on {self.url}" not in lines:
      raise AssertionError(lines)
    (self.key,) = (
        line.removeprefix("key ") for line in lines if line.startswith("key ")
    )

  def _spawn(self) -> None:
    self._starts += 1
    self.process = Process(
        command(
            "serve",
            self._workdir,
            config=SERVE_CONFIG,
            overrides={"serve.port": self._port, **self._overrides},
        ),
        self._workdir / f"server-{self._starts}.log",
        env=environment(),
    )

  def end(self) -> None:
    self.process.process.kill()
    self.process.process.wait(30)

  def kill(self, again_s: float | None = None) -> None:
    """Kills and restarts the server; given seconds, also kills one restart."""
    self.end()
    if again_s is not None:
      self._spawn()
      time.sleep(again_s)
      self.end()
    self.start()

  def stop(self, number: int = signal.SIGTERM) -> None:
    """Ends the server by a signal; raises on an error or long output."""
    before = len(self.process.log.read_text())
    self.process.process.send_signal(number)
    status = self.process.process.wait(60)
    lines = self.process.log.read_text()[before:].splitlines()
    # The server may still be restoring models from checkpoints.
    said = [line for line in lines if not line.endswith("done again")]
    if status or len(said) > 3 or "Traceback" in "".join(said):
      raise AssertionError(f"status {status}: {said}")

  def post(self, path, body, **headers):
    """Returns status and JSON of a request."""
    if not isinstance(body, bytes):
      body = json.dumps(body).encode()
    request = urllib.request.Request(
        f"{self.url}/api/v1/{path}",
        body,
        {"X-API-Key": self.key, "Content-Type": "application/json", **headers},
    )
    try:
      with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
      return error.code, json.load(error)
