# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Where a run's metrics go: `metrics.jsonl` always, others by `log.writers`.

`metrics.jsonl` is the source of truth; the others repeat its numbers for other
tools and are never read back. After a restart they go on at the end, so a step
that is done again stands there twice.
"""

from collections.abc import Callable, Mapping
import csv
import importlib
import logging
import pathlib
import queue
import threading
import time
from typing import Any, Protocol

import ml_collections

from tba_jax.monitor import metrics as metrics_lib
from tba_jax.system import jsonl

# Metrics for Weights & Biases, which must neither hold up nor end a run.


_MAX_WAITING = 10_000  # Records that wait for the service; more are dropped.
_CLOSE_S = 20.0


class WandbWriter:
  """Hands numbers to wandb in a thread of its own.

  Offline, wandb writes a folder `wandb/` that `wandb sync` sends later. Where
  it fails (no account, no network, a full disk), the run is told once and goes
  on without it; `metrics.jsonl` has everything.
  """

  def __init__(
      self,
      workdir: pathlib.Path,
      *,
      config: Mapping[str, Any],
      project: str,
      mode: str,
      on_event: Callable[[str, str], None],
  ):
    """Starts the thread.

    Args:
      workdir: of the run; its name is the run's name there.
      config: that is shown beside the curves.
      project: that the run belongs to.
      mode: "offline" or "online".
      on_event: called with (kind, message) for what a user should know.
    """
    self._settings = dict(
        dir=str(workdir),
        name=workdir.name,
        config=dict(config),
        project=project,
        mode=mode,
    )
    self._on_event = on_event
    self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(
        _MAX_WAITING
    )
    self._dropped = 0
    self._thread = threading.Thread(target=self._run, name="wandb", daemon=True)
    self._thread.start()

  def write(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Leaves the numbers of a step to the thread; never waits."""
    if not self._thread.is_alive():
      return
    try:
      self._waiting.put_nowait({"step": step, **metrics})
    except queue.Full:
      self._dropped += 1

  def close(self) -> None:
    """Waits until wandb has written everything, for 20 s at most."""
    try:
      self._waiting.put(None, timeout=1.0)
    except queue.Full:
      self._dropped += self._waiting.qsize()
    self._thread.join(_CLOSE_S)
    if self._dropped or self._thread.is_alive():
      self._on_event(
          "wandb", f"{self._dropped} records dropped: wandb was too slow"
      )

  def _run(self) -> None:
    try:
      # Not among the requirements: `pip install tba_jax[wandb]`.
      wandb = importlib.import_module("wandb")
      settings = wandb.Settings(
          console="off",
          silent=True,
          disable_git=True,
          disable_code=True,
          init_timeout=60.0,
      )
      run = wandb.init(settings=settings, **self._settings)
      # A step that is done again after a restart is not in order.
      run.define_metric("*", step_metric="step")
      while (record := self._waiting.get()) is not None:
        run.log(record)
      run.finish()
    except Exception as error:  # Whatever it is, the run goes on.
      logging.exception("wandb ended")
      self._on_event("wandb", f"wandb has ended, the run goes on: {error!r}")


class Writer(Protocol):
  """What receives the numbers of a step."""

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Writes what is known of a step; names may differ from step to step."""

  def close(self) -> None:
    """Writes the rest."""


class CsvWriter:
  """Writes `metrics.csv`: a line for each number, as step,time,name,value.

  One number a line, since not every step has the same ones.
  """

  def __init__(self, path: pathlib.Path):
    new = not path.exists() or not path.stat().st_size
    self._file = jsonl.open_append(path)
    self._csv = csv.writer(self._file, lineterminator="\n")
    if new:
      self._csv.writerow(("step", "time", "name", "value"))

  def write(self, step: int, metrics: Mapping[str, Any]) -> None:
    now = f"{time.time():.3f}"
    self._csv.writerows(
        (step, now, name, value) for name, value in metrics.items()
    )
    self._file.flush()

  def close(self) -> None:
    self._file.close()


class TensorBoardWriter:
  """Writes TensorBoard's event files into a folder."""

  def __init__(self, folder: pathlib.Path):
    # Not among the requirements: `pip install tba_jax[tensorboard]`.
    package = importlib.import_module("tensorboardX")
    self._writer = package.SummaryWriter(str(folder))

  def write(self, step: int, metrics: Mapping[str, Any]) -> None:
    for name, value in metrics.items():
      self._writer.add_scalar(name, value, step)

  def close(self) -> None:
    self._writer.close()


