# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics as CSV, for TensorBoard, trackio and W&B; profiles of steps.

`metrics.jsonl` is always written, and is the only file read back.
`config.log.writers` adds further outputs, in which a step redone after a
restart appears twice.
"""

from collections.abc import Callable, Mapping
import csv
import importlib
import logging
import pathlib
import queue
import threading
import time
from typing import Any, ClassVar, Protocol

import ml_collections

from tba_jax.run import metrics as metrics_lib
from tba_jax.run import run_directory
from tba_jax.system import jsonl

MAX_WAITING = 10_000  # Records queued for a service; more are dropped.
CLOSE_S = 20.0
ASKED_STEPS = 5  # Steps of a profile requested by SIGUSR1.


class _ServiceWriter:
  """Logs to a package from a thread: it neither delays nor ends the run.

  A failure (no account, no network) is one event.
  """

  name: ClassVar[str]

  def __init__(self, on_event: Callable[[str, str], None]):
    self._on_event = on_event
    self.waiting: queue.Queue[tuple[int, dict[str, Any]] | None] = queue.Queue(
        MAX_WAITING
    )
    self._dropped = 0
    self.thread = threading.Thread(
        target=self._run, name=self.name, daemon=True
    )
    self.thread.start()

  def _open(self) -> Any:
    """Returns the package's run, with `finish`."""
    raise NotImplementedError

  def _log(self, run: Any, step: int, metrics: dict[str, Any]) -> None:
    raise NotImplementedError

  def write(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Queues the metrics of a step; never blocks."""
    if not self.thread.is_alive():
      return
    try:
      self.waiting.put_nowait((step, dict(metrics)))
    except queue.Full:
      self._dropped += 1

  def close(self) -> None:
    """Waits up to 20 s for the package to write everything."""
    try:
      self.waiting.put(None, timeout=1.0)
    except queue.Full:
      self._dropped += self.waiting.qsize()
    self.thread.join(CLOSE_S)
    if self._dropped or self.thread.is_alive():
      self._on_event(
          self.name,
          f"{self._dropped} records dropped: {self.name} was too slow",
      )

  def _run(self) -> None:
    try:
      run = self._open()
      while (record := self.waiting.get()) is not None:
        self._log(run, *record)
      run.finish()
    except Exception as error:  # Whatever it is, the run continues.
      logging.exception("%s ended", self.name)
      self._on_event(
          self.name, f"{self.name} has ended, the run continues: {error!r}"
      )


class WandbWriter(_ServiceWriter):
  """Logs to Weights & Biases.

  Offline, it writes a folder `wandb/` for `wandb sync`.
  """

  name: ClassVar[str] = "wandb"

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      workdir: pathlib.Path,
      on_event: Callable[[str, str], None],
  ):
    self._settings = dict(
        dir=str(workdir),
        name=workdir.name,
        config=config.to_dict(),
        project=config.log.wandb_project,
        mode=config.log.wandb_mode,
    )
    super().__init__(on_event)

  def _open(self) -> Any:
    # An optional requirement: `pip install 'tba_jax[wandb]'`.
    wandb = importlib.import_module("wandb")
    settings = wandb.Settings(
        console="off",
        silent=True,
        disable_git=True,
        disable_code=True,
        init_timeout=60.0,
    )
    run = wandb.init(settings=settings, **self._settings)
    # wandb's own step must increase; after a restart ours may not.
    run.define_metric("*", step_metric="step")
    return run

  def _log(self, run: Any, step: int, metrics: dict[str, Any]) -> None:
    run.log({"step": step, **metrics})


class TrackioWriter(_ServiceWriter):
  """Logs to trackio, into its folder in the user's cache (`TRACKIO_DIR`).

  A resumed run continues there, since its name in trackio has its id.
  """

  name: ClassVar[str] = "trackio"

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      run_name: str,
      on_event: Callable[[str, str], None],
  ):
    self._settings = dict(
        name=run_name,
        config=config.to_dict(),
        project=config.log.trackio_project,
        resume="allow",
        embed=False,
        auto_log_cpu=False,
        auto_log_gpu=False,
    )
    super().__init__(on_event)

  def _open(self) -> Any:
    # An optional requirement: `pip install 'tba_jax[trackio]'`.
    return importlib.import_module("trackio").init(**self._settings)

  def _log(self, run: Any, step: int, metrics: dict[str, Any]) -> None:
    run.log(metrics, step=step)


class Writer(Protocol):
  """Receives the metrics of a step; names may differ from step to step."""

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    ...

  def close(self) -> None:
    ...


class CsvWriter:
  """Writes `metrics.csv`, one value per line: step,time,name,value."""

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
  """Writes TensorBoard event files into a folder."""

  def __init__(self, folder: pathlib.Path):
    # An optional requirement: `pip install 'tba_jax[tensorboard]'`.
    package = importlib.import_module("tensorboardX")
    self._writer = package.SummaryWriter(str(folder))

  def write(self, step: int, metrics: Mapping[str, Any]) -> None:
    for name, value in metrics.items():
      self._writer.add_scalar(name, value, step)

  def close(self) -> None:
    self._writer.close()


class Profiler:
  """Profiles steps with `jax.profiler` into `profile/`, for TensorBoard."""

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      workdir: pathlib.Path,
      on_event: Callable[[str, str], None],
  ):
    log = config.log
    self._folder = workdir / "profile"
    first = log.profile_first_step
    self._steps = range(first, first + log.profile_num_steps)
    self._on_event = on_event
    self._is_requested = False
    self._running = False

  def ask(self) -> None:
    """Requests a profile of the next steps; safe in a signal handler."""
    self._is_requested = True

  def after_step(self, step: int) -> None:
    """Starts or stops a profile; call it after every step."""
    if self._is_requested and not self._running:
      self._is_requested = False
      self._steps = range(step + 1, step + 1 + ASKED_STEPS)
    inside = step + 1 in self._steps
    if inside != self._running:
      # Imported here: jax takes a second, and most runs profile nothing.
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
  """`metrics.jsonl`, and the writers of `config.log.writers`."""

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      run: run_directory.RunInfo,
      epoch: int,
      on_event: Callable[[str, str], None],
  ):
    """Opens all writers; `epoch` counts the trainer's starts."""
    workdir = run.workdir
    makers: dict[str, Callable[[], Writer]] = {
        "csv": lambda: CsvWriter(workdir / "metrics.csv"),
        "tensorboard": lambda: TensorBoardWriter(workdir / "tensorboard"),
        "trackio": lambda: TrackioWriter(
            config, f"{workdir.name}-{run.run_id}", on_event
        ),
        "wandb": lambda: WandbWriter(config, workdir, on_event),
    }
    lines = run.files.lines("metrics.jsonl")
    self._record = metrics_lib.MetricsWriter(lines, epoch=epoch)
    names = [name for name in config.log.writers.split(",") if name]
    self._metric_writers = {name: makers[name]() for name in names}
    self._on_event = on_event

  def write(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Writes a record; numbers also go to the other writers.

    A writer that raises OSError is dropped with an event; for `metrics.jsonl`,
    the error is raised.
    """
    numbers = {
        name: value
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    for name, writer in list(self._metric_writers.items()):
      try:
        writer.write(step, numbers)
      except OSError as error:
        del self._metric_writers[name]
        self._on_event("not_written", f"writer {name} has ended: {error}")
    self._record.write(step, metrics)

  def close(self) -> None:
    for writer in (self._record, *self._metric_writers.values()):
      writer.close()
