# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The trainer: await data, draw, step, publish, checkpoint, evaluate.

The loop of `Trainer.run` reads in that order. The device works on a step while
the host draws the next batch, wherever its data is there already.
"""

from collections.abc import Callable
import math
import time
from typing import Any

import jax
import numpy as np

from tba_jax import batches
from tba_jax import checkpoint as checkpoint_lib
from tba_jax import device_work
from tba_jax import evaluations as evaluations_lib
from tba_jax import guards as guards_lib
from tba_jax import periods as periods_lib
from tba_jax import publication
from tba_jax import recorder as recorder_lib
from tba_jax import types
from tba_jax.replay import draw as draw_lib
from tba_jax.replay import journal as journal_lib
from tba_jax.replay import service as service_lib

_FINISH_S = 15.0
_PUBLISH_S = 60.0


class Trainer:
  """Owns the train state; everything else is handed in."""

  def __init__(
      self,
      *,
      work: device_work.DeviceWork,
      service: service_lib.ReplayService,
      batch_maker: batches.BatchMaker,
      publisher: publication.Publisher,
      checkpointer: checkpoint_lib.Checkpointer,
      journal: journal_lib.Journal,
      evaluations: evaluations_lib.Evaluations,
      guards: guards_lib.Guards,
      recorder: recorder_lib.Recorder,
      periods: periods_lib.Periods,
      applied_history: list[tuple[int, int]],
      stopped_by: str | None = None,
  ):
    """Takes the parts, restored or new; `run` starts.

    Args:
      work: owns the train state; what the devices do.
      service: replay, with its drain running.
      batch_maker: from draws to batches.
      publisher: of versions.
      checkpointer: of this run.
      journal: cut as checkpoints cover it.
      evaluations: before, while and after training.
      guards: against collapse.
      recorder: writes metrics, status, samples and results.
      periods: see there.
      applied_history: (step, journal position) of the checkpoints on disk.
      stopped_by: what ended the training before its last step, where only the
        last evaluation is left to do.
    """
    self._work = work
    self._service = service
    self._batch_maker = batch_maker
    self._publisher = publisher
    self._checkpointer = checkpointer
    self._journal = journal
    self._evaluations = evaluations
    self._guards = guards
    self._recorder = recorder
    self._periods = periods
    self._applied_history = list(applied_history)
    self._step = int(work.state.step)
    self._saved_step = checkpointer.latest_step()
    self._started = time.monotonic()
    self._stopped_by = stopped_by
    self._saved_at = time.monotonic()
    self._save_due = False

  def run(self, should_stop: Callable[[], bool]) -> bool:
    """Trains to the last step; returns False where it was interrupted.

    An interrupted run is saved, and goes on where it was.

    Raises:
      FloatingPointError: a loss that is not finite; names step and prompts.
      DeadlineExceededError: nothing came from searchers or store in time.
    """
    periods, note = self._periods, self._recorder
    self._publish_first()
    if not note.has_result("before"):
      # Admission opens first: searchers compile and sample meanwhile.
      self._service.open(self._step)
      if not self._evaluate("before", should_stop):
        return self._interrupt()
    elif self._is_evaluation_missing():
      if not self._evaluate("", should_stop):
        return self._interrupt()
    prepared = None
    while self._step < periods.num_steps and (
        self._stopped_by is None or prepared is not None
    ):
      if prepared is None:
        prepared = self._prepare(should_stop)
      if prepared is None:
        return self._interrupt()
      draw, batch = prepared
      with note.span("step", step=self._step):
        metrics = self._work.train(batch)
      prepared = self._after_dispatch(should_stop)
      with note.span("step", step=self._step):
        metrics = jax.device_get(metrics)
      self._after_step(draw, batch, metrics)
      if not self._periodic(should_stop):
        return self._interrupt()
      if should_stop() and prepared is None:
        return self._interrupt()
    return self._finish(should_stop)

  def _prepare(
      self, should_stop: Callable[[], bool]
  ) -> tuple[draw_lib.Draw, types.Batch] | None:
    """Waits for the step's data and draws; None where it was stopped."""
    note = self._recorder
    with note.span("wait_fresh", step=self._step):
      begun = self._begin(self._step, should_stop)
    return self._draw(self._step) if begun else None

  def _publish_first(self) -> None:
    """Publishes; with a lag what the rest of a round must be sampled with."""
    version, field = self._step, "params"
    if self._periods.publish_late:
      every = self._periods.publish_every
      version = max(version - 1, 0) // every * every
      field = "sampling_params"
    self._work.publish(self._publisher.submit, version, field)
    self._publisher.wait(version, _PUBLISH_S)

  def _begin(self, step: int, should_stop: Callable[[], bool]) -> bool:
    """Waits for the step's data; with a lag, opens the round after it."""
    begun = self._service.begin_step(step, should_stop)
    if begun and self._periods.publish_late:
      if step % self._periods.publish_every == 0:
        self._work.publish(self._publisher.submit, step)
      self._service.open_next(step)
    return begun

  def _draw(self, step: int) -> tuple[draw_lib.Draw, types.Batch]:
    with self._recorder.span("draw", step=step):
      draw = self._service.draw(
          self._periods.num_prompts, self._periods.num_completions, step
      )
      self._service.mark_trained(draw)
      ref_params = self._work.state.ref_params
      batch = self._batch_maker.make(draw, step, ref_params)
      return draw, batch

  def _after_dispatch(
      self, should_stop: Callable[[], bool]
  ) -> tuple[draw_lib.Draw, types.Batch] | None:
    """While the device works on the step: publish it, draw the next batch."""
    done = self._step + 1
    periods = self._periods
    self._save_due = self._is_save_due(done)
    due = done % periods.publish_every == 0 or done == periods.num_steps
    if due and not periods.publish_late:
      self._work.publish(self._publisher.submit, done)
    # A checkpoint or an evaluation must see the buffer between two steps.
    if done >= periods.num_steps or self._is_due(done) or should_stop():
      return None
    if self._stopped_by is not None:
      return None
    if not self._service.is_ready(done) or not self._begin(done, should_stop):
      return None
    return self._draw(done)

  def _after_step(
      self,
      draw: draw_lib.Draw,
      batch: types.Batch,
      metrics: dict[str, np.ndarray],
  ) -> None:
    step = self._step
    metrics = {name: float(value) for name, value in metrics.items()}
    if not math.isfinite(metrics["loss"]):
      raise FloatingPointError(
          f"step {step}: the loss is {metrics['loss']}; prompts"
          f" {sorted(set(draw.prompt_ids.tolist()))}, versions"
          f" {int(draw.versions.min())} to {int(draw.versions.max())}"
      )
    self._batch_maker.flush()
    self._step = step + 1
    for alarm in self._guards.check_step(step, metrics):
      self._on_alarm(alarm)
    with self._recorder.span("record", step=step):
      self._recorder.step(step, metrics, draw, self._service)

  def _is_due(self, done: int) -> bool:
    evaluates = self._evaluations.is_due(done) and not self._evaluations.beside
    return evaluates or self._save_due

  def _is_save_due(self, done: int) -> bool:
    every = self._periods.checkpoint_every
    every_s = self._periods.checkpoint_every_s
    if every and done % every == 0:
      return True
    return bool(every_s) and time.monotonic() - self._saved_at >= every_s

  def _is_evaluation_missing(self) -> bool:
    """Tells whether an earlier process ended before it evaluated this step."""
    return (
        0 < self._step < self._periods.num_steps
        and self._evaluations.is_due(self._step)
        and not self._recorder.has_evaluation(self._step)
    )

  def _periodic(self, should_stop: Callable[[], bool]) -> bool:
    """Evaluates and saves where that is due; False where it was stopped."""
    periods, done = self._periods, self._step
    self._checkpointer.check()
    self._on_evaluation(self._evaluations.take())
    limit = periods.wall_clock_limit_s
    passed_s = time.monotonic() - self._started
    if limit and passed_s > limit and self._stopped_by is None:
      self._stopped_by = "wall_clock_limit_s"
      self._recorder.event(
          "limit", f"step {done}: config.train.wall_clock_limit_s={limit}"
      )
    if done >= periods.num_steps:
      return True
    if self._evaluations.is_due(done) and not self._evaluate("", should_stop):
      return False
    if self._save_due:
      self._save(wait=False)
    return True

  def _evaluate(self, name: str, should_stop: Callable[[], bool]) -> bool:
    """Evaluates as it is due; False where it was stopped."""
    if not name and self._evaluations.beside:
      self._evaluations.start(self._step, self._work.gather_model())
      return True
    result = self._evaluations.run(
        name, self._step, self._work.gather_model(), should_stop
    )
    if result is not None:
      self._on_evaluation((self._step, result))
    return result is not None

  def _on_evaluation(self, found: tuple[int, dict[str, Any]] | None) -> None:
    """Shows the guards an evaluation, where there is one."""
    if found is not None:
      step, result = found
      for alarm in self._guards.check_accuracy(step, result["pass_at_1"]):
        self._on_alarm(alarm)

  def _on_alarm(self, alarm: guards_lib.Alarm) -> None:
    self._recorder.event("guard", f"{alarm.message} ({self._guards.action})")
    # A gap between trainer and sampler is a defect: no learning rate mends it.
    if self._guards.action == "stop":
      self._stopped_by = f"guard {alarm.name}"
    elif (
        self._guards.action == "lower_learning_rate"
        and alarm.name != "logprob_gap"
    ):
      self._work.scale_learning_rate(self._guards.learning_rate_factor)

  def _save(self, *, wait: bool) -> None:
    """Saves a checkpoint of this step, and drops journal that none needs.

    A periodic one that cannot be written (a full disk) is told and left out:
    the journal keeps what it would have covered. Not where the trainer is
    several processes, which then end, and start again from the one before.
    """
    if self._saved_step == self._step:
      return
    self._saved_at = time.monotonic()
    with self._recorder.span("checkpoint", step=self._step):
      data = self._service.get_state()
      history = [*self._applied_history, (self._step, data["applied"])]
      host_state = {
          "data": data,
          "applied_history": [list(pair) for pair in history],
          "guards": self._guards.get_state(),
          "recorder": self._recorder.get_state(),
          "stopped_by": self._stopped_by,
          "num_steps": self._periods.num_steps,
      }
      try:
        self._work.save(self._step, host_state, wait=wait)
      except OSError as error:
        if wait or not self._work.may_leave_out:
          raise
        self._recorder.event("checkpoint_failed", str(error))
        return
    self._saved_step = self._step
    self._applied_history = history
    self._drop_journal()

  def _drop_journal(self) -> None:
    """Keeps the journal behind the oldest checkpoint that may be restored."""
    complete = set(self._checkpointer.newest_steps())
    covered = [p for step, p in self._applied_history if step in complete]
    self._applied_history = [
        pair
        for pair in self._applied_history
        if pair[0] in complete or pair[0] == self._saved_step
    ]
    if covered:
      self._journal.truncate_before(min(covered))

  def _interrupt(self) -> bool:
    self._evaluations.close()
    self._service.stop_searchers(5.0)
    self._save(wait=True)
    self._recorder.event("interrupted", f"saved at step {self._step}")
    return False

  def _finish(self, should_stop: Callable[[], bool]) -> bool:
    note = self._recorder
    note.phase("finish")
    note.train_ended()
    with note.span("wait_searchers"):
      ledger = self._service.finish(self._step, _FINISH_S)
      self._on_evaluation(self._evaluations.finish())
    self._save(wait=True)
    # A longer run of the same directory has one of an earlier step.
    if not note.has_result("after", self._step):
      if not self._evaluate("after", should_stop):
        note.event("interrupted", "during the last evaluation")
        return False
    note.finish(self._step, ledger, self._stopped_by)
    return True
