# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics for Weights & Biases, which must neither hold up nor end a run."""

from collections.abc import Callable, Mapping
import importlib
import logging
import pathlib
import queue
import threading
from typing import Any

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
