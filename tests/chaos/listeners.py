# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What strangers cost at each port that the programs open.

    python -m tests.chaos --config=configs/arithmetic.py listeners \\
        [SECONDS [PART …]]

The parts are `store`, `coordinator` and `serve`; all of them by default. A run
with its store and announcer on TCP, a trainer of two processes with its
coordinator, and a server of `serve` work on, while `attacks.py` tries each port
with each attack for SECONDS (10), in turn with as long without one. The ratio
is of the work done in both; on a machine of few cores, the attacks' own CPU
time lowers it as well. The share of a core that the listening process takes
more than without does not depend on what else runs. Needs Linux.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any
import urllib.error
import urllib.request

import ml_collections
import numpy as np

from tba_jax.run import run_directory
from tba_jax.system import jsonl
from tba_jax.system import processes
from tba_jax.transport.kv import locator
from tests.chaos import attacks

_ROOT = pathlib.Path(__file__).parents[2]
_SECONDS = 10.0
# Until an attack is at work, or its traces are gone.
_SETTLE_S = 3.0
_START_S, _POLL_S = 600.0, 0.1
# Pause between two requests of the client.
_ASK_EVERY_S = 0.02
_EARLY_STEPS = 10
_OF_STORE = {
    "run.processes": "many",
    "search.num_searchers": 1,
    "store.address": "127.0.0.1:0",
    "store.insecure": False,
}
_OF_COORDINATOR = {
    "run.processes": "many",
    "search.num_searchers": 1,
    "mesh.fsdp": 2,
    "trainer.num_processes": 2,
    "trainer.cpu_devices": 1,
}
_COMMON = {
    "init": "scratch",
    "train.num_steps": 1_000_000,
    "evaluate.every_steps": 0,
    "log.every_steps": 1,
}


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns a row for each port and attack.

  Args:
    config: config of the runs.
    operands: seconds of each window, and names of parts.

  Raises:
    RuntimeError: a run or the server ended.
    ValueError: an operand is wrong.
  """
  seconds = float(operands[0]) if operands else _SECONDS
  parts = operands[1:] or list(_PARTS)
  if unknown := sorted(set(parts) - set(_PARTS)):
    raise ValueError(f"parts {unknown}: must be one of {', '.join(_PARTS)}")
  out, rows = {}, []
  with tempfile.TemporaryDirectory(prefix="tba_jax_") as name:
    for part in parts:
      folder = pathlib.Path(name) / part
      out[part] = _PARTS[part](config, folder, seconds, rows)
  _tell(_table(rows))
  return {"rows": rows, "runs": out}


def _try_store(
    config: ml_collections.ConfigDict,
    folder: pathlib.Path,
    seconds: float,
    rows: list[dict[str, Any]],
) -> dict[str, Any]:
  """Adds the rows of store and announcer; returns the run's account."""
  address = f"127.0.0.1:{processes.free_port()}"
  settings = _COMMON | _OF_STORE | {"store.locator": address}
  with _training(config, folder, settings) as (steps, info):
    result = locator.read_locator(info.locator)
    store = _Work(steps, _pid(folder, "kvservice"))
    host = _Work(steps, _pid(folder, "store"))
    for attack in attacks.ATTACKS:
      rows.append(_row("store", attack, seconds, store, result.address))
      rows.append(
          _row("announcer", attack, seconds, host, address, "announcer")
      )
    for attack in attacks.ON_KEYS:
      rows.append(_row("store", attack, seconds, store, result.address))
      row = _row(
          *("store", attack, seconds, store, result.address, "store"), info.root
      )
      rows.append({**row, "attack": f"{attack}, knows the keys"})
  return _account(folder)


def _try_coordinator(
    config: ml_collections.ConfigDict,
    folder: pathlib.Path,
    seconds: float,
    rows: list[dict[str, Any]],
) -> dict[str, Any]:
  """Adds the rows of a trainer's coordinator; returns the run's account."""
  with _training(config, folder, _COMMON | _OF_COORDINATOR) as (steps, _):
    trainer = _Work(steps, _pid(folder, "trainer"))
    # `train` has chosen the port; it is the last operand.
    command = pathlib.Path(f"/proc/{trainer.pid}/cmdline").read_bytes()
    address = command.split(b"\0")[-2].decode()
    for attack in attacks.ATTACKS:
      rows.append(_row("coordinator", attack, seconds, trainer, address))
  return _account(folder)


def _try_serve(
    config: ml_collections.ConfigDict,
    folder: pathlib.Path,
    seconds: float,
    rows: list[dict[str, Any]],
) -> dict[str, Any]:
  """Adds the rows of a server of configs/serve.py."""
  del config
  with _serving(folder) as (server, address):
    for attack in attacks.ATTACKS:
      rows.append(_row("serve", attack, seconds, server, address, "http"))
  return {}


_PARTS = {
    "store": _try_store,
    "coordinator": _try_coordinator,
    "serve": _try_serve,
}


def _tell(text: str) -> None:
  # Standard output is for the one line of results.
  print(text, file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True)
class _Work:
  """What goes on while a port is attacked.

  done: function that returns how much is done so far.
  pid: process that listens.
  """

  done: Callable[[], float]
  pid: int

  def rates(self, seconds: float) -> np.ndarray:
    """Returns work a second, and the process's share of a core."""
    began, before = time.monotonic(), self._read()
    time.sleep(seconds)
    return (self._read() - before) / (time.monotonic() - began)

  def _read(self) -> np.ndarray:
    text = pathlib.Path(f"/proc/{self.pid}/stat").read_text()
    # The time in user mode and in the kernel, in ticks.
    ticks = map(int, text.rpartition(")")[2].split()[11:13])
    return np.array([self.done(), sum(ticks) / os.sysconf("SC_CLK_TCK")])


