# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trainer: draws batches, trains, publishes, evaluates, saves.

`Trainer.run` is the training loop. While the devices work on one step, the host
draws and dispatches the next one, if its data has already arrived.
`programs/roles.py` makes the parts.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import time
from typing import Any, NamedTuple

import jax
import ml_collections

from tba_jax.channels import ports
from tba_jax.evaluation import evaluations as evaluations_lib
from tba_jax.learning import checkpoint
from tba_jax.learning import guards as guards_lib
from tba_jax.learning import learner as learner_lib
from tba_jax.learning import train_step
from tba_jax.monitor import recorder as recorder_lib
from tba_jax.replay import buffer as buffer_lib
from tba_jax.replay import decisions as decisions_lib

# Seconds that searchers get to deliver finished groups at the end of a run.
_FINISH_S = 15.0
_INTERRUPT_S = 5.0
# Minimum time allowed for publishing the first params.
_PUBLISH_S = 60.0
# Factor of guards.action='lower_learning_rate'.
_LOWER_BY = 0.5


class Running(NamedTuple):
  """A step that the devices work on.

  draw: its batch, as drawn.
  metrics: its metrics, on the devices.
  decision: decisions of asynchrony about it.
  """

  draw: buffer_lib.Draw
  metrics: dict[str, jax.Array]
  decision: decisions_lib.Decision


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
  """The parts of a trainer.

  learner: learner, whose state is that of the newest checkpoint, or of step 0.
  source: source of the data.
  sink: takes the params that are published.
  checkpointer: writer of checkpoints.
  evaluations: runs evaluations, in the loop or beside it.
  guards: guards against a run that goes wrong.
  recorder: writer of metrics, events and results.
  decisions: log of the decisions of asynchrony.
  """

  learner: learner_lib.Learner
  source: ports.GroupSource
  sink: ports.ParamsSink
  checkpointer: checkpoint.Checkpointer
  evaluations: evaluations_lib.Evaluations
  guards: guards_lib.Guards
  recorder: recorder_lib.Recorder
  decisions: decisions_lib.DecisionLog


