# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A run in the caller's own process, for notebooks: `tba_jax.train(config)`.

The searchers are threads and reach the trainer through memory, which keeps the
records as well: training writes no file. A temporary folder has the models that
stages make before it, and the report.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import html
import tempfile
import threading
import time
from typing import Any

import ml_collections
import rich.console

from tba_jax.config import load
from tba_jax.config import validate
from tba_jax.policy import prompt_preview
from tba_jax.programs import one_process
from tba_jax.programs import reward_model
from tba_jax.programs import settle
from tba_jax.programs import sft
from tba_jax.programs import train as train_lib
from tba_jax.report import page as report
from tba_jax.report import panel
from tba_jax.run import metrics
from tba_jax.run import run_directory
from tba_jax.system import accelerators
from tba_jax.system import jsonl
from tba_jax.system import processes

_REFRESH_S = 0.5
_STAGES = {"sft": sft.run, "reward_model": reward_model.run}


@dataclasses.dataclass(frozen=True)
class Result:
  """What a run of this process leaves; a notebook shows its report.

  summary: content of `result.json`: `before`, `after`, counts and times.
  steps: records of `metrics.jsonl`, one for each optimizer step.
  evaluations: results of evaluations, in the order of their steps.
  report: page of the run, HTML that needs no other file.
  """

  summary: Mapping[str, Any]
  steps: Sequence[Mapping[str, Any]]
  evaluations: Sequence[Mapping[str, Any]]
  report: str

  def __repr__(self) -> str:
    before, after = (self.summary.get(n) or {} for n in ("before", "after"))
    accuracy = [
        "–" if (value := r.get("pass_at_1")) is None else f"{value:.3f}"
        for r in (before, after)
    ]
    return f"Result(steps={len(self.steps)}, pass@1 {' → '.join(accuracy)})"

  def _repr_html_(self) -> str:
    return (
        f'<iframe srcdoc="{html.escape(self.report)}" width="100%"'
        ' height="800" style="border:0"></iframe>'
    )


def train(
    config: ml_collections.ConfigDict,
    *,
    stop: threading.Event | None = None,
    on_start: Callable[[run_directory.RunInfo], None] = lambda run: None,
    shows: bool = True,
) -> Result:
  """Trains to the last step in this process and thread.

  Args:
    config: config of the run.
    stop: ends the run where it is; its result has what there is by then.
    on_start: called with the run, whose records can be read while it trains.
    shows: whether to print progress and result.

  Raises:
    ValueError: settings are wrong, or a file does not fit; each is named.
    RuntimeError: the run failed.
    KeyboardInterrupt: interrupted by the user; nothing is left of the run.
  """
  stop = stop or threading.Event()
  config = settle.settle(config, None, "train")
  validate.validate(config, program="one_process")
  if shows:
    prompt_preview.print_data(config, shows_prompt=True)
  config = config.copy_and_resolve_references()
  load.make_paths_absolute(config)
  accelerators.prepare()
  processes.prepare_compiling()
  started = time.monotonic()
  with tempfile.TemporaryDirectory(prefix="tba_jax_") as workdir:
    config = train_lib.with_compute_dtype(config, workdir)
    run = run_directory.in_memory(workdir, config)
    on_start(run)
    console = _console(shows)
    with _shown(run, console) as view:
      for name in train_lib.stages_of(config):
        if not stop.is_set():
          view.phase(name)
          _STAGES[name](config, workdir, stop=stop)
      status = processes.EXIT_INTERRUPTED
      if not stop.is_set():
        status = one_process.train(config, run, (), stop)
    if status and status != processes.EXIT_INTERRUPTED:
      raise RuntimeError(f"the run ended with status {status}")
    folder = run.workdir
    run.memory.save(folder)
    summary = {
        **(jsonl.read_json(folder / "result.json") or {}),
        "wall_s": time.monotonic() - started,
        "restarts": {},
    }
    jsonl.atomic_write_json(folder / "summary.json", summary)
    page, verdict, advice = report.conclude(workdir)
    if status == processes.EXIT_OK:
      console.print(panel.final_table(summary, verdict.sentence))
      console.print(panel.advice_list(advice))
    return Result(
        summary=summary,
        steps=metrics.last_per_step(jsonl.read_jsonl(folder / "metrics.jsonl")),
        evaluations=(jsonl.read_json(folder / "eval.json") or {}).get(
            "history", []
        ),
        report=page.read_text(),
    )


def _console(shows: bool) -> rich.console.Console:
  """Returns a console of plain lines, as a notebook shows them."""
  return rich.console.Console(
      force_jupyter=False, force_terminal=False, quiet=not shows
  )


@contextlib.contextmanager
def _shown(
    run: run_directory.RunInfo, console: rich.console.Console
) -> Iterator[panel.Panel]:
  """Prints the run's progress as lines, from a thread."""
  done = threading.Event()
  with panel.Panel(run.workdir, console, memory=run.memory) as view:

    def refresh() -> None:
      while not done.wait(_REFRESH_S):
        view.update()

    thread = threading.Thread(target=refresh, daemon=True)
    thread.start()
    try:
      yield view
    finally:
      done.set()
      thread.join()
