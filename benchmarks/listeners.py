# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What strangers cost at each port that the programs open.

    python -m benchmarks --config=configs/arithmetic.py listeners [SECONDS]

A run with its store and announcer on TCP, a trainer of two processes with its
coordinator, and a server of `serve` work on, while `attacks.py` tries each port
with each attack for SECONDS (10), in turn with as long without one; the ratio
is of the work done in both. What shares the machine's cores slows the work as
well: on others it would not.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import json
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

from benchmarks import attacks
from tba_jax.monitor import run_directory
from tba_jax.system import jsonl
from tba_jax.system import processes
from tba_jax.transport import locator

_ROOT = pathlib.Path(__file__).parent.parent
_SECONDS = 10.0
# Until an attack is at work, or its traces are gone.
_SETTLE_S = 3.0
_START_S, _POLL_S = 240.0, 0.1
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
    operands: none, or the seconds of each window.

  Raises:
    RuntimeError: a run or the server ended.
  """
  seconds = float(operands[0]) if operands else _SECONDS
  with tempfile.TemporaryDirectory(prefix="tba_jax_") as name:
    folder, rows = pathlib.Path(name), []
    address = f"127.0.0.1:{processes.free_port()}"
    settings = _COMMON | _OF_STORE | {"store.locator": address}
    with _training(config, folder / "store", settings) as (steps, info):
      found = locator.read_locator(info.locator)
      for attack in attacks.ATTACKS:
        rows.append(_row("store", attack, seconds, steps, found.address))
        rows.append(
            _row("announcer", attack, seconds, steps, address, "announcer")
        )
      for attack in attacks.ON_KEYS:
        rows.append(_row("store", attack, seconds, steps, found.address))
        row = _row(
            *("store", attack, seconds, steps, found.address, "store"),
            info.root,
        )
        rows.append({**row, "attack": f"{attack}, knows the keys"})
    ended = _account(folder / "store")
    address = f"127.0.0.1:{processes.free_port()}"
    settings = _COMMON | _OF_COORDINATOR | {"trainer.coordinator": address}
    with _training(config, folder / "two", settings) as (steps, _):
      for attack in attacks.ATTACKS:
        rows.append(_row("coordinator", attack, seconds, steps, address))
    ended_two = _account(folder / "two")
    with _serving(folder / "serve") as (requests, address):
      for attack in attacks.ATTACKS:
        rows.append(_row("serve", attack, seconds, requests, address, "http"))
  _tell(_table(rows))
  return {"rows": rows, "runs": {"store": ended, "coordinator": ended_two}}


def _tell(text: str) -> None:
  # Standard output is for the benchmark's one line.
  print(text, file=sys.stderr, flush=True)


def _row(
    listener: str,
    attack: str,
    seconds: float,
    work: Callable[[], float],
    address: str,
    protocol: str = "store",
    root: str = "",
) -> dict[str, Any]:
  """Returns the work per second with an attack and around it."""
  before = _rate(work, seconds / 2)
  argv = [sys.executable, "-m", "benchmarks.attacks", attack, address, protocol]
  with subprocess.Popen(
      argv + [root] * bool(root), cwd=_ROOT, stdout=subprocess.PIPE, text=True
  ) as stranger:
    try:
      time.sleep(_SETTLE_S)
      during = _rate(work, seconds)
    finally:
      stranger.kill()
      counts = stranger.stdout.read().split()
  time.sleep(_SETTLE_S)
  after = _rate(work, seconds / 2)
  row = {
      "port": listener,
      "attack": attack,
      "alone_per_s": round((before + after) / 2, 2),
      "attacked_per_s": round(during, 2),
      "ratio": round(2 * during / max(before + after, 1e-9), 3),
      "acts": int(counts[-1]) if counts else 0,
  }
  _tell(json.dumps(row))
  return row


def _rate(work: Callable[[], float], seconds: float) -> float:
  began, done = time.monotonic(), work()
  time.sleep(seconds)
  return (work() - done) / (time.monotonic() - began)


def _table(rows: Sequence[dict[str, Any]]) -> str:
  lines = ["| port | attack | ratio | acts |", "|---|---|---|---|"]
  lines += [
      f"| {r['port']} | {r['attack']} | {r['ratio']:.2f} | {r['acts']:,} |"
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
) -> Iterator[tuple[Callable[[], int], run_directory.Run]]:
  """Runs `train`; yields a function for its step, and the run."""
  config = config.copy_and_resolve_references()
  config.update_from_flattened_dict(settings)
  path = workdir.with_suffix(".json")
  jsonl.atomic_write_json(path, config.to_dict())

  def step() -> int:
    status = jsonl.read_json(workdir / "status.json") or {}
    return status.get("step") or 0

  argv = ("benchmarks.chaos", str(path), str(workdir))
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
) -> Iterator[tuple[Callable[[], int], str]]:
  """Runs `serve`; yields a function for the requests answered, and address."""
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
      yield lambda: count, f"127.0.0.1:{port}"
    finally:
      stop.set()
      thread.join(20.0)
