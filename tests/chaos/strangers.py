# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Cost to a run of a flood of its store.

Two processes without the run's secret write, overwrite and delete keys at a
fixed rate each. Runs of the config take turns: undisturbed; beside the same
processes, which flood the store of no run; and flooded. On one machine the
processes take CPU time that on others they would not: the second shows how
much. With slow rewards, which stand for devices that do the work, the CPU has
time to spare.
"""

from collections.abc import Sequence
import contextlib
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import ml_collections

from tba_jax.programs import train
from tba_jax.run import run_directory
from tba_jax.system import jsonl
from tba_jax.transport.kv import kv_host

_SETTINGS = (300.0, 1000.0, 0.0)
_STRANGERS = 2
_POLL_S = 0.1
# Steps that are not timed, since they compile or may be rounds of the start.
_EARLY_STEPS = 10


def run(
    config: ml_collections.ConfigDict, operands: Sequence[str]
) -> dict[str, Any]:
  """Returns trained completions per second of each kind of run.

  Args:
    config: config of the runs.
    operands: none, or any first ones of: seconds of each run, operations a
      second of each of the two processes, seconds of each reward.

  Returns:
    completions_per_s, steps, lost completions, events and operations a second
    that were done, by kind of run.

  Raises:
    RuntimeError: a run failed.
  """
  settings = [*map(float, operands), *_SETTINGS[len(operands) :]]
  seconds, rate, reward_s = settings
  config = config.copy_and_resolve_references()
  with config.unlocked():
    config.run.processes = "many"
    config.store.address = "127.0.0.1:0"
    # Without a secret the flood would find the keys.
    config.store.insecure = False
    config.train.num_steps = 1_000_000
    config.train.wall_clock_limit_s = seconds
    config.evaluate.every_steps = 0
    if reward_s:
      config.task.name = "benchmarks.delays:SlowCountdown"
      config.task.reward_s = reward_s
  with tempfile.TemporaryDirectory(prefix="tba_jax_") as name:
    folder = pathlib.Path(name)
    with _store(folder) as other:
      return {
          "alone": _train(config, folder / "alone"),
          "beside": _train(config, folder / "beside", rate, other),
          "flooded": _train(config, folder / "flooded", rate),
      }


@contextlib.contextmanager
def _store(folder: pathlib.Path):
  """Runs a store of no run; yields its locator file."""
  host = kv_host.KvHost(
      folder / "spool", "none", address="127.0.0.1:0", probe_timeout_s=60.0
  )
  stop = threading.Event()
  thread = threading.Thread(target=host.run, args=(stop,))
  thread.start()
  try:
    yield host.locator_path
  finally:
    stop.set()
    thread.join()


def _train(
    config: ml_collections.ConfigDict,
    workdir: pathlib.Path,
    rate: float = 0.0,
    store: pathlib.Path | None = None,
) -> dict[str, Any]:
  """Runs the config, with strangers at its store or another one."""
  ended, counts = threading.Event(), []
  harm = threading.Thread(
      target=_harm, args=(workdir, rate, store, ended, counts)
  )
  harm.start()
  try:
    # Standard output is for the one line of results.
    with contextlib.redirect_stdout(sys.stderr):
      status = train.run(config, str(workdir), [])
  finally:
    ended.set()
    harm.join()
  ledger = jsonl.read_json(workdir / "ledger.json")
  if status or not ledger["closed"]:
    raise RuntimeError(f"{workdir.name}: status {status}, ledger {ledger}")
  records = jsonl.read_jsonl(workdir / "metrics.jsonl")
  steps = [r for r in records if r.get("step", -1) >= _EARLY_STEPS]
  steps = [r for r in steps if "train/loss" in r]
  if len(steps) < 2:
    raise RuntimeError(
        f"{workdir.name}: the run ended before step {_EARLY_STEPS + 1}; allow"
        f" it more than {config.train.wall_clock_limit_s:g} s"
    )
  per_step = (
      config.train.prompts_per_batch * config.train.completions_per_prompt
  )
  seconds = steps[-1]["time"] - steps[0]["time"]
  done = steps[-1]["step"] - steps[0]["step"]
  return {
      "completions_per_s": done * per_step / seconds,
      "steps": done,
      "seconds": seconds,
      "longest_step_s": max(
          b["time"] - a["time"] for a, b in zip(steps, steps[1:])
      ),
      "lost": {k: part["completions"] for k, part in ledger["lost"].items()},
      "events": len(jsonl.read_jsonl(workdir / "events.jsonl")),
      "operations_per_s": counts,
  }


def _harm(
    workdir: pathlib.Path,
    rate: float,
    store: pathlib.Path | None,
    ended: threading.Event,
    counts: list[float],
) -> None:
  """Runs strangers from the first steps on, until the run ends."""
  if not rate:
    return
  while not ended.wait(_POLL_S):
    status = jsonl.read_json(workdir / "status.json") or {}
    if (status.get("step") or 0) >= _EARLY_STEPS:
      break
  else:
    return
  if store is None:
    saved = run_directory.load_config(str(workdir))
    store = run_directory.open_run(str(workdir), saved).locator
  command = [sys.executable, "-m", "tests.chaos.stranger"]
  command += [str(store), str(rate)]
  started = time.monotonic()
  strangers = [
      subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
      for _ in range(_STRANGERS)
  ]
  totals = [0] * _STRANGERS
  readers = [
      threading.Thread(target=_count, args=(stranger, totals, i))
      for i, stranger in enumerate(strangers)
  ]
  for reader in readers:
    reader.start()
  ended.wait()
  passed_s = time.monotonic() - started
  for stranger, reader in zip(strangers, readers, strict=True):
    stranger.kill()
    stranger.wait()
    reader.join()
  counts += [total / passed_s for total in totals]


def _count(stranger: subprocess.Popen, totals: list[int], index: int) -> None:
  """Keeps a stranger's number of operations."""
  for line in stranger.stdout:
    totals[index] = int(line)