def _pid(workdir: pathlib.Path, role: str) -> int:
  rows = jsonl.read_json(workdir / "processes.json")
  return next(row["pid"] for row in rows if row["role"] == role)


def _row(
    listener: str,
    attack: str,
    seconds: float,
    work: _Work,
    address: str,
    protocol: str = "store",
    root: str = "",
) -> dict[str, Any]:
  """Returns the work per second with an attack and around it."""
  before = work.rates(seconds / 2)
  argv = [sys.executable, "-m", "tests.chaos.attacks"]
  argv += [attack, address, protocol]
  with subprocess.Popen(
      argv + [root] * bool(root), cwd=_ROOT, stdout=subprocess.PIPE, text=True
  ) as stranger:
    try:
      # Its first line; its start takes seconds on a busy machine.
      stranger.stdout.readline()
      time.sleep(_SETTLE_S)
      during = work.rates(seconds)
    finally:
      stranger.kill()
      counts = stranger.stdout.read().split()
  time.sleep(_SETTLE_S)
  alone = (before + work.rates(seconds / 2)) / 2
  row = {
      "port": listener,
      "attack": attack,
      "alone_per_s": round(alone[0], 2),
      "attacked_per_s": round(during[0], 2),
      "ratio": round(during[0] / max(alone[0], 1e-9), 3),
      "core_share_more": round(during[1] - alone[1], 4),
      "acts": int(counts[-1]) if counts else 0,
  }
  _tell(json.dumps(row))
  return row


def _table(rows: Sequence[dict[str, Any]]) -> str:
  lines = [
      "| port | attack | ratio | of a core | acts |",
      "|---|---|---|---|---|",
  ]
  lines += [
      f"| {r['port']} | {r['attack']} | {r['ratio']:.2f} |"
      f" {r['core_share_more']:.1%} | {r['acts']:,} |"
      for r in rows
  ]
  return "\n".join(lines)


@contextlib.contextmanager
def _process(argv: Sequence[str], log: pathlib.Path) -> Iterator[Any]:
  """Runs a program; tells the end of its log if it has ended by itself."""
  with log.open("wb") as out:
    process = subprocess.Popen(
        [sys.executable, "-m", *argv],
        cwd=_ROOT,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
    )
  try:
    yield process
    if process.poll() is not None:
      raise RuntimeError(f"{argv}: ended\n{log.read_text()[-3000:]}")
  finally:
    process.terminate()
    try:
      process.wait(60.0)
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait()


def _until(condition: Callable[[], Any], process: Any, what: str) -> Any:
  deadline = time.monotonic() + _START_S
  while not (value := condition()):
    if process.poll() is not None or time.monotonic() > deadline:
      raise RuntimeError(f"no {what}")
    time.sleep(_POLL_S)
  return value


@contextlib.contextmanager
def _training(
    config: ml_collections.ConfigDict,
    workdir: pathlib.Path,
    settings: dict[str, Any],
) -> Iterator[tuple[Callable[[], int], run_directory.RunInfo]]:
  """Runs `train`; yields a function for its step, and the run."""
  config = config.copy_and_resolve_references()
  config.update_from_flattened_dict(settings)
  path = workdir.with_suffix(".json")
  jsonl.atomic_write_json(path, config.to_dict())

  def step() -> int:
    status = jsonl.read_json(workdir / "status.json") or {}
    return status.get("step") or 0

  argv = ("tests.chaos.chaos", str(path), str(workdir))
  with _process(argv, workdir.with_suffix(".txt")) as process:
    try:
      _until(lambda: step() >= _EARLY_STEPS, process, "tenth step")
    except RuntimeError as error:
      text = workdir.with_suffix(".txt").read_text()[-3000:]
      raise RuntimeError(f"{workdir}: {error}\n{text}") from error
    saved = run_directory.load_config(str(workdir))
    yield step, run_directory.open_run(str(workdir), saved)


def _account(workdir: pathlib.Path) -> dict[str, Any]:
  """Returns what a run has lost, its restarts, and its events by kind."""
  kinds = [e["kind"] for e in jsonl.read_jsonl(workdir / "events.jsonl")]
  ledger = jsonl.read_json(workdir / "ledger.json") or {}
  return {
      "steps": (jsonl.read_json(workdir / "status.json") or {}).get("step"),
      "lost": ledger.get("lost"),
      "rejected": ledger.get("rejected"),
      "events": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
  }


@contextlib.contextmanager
def _serving(
    workdir: pathlib.Path,
) -> Iterator[tuple[_Work, str]]:
  """Runs `serve`; yields the requests answered, and its address."""
  workdir.mkdir()
  log = workdir / "log"
  port = processes.free_port()
  argv = (
      *("tba_jax.main", "--program=serve", "--config=configs/serve.py:smoke"),
      *(f"--workdir={workdir}", f"--config.serve.port={port}"),
  )
  with _process(argv, log) as process:
    _until(lambda: "\nkey " in log.read_text(), process, "server")
    key = log.read_text().splitlines()[-1].removeprefix("key ")
    url = f"http://127.0.0.1:{port}/api/v1/create_session"

    count, stop = 0, threading.Event()

    def ask() -> None:
      nonlocal count
      while not stop.wait(_ASK_EVERY_S):
        request = urllib.request.Request(
            url,
            b'{"tags": []}',
            {"X-API-Key": key, "Content-Type": "application/json"},
        )
        with contextlib.suppress(urllib.error.URLError, OSError):
          with urllib.request.urlopen(request, timeout=10) as answer:
            count += answer.status == 200

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
      yield _Work(lambda: count, process.pid), f"127.0.0.1:{port}"
    finally:
      stop.set()
      thread.join(20.0)
