# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The `sweep` program: quality against staleness, objective by objective.

Fine-tunes once, makes every run of `config.sweep` that is not done yet, and
ends in one table and one plot. In WORKDIR: `config.json`, `sft/`,
`runs/NAME.json` (a run's result, written whole when it is done), `sweep.md` and
`sweep.png`, brought up to date as runs end. A run that was cut off is made
again from its beginning.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import fcntl
import pathlib
import subprocess
import sys
import threading
import time
from typing import Any

import ml_collections
import rich.console

from tba_jax import jsonl
from tba_jax import processes
from tba_jax import run_directory
from tba_jax import stale_loop
from tba_jax import sweep_runs
from tba_jax import sweep_table
from tba_jax import sweep_types
from tba_jax import sweep_view
from tba_jax import train_sft
from tba_jax import validate

_WORKER = "worker"  # The operand that makes a process one of several.
_PLOT_EVERY_S = 60.0
_POLL_S = 0.5
_STOP_S = 30.0  # A worker that does not end by itself is killed.

Results = dict[str, Mapping[str, Any]]


def run(
    config: ml_collections.ConfigDict, workdir: str, operands: Sequence[str]
) -> int:
  """Runs the program; returns its exit status."""
  check = lambda own: validate.validate(own, program="sweep")
  try:
    if operands and (operands[0] != _WORKER or len(operands) != 2):
      raise ValueError(f"--program=sweep takes no operands, not {operands}")
    runs = sweep_runs.expand(config, check)
    if not operands:
      run_directory.lock(workdir)  # Held as long as this process lives.
    _read_results(workdir, runs)
  except ValueError as error:
    print(f"error: {error}", file=sys.stderr)
    return processes.EXIT_CONFIG
  stop = processes.stop_on_signals()
  if operands:
    processes.die_with_parent()
    cores = processes.available_cores()[
        int(operands[1]) :: config.sweep.workers
    ]
    if cores:
      processes.pin(cores)
    processes.enable_compilation_cache()
    _make_runs(config, workdir, runs, stop)
    return processes.EXIT_INTERRUPTED if stop.is_set() else processes.EXIT_OK
  processes.enable_compilation_cache()
  try:
    return _sweep(config, workdir, runs, stop)
  except ValueError as error:
    print(f"error: {error}", file=sys.stderr)
    return processes.EXIT_CONFIG


def _sweep(
    config: ml_collections.ConfigDict,
    workdir: str,
    runs: Sequence[sweep_types.Run],
    stop: threading.Event,
) -> int:
  """Makes what is missing, shows it, and writes table and plot."""
  _, saved = run_directory.create(workdir, config)
  if saved is not None:
    if not saved.get("sweep", {}).get("objectives"):
      raise ValueError(
          f"--workdir={workdir}: a run of another program is there; allowed an"
          " empty directory or that of a sweep"
      )
    run_directory.update(workdir, config)
  console = rich.console.Console()
  with sweep_view.View(console, runs) as view:
    plotted_at = -_PLOT_EVERY_S

    def show(now: str = "") -> None:
      nonlocal plotted_at
      results = _read_results(workdir, runs)
      view.update(results, now)
      if results and time.monotonic() - plotted_at >= _PLOT_EVERY_S:
        _write_report(workdir, runs, results)
        plotted_at = time.monotonic()

    failed = ""
    if not _fine_tune(config, workdir, stop, show, view.line):
      pass  # The same command continues.
    elif config.sweep.workers == 1:
      _make_runs(config, workdir, runs, stop, show)
    else:
      failed = _run_workers(config, workdir, stop, show)
    results = _read_results(workdir, runs)
    view.update(results)
  if results:
    _write_report(workdir, runs, results)
    console.print(sweep_view.progress_table(runs, results))
    print(f"{workdir}/sweep.md and sweep.png: {len(results)}/{len(runs)} runs")
  if failed:
    print(f"error: {failed}", file=sys.stderr)
    return processes.EXIT_FATAL
  if len(results) < len(runs):
    print("interrupted; the same command continues")
    return processes.EXIT_INTERRUPTED
  return processes.EXIT_OK


def _fine_tune(
    config: ml_collections.ConfigDict,
    workdir: str,
    stop: threading.Event,
    show: Callable[[str], None],
    line: Callable[[str], None],
) -> bool:
  """Makes what all runs start from; False where it was stopped before."""
  if config.init != "sft":
    return True
  show("fine-tuning")

  def on_progress(step: int, num_steps: int, _: dict[str, float]) -> None:
    text = f"fine-tuning: step {step} of {num_steps}"
    show(text)
    line(text)

  made = train_sft.run(config, workdir, stop=stop, on_progress=on_progress)
  return not made["interrupted"]


def _make_runs(
    config: ml_collections.ConfigDict,
    workdir: str,
    runs: Sequence[sweep_types.Run],
    stop: threading.Event,
    show: Callable[[str], None] = lambda now: None,
) -> None:
  """Makes in this process the runs that nobody has made or is making."""
  bench = None
  for one in runs:
    with _claim(workdir, one) as is_mine:
      if not is_mine or sweep_runs.read_result(workdir, one) is not None:
        continue
      if stop.is_set():
        return
      show(one.name)
      bench = bench or stale_loop.Bench(config, workdir)
      try:
        result = bench.run(one, should_stop=stop.is_set)
      except stale_loop.Interrupted:
        return
      jsonl.atomic_write_json(
          sweep_runs.result_path(workdir, one),
          {**result, "settings": sweep_runs.settings(one)},
      )
    show("")


@contextlib.contextmanager
def _claim(workdir: str, one: sweep_types.Run) -> Iterator[bool]:
  """Yields True where no other process has the run; its end gives it back."""
  path = sweep_runs.result_path(workdir, one).with_suffix(".lock")
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open("w") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      yield False
      return
    yield True
    # While it is held: whoever claims it next finds the result.
    path.unlink(missing_ok=True)


def _run_workers(
    config: ml_collections.ConfigDict,
    workdir: str,
    stop: threading.Event,
    show: Callable[[str], None],
) -> str:
  """Makes the runs in several processes; returns what failed, "" if nothing."""
  folder = pathlib.Path(workdir) / "logs"
  folder.mkdir(parents=True, exist_ok=True)
  command = [sys.executable, "-m", "tba_jax.main", "--program=sweep"]
  workers: dict[pathlib.Path, subprocess.Popen] = {}
  failed = ""
  try:
    for i in range(config.sweep.workers):
      log = folder / f"worker-{i}.log"
      with log.open("ab") as file:
        workers[log] = subprocess.Popen(
            [*command, f"--workdir={workdir}", _WORKER, str(i)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    running = True
    while running and not failed:
      show(f"{config.sweep.workers} runs at a time")
      # Asked first, so that a worker that ends meanwhile is looked at below.
      running = any(worker.poll() is None for worker in workers.values())
      for log, worker in workers.items():
        if worker.poll() and not stop.is_set():
          failed = f"a worker ended with status {worker.returncode}: see {log}"
      if running and stop.wait(_POLL_S):
        break
  finally:
    _end(workers.values())
  return failed


def _end(workers: Sequence[subprocess.Popen]) -> None:
  """Stops the workers that still run; waits until all are gone."""
  for worker in workers:
    if worker.poll() is None:
      worker.terminate()
  deadline = time.monotonic() + _STOP_S
  for worker in workers:
    try:
      worker.wait(max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
      worker.kill()
      worker.wait()


def _read_results(workdir: str, runs: Sequence[sweep_types.Run]) -> Results:
  found = {run.name: sweep_runs.read_result(workdir, run) for run in runs}
  return {name: result for name, result in found.items() if result is not None}


def _write_report(
    workdir: str, runs: Sequence[sweep_types.Run], results: Results
) -> None:
  folder = pathlib.Path(workdir)
  partial = folder / ".sweep.md"
  partial.write_text(sweep_table.markdown(runs, results))
  partial.replace(folder / "sweep.md")
  sweep_table.plot(runs, results, folder / "sweep.png")