class Trainer:
  """The training loop, on process 0 of a trainer."""

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      parts: Parts,
      saved: Mapping[str, Any],
  ):
    """Takes the parts, and `saved`, the checkpoint's host state or {}."""
    self._config = config
    self._learner, self._work = parts.learner, parts.learner.work
    self._source, self._sink = parts.source, parts.sink
    self._checkpointer = parts.checkpointer
    self._evaluations = parts.evaluations
    self._guards = parts.guards
    self._recorder = parts.recorder
    self._decisions = parts.decisions
    self._step = int(self._work.state.step)
    self._saved_step = self._checkpointer.latest_step()
    # (step, journal position) of the checkpoints on disk.
    self._applied_history = [tuple(p) for p in saved.get("applied_history", ())]
    # Why training ended before its last step. Raising `train.num_steps`
    # resumes such a run.
    same_end = saved.get("num_steps") == config.train.num_steps
    self._stopped_by = saved.get("stopped_by") if same_end else None
    self._started = self._saved_at = time.monotonic()
    self._save_due = False

  def run(self, should_stop: Callable[[], bool]) -> bool:
    """Trains to the last step; returns False if interrupted, after saving.

    Raises:
      FloatingPointError: non-finite step; the message has step and prompts.
      DeadlineExceededError: searchers or store sent nothing in time.
    """
    recorder, num_steps = self._recorder, self._config.train.num_steps
    self._publish_first()
    # The guards of the checkpoint may not know of the newest.
    for result in recorder.evaluations(self._step):
      self._check_accuracy((result["step"], result))
    if not recorder.has_result("before"):
      if self._step:
        recorder.event(
            "evaluation_lost",
            "eval.json lacks the evaluation before training; using that of"
            f" step {self._step}",
        )
      # Open the queue first: searchers compile and sample meanwhile.
      self._source.open(self._step)
      if not self._evaluate("before", should_stop):
        return self._interrupt()
    elif self._is_evaluation_missing():
      if not self._evaluate("", should_stop):
        return self._interrupt()
    running = None
    while running or (self._step < num_steps and self._stopped_by is None):
      running = running or self._wait_and_start(should_stop)
      if running is None:
        return self._interrupt()
      draw, metrics, decision = running
      self._publish_if_due(metrics)
      # Dispatch the next step before reading this one's metrics: the devices
      # need not wait for the host.
      running = self._start_ahead(should_stop)
      with recorder.span("step", step=self._step):
        metrics = jax.device_get(metrics)
      metrics = {k: float(v) for k, v in metrics.items()}
      self._end_step(draw, metrics, decision)
      if not self._evaluate_and_save_if_due(should_stop):
        return self._interrupt()
      if should_stop() and running is None:
        return self._interrupt()
    return self._finish(should_stop)

  @property
  def _publishes_late(self) -> bool:
    """With a lag, params are published once their round's data has arrived."""
    return train_step.keeps_params(self._config)

  def _publish_first(self) -> None:
    """Publishes the params that the current round is to be sampled with."""
    version, field = self._step, "params"
    if self._publishes_late:
      every = self._config.publish.every_steps
      version = max(version - 1, 0) // every * every
      field = "sampling_params"
    self._work.publish(self._sink.submit, version, field)
    deadline_s = max(_PUBLISH_S, 2 * self._config.store.deadline_s)
    self._sink.wait(version, deadline_s)

  def _publish_if_due(self, metrics: dict[str, jax.Array]) -> None:
    """Publishes the step in progress, provided it turns out finite."""
    done = self._step + 1
    every, last = self._config.publish.every_steps, self._config.train.num_steps
    if self._publishes_late or (done % every and done != last):
      return
    # The publisher's thread reads `nonfinite`: the loop does not wait for the
    # devices. A skipped step leaves the params unchanged and is published all
    # the same, since searchers may be waiting for its version.
    skips = self._config.train.nonfinite == "skip"
    nonfinite = 0 if skips else metrics["nonfinite"]
    self._work.publish(
        functools.partial(self._sink.submit, nonfinite=nonfinite), done
    )

  def _wait_and_start(self, should_stop: Callable[[], bool]) -> Running | None:
    """Waits for the step's data and starts it; returns None if stopped."""
    with self._recorder.span("wait_fresh", step=self._step):
      begun = self._begin(self._step, should_stop)
    return self._start(self._step, ahead=False) if begun else None

  def _start_ahead(self, should_stop: Callable[[], bool]) -> Running | None:
    """Starts the next step unless something must happen before it."""
    done = self._step + 1
    self._save_due = self._is_save_due(done)
    if (
        done >= self._config.train.num_steps
        # Evaluations and saves must see params and buffer between two steps.
        or self._evaluations.is_due(done)
        or self._save_due
        or should_stop()
        or self._stopped_by is not None
        or not self._source.is_ready(done)
        or not self._begin(done, should_stop)
    ):
      return None
    return self._start(done, ahead=True)

  def _begin(self, step: int, should_stop: Callable[[], bool]) -> bool:
    """Waits for the step's data; with a lag, opens the next round."""
    begun = self._source.begin_step(step, should_stop)
    if begun and self._publishes_late:
      if step % self._config.publish.every_steps == 0:
        self._work.publish(self._sink.submit, step)
      self._source.open_next(step)
    return begun

  def _start(self, step: int, *, ahead: bool) -> Running:
    """Draws a batch and dispatches the step; `ahead` of the end of another."""
    train = self._config.train
    decision = decisions_lib.Decision(
        self._source.applied, ahead, self._work.learning_rate_scale
    )
    with self._recorder.span("draw", step=step):
      draw = self._source.draw(
          train.prompts_per_batch, train.completions_per_prompt, step
      )
      self._source.mark_trained(draw)
      batch = self._learner.make(draw)
    with self._recorder.span("step", step=step):
      return Running(draw, self._work.train(batch), decision)

  def _end_step(
      self,
      draw: buffer_lib.Draw,
      metrics: dict[str, float],
      decision: decisions_lib.Decision,
  ) -> None:
    """Checks and records a finished step."""
    step = self._step
    with self._recorder.span("record", step=step):
      self._decisions.step(step, decision, draw, metrics)
    if metrics["nonfinite"]:
      message = (
          f"step {step}: loss {metrics['loss']}, gradient norm"
          f" {metrics['grad_norm']}; prompts"
          f" {sorted(set(draw.prompt_ids.tolist()))}, versions"
          f" {int(draw.versions.min())} to {int(draw.versions.max())}"
      )
      if self._config.train.nonfinite == "stop":
        raise FloatingPointError(message)
      self._recorder.event("step_skipped", message)
    self._learner.finish()
    self._step = step + 1
    for alarm in self._guards.check_step(step, metrics):
      self._on_alarm(alarm)
    with self._recorder.span("record", step=step):
      self._recorder.step(step, metrics, draw, self._source)

  def _is_save_due(self, done: int) -> bool:
    c = self._config.checkpoint
    if c.every_steps and done % c.every_steps == 0:
      return True
    return bool(c.every_s) and time.monotonic() - self._saved_at >= c.every_s

  def _is_evaluation_missing(self) -> bool:
    """Returns whether an earlier process ended before evaluating this step."""
    return (
        0 < self._step < self._config.train.num_steps
        and self._evaluations.is_due(self._step)
        and not self._recorder.has_evaluation(self._step)
    )

  def _evaluate_and_save_if_due(self, should_stop: Callable[[], bool]) -> bool:
    """Returns False if an evaluation was interrupted."""
    done = self._step
    self._checkpointer.check()
    self._check_accuracy(self._evaluations.take())
    if done >= self._config.train.num_steps:
      return True
    limit_s = self._config.train.wall_clock_limit_s
    passed_s = time.monotonic() - self._started
    if limit_s and passed_s > limit_s and self._stopped_by is None:
      self._stopped_by = "wall_clock_limit_s"
      self._recorder.event(
          "limit", f"step {done}: config.train.wall_clock_limit_s={limit_s}"
      )
    if self._evaluations.is_due(done) and not self._evaluate("", should_stop):
      return False
    if self._save_due:
      self._save(wait=False)
    return True

  def _evaluate(self, name: str, should_stop: Callable[[], bool]) -> bool:
    """Evaluates, or starts to in a thread; returns False if interrupted."""
    if not name and self._evaluations.beside:
      self._evaluations.start(self._step, self._work.gather_model())
      return True
    result = self._evaluations.run(
        name, self._step, self._work.gather_model(), should_stop
    )
    if result is not None:
      self._check_accuracy((self._step, result))
    return result is not None

  def _check_accuracy(
      self, evaluated: tuple[int, dict[str, Any]] | None
  ) -> None:
    """Passes the (step, result) of an evaluation, if any, to the guards."""
    if evaluated is not None:
      step, result = evaluated
      for alarm in self._guards.check_accuracy(
          step, result["pass_at_1"], result["split"]
      ):
        self._on_alarm(alarm)

  def _on_alarm(self, alarm: guards_lib.Alarm) -> None:
    guards = self._config.guards
    action = guards.action
    self._recorder.event("guard", f"{alarm.message} ({action})")
    if action == "stop":
      if self._step < self._config.train.num_steps:
        self._stopped_by = self._stopped_by or f"guard {alarm.name}"
    # A gap between trainer and sampler is a bug: no learning rate fixes it.
    elif action == "lower_learning_rate" and alarm.name != "logprob_gap":
      self._work.scale_learning_rate(_LOWER_BY)

  def _save(self, *, wait: bool) -> None:
    """Saves a checkpoint and drops journal segments that none needs any more.

    One process skips a periodic save that fails (a full disk) with an event:
    the journal still covers it. Several processes end, and restart from the
    previous checkpoint.
    """
    if self._saved_step == self._step:
      return
    self._saved_at = time.monotonic()
    with self._recorder.span("checkpoint", step=self._step):
      self._decisions.sync()
      data = self._source.get_state()
      history = [*self._applied_history, (self._step, data["applied"])]
      host_state = {
          "data": data,
          "applied_history": [list(pair) for pair in history],
          "guards": self._guards.get_state(),
          "recorder": self._recorder.get_state(),
          "stopped_by": self._stopped_by,
          "num_steps": self._config.train.num_steps,
      }
      try:
        self._work.save(self._step, host_state, wait=wait)
      except OSError as error:
        if wait or not self._work.may_leave_out:
          raise
        self._recorder.event("checkpoint_failed", str(error))
        return
    self._saved_step = self._step
    # Keep the journal from the oldest restorable checkpoint on.
    complete = set(self._checkpointer.newest_steps())
    covered = [position for step, position in history if step in complete]
    self._applied_history = [
        (step, position)
        for step, position in history
        if step in complete or step == self._saved_step
    ]
    if covered and not self._config.checkpoint.keep_journal:
      self._source.drop_journal_before(min(covered))

  def _interrupt(self) -> bool:
    self._source.stop_searchers(_INTERRUPT_S)
    self._save(wait=True)
    self._recorder.event("interrupted", f"saved at step {self._step}")
    # The thread may be waiting for a batch of completions, or may hang.
    self._evaluations.close()
    return False

  def _finish(self, should_stop: Callable[[], bool]) -> bool:
    recorder = self._recorder
    recorder.phase("finish")
    recorder.train_ended()
    with recorder.span("wait_searchers"):
      ledger = self._source.finish(self._step, _FINISH_S)
      self._check_accuracy(self._evaluations.finish())
    self._save(wait=True)
    # A run with a raised `train.num_steps` has the result of an earlier step.
    if not recorder.has_result("after", self._step):
      if not self._evaluate("after", should_stop):
        recorder.event("interrupted", "during the last evaluation")
        return False
    recorder.finish(self._step, ledger, self._stopped_by)
    return True