class Profiler:
  """Captures some steps with `jax.profiler` into a folder."""

  def __init__(
      self,
      folder: pathlib.Path,
      first_step: int,
      num_steps: int,
      num_asked_steps: int,
      on_event: Callable[[str, str], None],
  ):
    """Captures nothing yet.

    Args:
      folder: for the captures, as TensorBoard and xprof read them.
      first_step: that is captured, 1 or later: the step before it starts it.
      num_steps: that are captured from there, 0 = none.
      num_asked_steps: that are captured whenever `ask` is called.
      on_event: called with (kind, message) for what a user should know.
    """
    self._folder = folder
    self._steps = range(first_step, first_step + num_steps)
    self._num_asked = num_asked_steps
    self._on_event = on_event
    self._asked = False
    self._running = False

  def ask(self) -> None:
    """Captures the next steps; safe to call in the handler of a signal."""
    self._asked = True

  def after_step(self, step: int) -> None:
    """Starts before the first step of a capture, ends after the last."""
    if self._asked and not self._running:
      self._asked = False
      self._steps = range(step + 1, step + 1 + self._num_asked)
    inside = step + 1 in self._steps
    if inside != self._running:
      # Imported here: jax costs a second, and most runs capture nothing.
      import jax

      steps = f"steps {self._steps.start} to {self._steps.stop - 1}"
      if inside:
        jax.profiler.start_trace(str(self._folder))
        self._on_event("profile", f"capturing {steps}")
      else:
        jax.profiler.stop_trace()
        self._on_event("profile", f"{steps} are in {self._folder}")
      self._running = inside

  def close(self) -> None:
    if self._running:
      self.after_step(self._steps.stop)


class Writers:
  """All writers of a run as one, and the capture of its steps."""

  def __init__(
      self,
      record: metrics_lib.MetricsWriter,
      others: list[Writer],
      profiler: Profiler,
  ):
    self._record = record
    self._others = others
    self._profiler = profiler

  def write(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Writes all to the file of record, and its numbers to the others."""
    self._record.write(step, metrics)
    numbers = {
        name: value
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    for writer in self._others:
      writer.write(step, numbers)

  def capture(self) -> None:
    """Captures the next steps."""
    self._profiler.ask()

  def after_step(self, step: int) -> None:
    """Is told of every step, also of those of which nothing is written."""
    self._profiler.after_step(step)

  def close(self) -> None:
    self._profiler.close()
    for writer in (self._record, *self._others):
      writer.close()


def make_writers(
    config: ml_collections.ConfigDict,
    workdir: pathlib.Path,
    epoch: int,
    on_event: Callable[[str, str], None],
) -> Writers:
  """Returns the writers that `config.log` asks for.

  Args:
    config: of the run.
    workdir: of the run.
    epoch: start count of the trainer.
    on_event: called with (kind, message) for what a user should know.
  """
  log = config.log
  makers: dict[str, Callable[[], Writer]] = {
      "csv": lambda: CsvWriter(workdir / "metrics.csv"),
      "tensorboard": lambda: TensorBoardWriter(workdir / "tensorboard"),
      "wandb": lambda: WandbWriter(
          workdir,
          config=config.to_dict(),
          project=log.wandb_project,
          mode=log.wandb_mode,
          on_event=on_event,
      ),
  }
  record = metrics_lib.MetricsWriter(workdir / "metrics.jsonl", epoch=epoch)
  others = [makers[name]() for name in log.writers.split(",") if name]
  profiler = Profiler(
      workdir / "profile",
      log.profile_first_step,
      log.profile_num_steps,
      log.profile_asked_steps,
      on_event,
  )
  return Writers(record, others, profiler)
