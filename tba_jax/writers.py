# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Where a run's metrics go: `metrics.jsonl` always, others by `log.writers`.

`metrics.jsonl` is the source of truth; the others repeat its numbers for other
tools and are never read back. After a restart they go on at the end, so a step
that is done again stands there twice.
"""

from collections.abc import Iterator, Mapping
import csv
import importlib
import pathlib
import time
from typing import Any, Protocol

import ml_collections

from tba_jax import jsonl
from tba_jax import metrics as metrics_lib


class Writer(Protocol):
  """What receives the metrics of a step."""

  def write(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Writes what is known of a step; names may differ from step to step."""

  def close(self) -> None:
    """Writes the rest."""


def _scalars(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
  for name, value in metrics.items():
    if isinstance(value, int | float) and not isinstance(value, bool):
      yield name, value


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
        (step, now, name, value) for name, value in _scalars(metrics)
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
    for name, value in _scalars(metrics):
      self._writer.add_scalar(name, value, step)

  def close(self) -> None:
    self._writer.close()


class Profiler:
  """Captures some steps with `jax.profiler` into a folder."""

  def __init__(self, folder: pathlib.Path, first_step: int, num_steps: int):
    """Captures nothing yet.

    Args:
      folder: for the capture, as TensorBoard and xprof read it.
      first_step: that is captured, 1 or later: the step before it starts it.
      num_steps: that are captured, 0 = none.
    """
    self._folder = folder
    self._steps = range(first_step, first_step + num_steps)
    self._running = False

  def after_step(self, step: int) -> None:
    """Starts before the first step of the capture, ends after the last."""
    inside = step + 1 in self._steps
    if inside != self._running:
      # Imported here: jax costs a second, and most runs capture nothing.
      import jax

      if inside:
        jax.profiler.start_trace(str(self._folder))
      else:
        jax.profiler.stop_trace()
      self._running = inside

  def close(self) -> None:
    if self._running:
      self.after_step(self._steps.stop)


class Writers:
  """All writers of a run as one, and the capture of its steps."""

  def __init__(self, writers: list[Writer], profiler: Profiler):
    self._writers = writers
    self._profiler = profiler

  def write(self, step: int, metrics: Mapping[str, Any]) -> None:
    for writer in self._writers:
      writer.write(step, metrics)

  def after_step(self, step: int) -> None:
    """Is told of every step, also of those of which nothing is written."""
    self._profiler.after_step(step)

  def close(self) -> None:
    self._profiler.close()
    for writer in self._writers:
      writer.close()


# Name in `config.log.writers` -> writer in a run directory.
WRITERS = {
    "csv": lambda workdir: CsvWriter(workdir / "metrics.csv"),
    "tensorboard": lambda workdir: TensorBoardWriter(workdir / "tensorboard"),
}


def make(
    config_log: ml_collections.ConfigDict, workdir: pathlib.Path, epoch: int
) -> Writers:
  """Returns the writers that `config.log` asks for.

  Args:
    config_log: reads `writers`, `profile_first_step`, `profile_num_steps`.
    workdir: of the run.
    epoch: start count of the trainer.
  """
  first = metrics_lib.MetricsWriter(workdir / "metrics.jsonl", epoch=epoch)
  others = [WRITERS[n](workdir) for n in config_log.writers.split(",") if n]
  profiler = Profiler(
      workdir / "profile",
      config_log.profile_first_step,
      config_log.profile_num_steps,
  )
  return Writers([first, *others], profiler)
