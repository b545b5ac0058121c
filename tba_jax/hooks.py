# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Hooks of the trainer: publish, record, guard, evaluate, save.

Each hook is called with a step, its batch and its metrics. `Publish` never
waits for a device. The other hooks need the metrics, so `Behind` calls them for
the previous step while the devices compute the newest.

`TrainerRun` handles start and end: the first publication and evaluation, and
interrupting, resuming and completing a run. `programs/roles.py` makes the
components.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import time
from typing import Any, NamedTuple, Protocol

import jax
import ml_collections

from tba_jax import loop
from tba_jax import schedule
from tba_jax import types
from tba_jax.learning import checkpoint
from tba_jax.learning import device_work
from tba_jax.learning import guards as guards_lib
from tba_jax.learning import learner as learner_lib
from tba_jax.replay import decisions as decisions_lib
from tba_jax.run import recorder as recorder_lib
from tba_jax.system import processes
from tba_jax.transport import ports
from tba_jax.transport.groups import service as service_lib

# Seconds for searchers to deliver finished groups at the end of a run.
_FINISH_S = 15.0
_INTERRUPT_S = 5.0
# Seconds between polls for data while the devices compute.
_LOOK_S = 0.005
# Factor of guards.action='lower_learning_rate'.
_LOWER_BY = 0.5


@dataclasses.dataclass
class Stop:
  """Whether training should end before its last step.

  asked: () -> whether the process was asked to end, for example by a signal;
    the run can be resumed.
  reason: guard or limit that ended training, or "".
  """

  asked: Callable[[], bool]
  reason: str = ""

  def __bool__(self) -> bool:
    return bool(self.reason) or self.asked()


class Draws:
  """Yields a batch of the searchers' groups for each step.

  Ends after the last step, or before the next step once `stop` is true. A step
  that has begun to wait is still trained on if its groups have arrived.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      source: service_lib.ReplayService,
      recorder: recorder_lib.Recorder,
      publish: "Publish",
      stop: Stop,
      first: int,
      while_waiting: Callable[[], contextlib.AbstractContextManager[None]],
  ):
    """Initializes the iterator at step `first`.

    Args:
      publish: hook that publishes params before a step if the schedule is late.
      stop: whether to end training.
      while_waiting: () -> context manager for the wait for a step's data.
    """
    self._train = config.train
    self._source = source
    self._recorder = recorder
    self._publish = publish
    self._stop = stop
    self._first = first
    self._while_waiting = while_waiting

  def __iter__(self) -> Iterator[tuple[int, types.Draw]]:
    train, source = self._train, self._source
    for step in range(self._first, train.num_steps):
      if self._stop:
        return
      with (
          self._recorder.span("wait_fresh", step=step),
          self._while_waiting(),
      ):
        if not source.begin_step(step, self._stop.asked):
          return
      self._publish.begun(step)
      with self._recorder.span("draw", step=step):
        draw = source.draw(
            train.prompts_per_batch, train.completions_per_prompt, step
        )
        source.mark_drawn(draw)
      yield step, draw


class Publish:
  """Publishes the params after a step, every `publish.every_steps`.

  If the schedule is late, publishes once the next step has begun.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      work: device_work.DeviceWork,
      sink: ports.ParamsSink,
  ):
    self._is_late = schedule.make_schedule(config).is_late
    self._config = config
    self._work = work
    self._sink = sink

  def first(self, step: int, should_stop: Callable[[], bool]) -> None:
    """Publishes the first params for searchers, and waits for it."""
    version, field = step, "params"
    if self._is_late:
      every = self._config.publish.every_steps
      version = max(version - 1, 0) // every * every
      field = "sampling_params"
    self._work.publish(self._sink.submit, version, field)
    self._sink.wait(version, should_stop)

  def begun(self, step: int) -> None:
    """If the schedule is late, publishes the params that `step` starts from."""
    if self._is_late and step % self._config.publish.every_steps == 0:
      self._work.publish(self._sink.submit, step)

  def __call__(
      self, step: int, draw: types.Draw, metrics: Mapping[str, jax.Array]
  ) -> None:
    """Publishes the params after `step`, unless it is non-finite and fatal."""
    del draw
    done = step + 1
    every, last = self._config.publish.every_steps, self._config.train.num_steps
    if self._is_late or (done % every and done != last):
      return
    # The publisher's thread reads `nonfinite`, so that the loop does not wait
    # for the devices. A skipped step leaves the params unchanged, but is
    # published because searchers may be waiting for its version.
    skips = self._config.train.nonfinite == "skip"
    nonfinite = 0 if skips else metrics["nonfinite"]
    self._work.publish(
        functools.partial(self._sink.submit, nonfinite=nonfinite), done
    )


class _Running(NamedTuple):
  """A step in progress on the devices, with its asynchronous decisions."""

  step: int
  draw: types.Draw
  metrics: Mapping[str, jax.Array]
  decision: decisions_lib.Decision


class Behind:
  """Calls hooks with the metrics of a step once the next is dispatched.

  This way the devices do not wait for the host, and searchers are granted more
  prompts as soon as the next step's data has arrived. A step is read before the
  next one if no data has arrived when it finishes, or if its hooks must run
  before the next step.

  done: steps completed in the run, including earlier trainer processes.
  """

  def __init__(
      self,
      learner: learner_lib.Learner,
      source: service_lib.ReplayService,
      recorder: recorder_lib.Recorder,
      decisions: decisions_lib.DecisionLog | None,
      hooks: Sequence[loop.Hook],
      may_run_ahead: Callable[[int], bool],
      *,
      skips_nonfinite: bool,
  ):
    """Initializes the caller of the hooks.

    Args:
      source: replay service that drew the batches.
      recorder: receiver of spans and events.
      decisions: log of asynchronous decisions, or None.
      hooks: functions called with metrics on the host, in this order.
      may_run_ahead: (step) -> whether the step may begin before the previous
        one is read, once its data has arrived.
      skips_nonfinite: whether a non-finite step is an event, not an error.
    """
    self.done = int(learner.work.state.step)
    self._learner = learner
    self._source = source
    self._recorder = recorder
    self._decisions = decisions
    self._hooks = hooks
    self._may_run_ahead = may_run_ahead
    self._skips_nonfinite = skips_nonfinite
    self._running: _Running | None = None

  def __call__(
      self, step: int, draw: types.Draw, metrics: Mapping[str, jax.Array]
  ) -> None:
    before = self._running
    decision = decisions_lib.Decision(
        self._source.applied,
        before is not None,
        self._learner.work.learning_rate_scale,
    )
    self._running = _Running(step, draw, metrics, decision)
    if before is not None:
      self._end(before)
    if not self._waits_for_next(step + 1, metrics):
      self.flush()

  def _waits_for_next(
      self, step: int, metrics: Mapping[str, jax.Array]
  ) -> bool:
    """Returns whether `step` may begin before the previous one is read.

    Waits for the step's data while the devices compute `metrics`.
    """
    if not self._may_run_ahead(step):
      return False
    if self._source.is_ready(step):
      return True
    with self._recorder.span("step", step=step - 1):
      while not all(map(_is_computed, metrics.values())):
        time.sleep(_LOOK_S)
        if not self._may_run_ahead(step):
          return False
        if self._source.is_ready(step):
          return True
    return False

  def flush(self) -> None:
    """Calls the hooks for the step in progress, if any."""
    running, self._running = self._running, None
    if running is not None:
      self._end(running)

  def _end(self, running: _Running) -> None:
    """Reads and checks a step, and calls its hooks.

    Raises:
      FloatingPointError: non-finite step that must not be skipped.
    """
    step, draw = running.step, running.draw
    with self._recorder.span("step", step=step):
      metrics = self._learner.read(running.metrics)
    if self._decisions is not None:
      with self._recorder.span("record", step=step):
        self._decisions.step(step, running.decision, draw, metrics)
    if metrics["nonfinite"]:
      message = (
          f"step {step}: loss {metrics['loss']}, gradient norm"
          f" {metrics['grad_norm']}; prompts"
          f" {sorted(set(draw.prompt_ids.tolist()))}, versions"
          f" {int(draw.versions.min())} to {int(draw.versions.max())}"
      )
      if not self._skips_nonfinite:
        raise FloatingPointError(message)
      self._recorder.event("step_skipped", message)
    self._learner.finish()
    self.done = step + 1
    processes.note_begun("trainer")
    for hook in self._hooks:
      hook(step, draw, metrics)


def _is_computed(value: Any) -> bool:
  return not hasattr(value, "is_ready") or value.is_ready()


class Guard:
  """Acts on alarms from metrics, data and evaluations."""

  def __init__(
      self, config: ml_collections.ConfigDict, parts: "TrainerParts", stop: Stop
  ):
    self._num_steps = config.train.num_steps
    self._guards = parts.guards
    self._source = parts.source
    self._work = parts.learner.work
    self._recorder = parts.recorder
    self._stop = stop

  def __call__(
      self, step: int, draw: types.Draw, metrics: Mapping[str, float]
  ) -> None:
    del draw
    failures = self._source.take_failures()
    for alarm in (
        *self._guards.check_step(step, metrics),
        *self._guards.check_failures(step, failures),
    ):
      self._act(alarm, step + 1)

  def evaluated(self, done: int, result: tuple[int, Any] | None) -> None:
    """Checks an evaluation's (step, result), if any, after `done` steps."""
    if result is not None:
      step, values = result
      for alarm in self._guards.check_accuracy(
          step, values["pass_at_1"], values["split"]
      ):
        self._act(alarm, done)

  def _act(self, alarm: guards_lib.Alarm, done: int) -> None:
    self._recorder.event("guard", f"{alarm.message} ({alarm.action})")
    if alarm.action == "stop":
      if done < self._num_steps:
        self._stop.reason = self._stop.reason or f"guard {alarm.name}"
    # No learning rate fixes a gap between trainer and sampler, which is a bug.
    elif alarm.action == "lower_learning_rate" and alarm.name != "logprob_gap":
      self._work.scale_learning_rate(_LOWER_BY)


class TimeLimit:
  """Ends training once this process exceeds `train.wall_clock_limit_s`."""

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      recorder: recorder_lib.Recorder,
      stop: Stop,
  ):
    self._train = config.train
    self._recorder = recorder
    self._stop = stop
    self._started = time.monotonic()

  def __call__(self, step: int, draw: Any, metrics: Any) -> None:
    del draw, metrics
    limit_s, done = self._train.wall_clock_limit_s, step + 1
    passed_s = time.monotonic() - self._started
    if not limit_s or passed_s <= limit_s or self._stop.reason:
      return
    if done < self._train.num_steps:
      self._stop.reason = "wall_clock_limit_s"
      self._recorder.event(
          "limit", f"step {done}: config.train.wall_clock_limit_s={limit_s}"
      )


class StepEvaluator(Protocol):
  """Evaluates params between steps; see `evaluations.Evaluations`."""

  in_background: bool

  def is_due(self, step: int) -> bool:
    ...

  def run(
      self,
      name: str,
      step: int,
      params: types.PyTree,
      should_stop: Callable[[], bool],
  ) -> dict[str, Any] | None:
    ...

  def while_waiting(self) -> contextlib.AbstractContextManager[None]:
    ...

  def start(
      self,
      name: str,
      step: int,
      params: types.PyTree,
      wait_first: Callable[[], None] = ...,
  ) -> None:
    ...

  def take(self) -> tuple[int, dict[str, Any]] | None:
    ...

  def finish(
      self, should_stop: Callable[[], bool] = ...
  ) -> tuple[int, dict[str, Any]] | None:
    ...

  def close(self) -> None:
    ...


class Evaluate:
  """Evaluates every `evaluate.every_steps` steps, in this or another thread."""

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      evaluations: StepEvaluator,
      work: device_work.DeviceWork,
      guard: Guard,
      stop: Stop,
  ):
    self._num_steps = config.train.num_steps
    self._evaluations = evaluations
    self._work = work
    self._guard = guard
    self._stop = stop

  def is_due(self, done: int) -> bool:
    """Returns whether to evaluate the params after `done` steps."""
    return self._evaluations.is_due(done)

  def has_prompts(self, name: str) -> bool:
    """Returns whether the evaluation of this name has any prompts."""
    return self._evaluations.size(name) > 0

  def __call__(self, step: int, draw: Any, metrics: Any) -> None:
    del draw, metrics
    done = step + 1
    self._guard.evaluated(done, self._evaluations.take())
    if done < self._num_steps and self.is_due(done):
      self.run("", done)

  def run(self, name: str, step: int) -> bool:
    """Evaluates here or in the background; returns False if interrupted.

    Waits for an evaluation that is still in the background.
    """
    if not self.has_prompts(name):
      return True
    self.finish(step)
    if self._stop.asked():
      return False
    if not name and self._evaluations.in_background:
      self._evaluations.start(name, step, self._work.gather_model())
      return True
    result = self._evaluations.run(
        name, step, self._work.gather_model(), self._stop.asked
    )
    if result is None:
      return False
    self._guard.evaluated(step, (step, result))
    return True

  def start_before(
      self, step: int, initial_params: Callable[[], types.PyTree]
  ) -> bool:
    """Starts the evaluation before training in the background.

    Returns False if training must wait for it, because evaluations do not run
    in the background.

    Args:
      step: steps done so far, more than 0 after an interruption.
      initial_params: () -> params that the run started from.
    """
    if not self._evaluations.in_background:
      return False
    params = initial_params() if step else self._work.gather_model()
    # On CPU devices, let the step compile first. By then, programs shared with
    # searchers are in the cache.
    compiled = self._work.wait_compiled
    self._evaluations.start("before", 0, params, compiled)
    return True

  def finish(self, step: int) -> None:
    """Waits for an evaluation in the background, if any."""
    self._guard.evaluated(step, self._evaluations.finish(self._stop.asked))


class Save:
  """Saves checkpoints and drops journal segments that none of them needs.

  Does nothing without a checkpointer.

  If a periodic save fails (full disk), a single process reports an event and
  goes on, because the journal still covers the data. Several processes exit and
  restart from the previous checkpoint.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      parts: "TrainerParts",
      stop: Stop,
      saved: Mapping[str, Any],
  ):
    """Initializes the hook; `saved` is a checkpoint's host state or {}."""
    self._config = config
    self._parts = parts
    self._work = parts.learner.work
    self._stop = stop
    self._checkpointer = parts.checkpointer
    self._saved_step = self._checkpointer and self._checkpointer.latest_step()
    # (step, journal offset) of the checkpoints on disk.
    self._applied_history = [tuple(p) for p in saved.get("applied_history", ())]
    self._saved_at = time.monotonic()
    self._due = False

  def is_due(self, done: int) -> bool:
    """Returns, and remembers, whether to save after `done` steps."""
    if self._checkpointer is None:
      return False
    c = self._config.checkpoint
    late = c.every_s and time.monotonic() - self._saved_at >= c.every_s
    self._due = bool(late or (c.every_steps and done % c.every_steps == 0))
    return self._due

  def __call__(self, step: int, draw: Any, metrics: Any) -> None:
    del draw, metrics
    if self._checkpointer is None:
      return
    self._checkpointer.check()
    # Interrupted and complete runs save elsewhere, and wait.
    done = step + 1
    if self._due and done < self._config.train.num_steps:
      if not self._stop.asked():
        self.run(done, wait=False)

  def run(self, step: int, *, wait: bool) -> None:
    """Saves the state after `step` steps; raises OSError if `wait`."""
    if self._checkpointer is None or self._saved_step == step:
      return
    parts = self._parts
    self._saved_at = time.monotonic()
    with parts.recorder.span("checkpoint", step=step):
      # What a checkpoint covers is not redone, so it must be on record.
      parts.decisions.sync()
      parts.recorder.sync()
      data = parts.source.get_state()
      history = [*self._applied_history, (step, data["applied"])]
      host_state = {
          "data": data,
          "applied_history": [list(pair) for pair in history],
          "guards": parts.guards.get_state(),
          "recorder": parts.recorder.get_state(),
          "stopped_by": self._stop.reason or None,
          "config": self._config.to_dict(),
      }
      try:
        self._work.save(step, host_state, wait=wait)
      except OSError as error:
        if wait or not self._work.may_leave_out:
          raise
        parts.recorder.event("checkpoint_failed", str(error))
        return
    self._saved_step = step
    # Keep the journal from the oldest restorable checkpoint on.
    complete = set(self._checkpointer.newest_steps())
    covered = [offset for at, offset in history if at in complete]
    self._applied_history = [
        (at, offset)
        for at, offset in history
        if at in complete or at == self._saved_step
    ]
    if covered and not self._config.checkpoint.keep_journal:
      parts.source.drop_journal_before(min(covered))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerParts:
  """Components of a trainer.

  learner: owner of the newest checkpoint's state, or of the state at step 0.
  checkpointer: writer of checkpoints; None for a run without files.
  evaluations: runner of evaluations, in the loop or in the background.
  initial_params: () -> params that the run started from.
  guards: checks that stop or slow a diverging run.
  decisions: log of asynchronous decisions; None for a run without files.
  """

  learner: learner_lib.Learner
  source: service_lib.ReplayService
  sink: ports.ParamsSink
  checkpointer: checkpoint.Checkpointer | None
  evaluations: StepEvaluator
  initial_params: Callable[[], types.PyTree]
  guards: guards_lib.Guards
  recorder: recorder_lib.Recorder
  decisions: decisions_lib.DecisionLog | None


class TrainerRun:
  """A run of the trainer, from its checkpoint to its result."""

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      parts: TrainerParts,
      saved: Mapping[str, Any],
      changes: Mapping[str, Any],
  ):
    """Initializes the run.

    Args:
      saved: host state of the checkpoint, or {}.
      changes: settings that differ from the checkpoint's, by key.
    """
    self._config = config
    self._parts = parts
    self._saved = saved
    self._changes = changes

  def __call__(self, should_stop: Callable[[], bool]) -> bool:
    """Trains to the last step; if interrupted, saves and returns False.

    Raises:
      FloatingPointError: non-finite step; names step and prompts.
      DeadlineExceededError: searchers or store did not respond in time.
    """
    config, parts = self._config, self._parts
    recorder, source, learner = parts.recorder, parts.source, parts.learner
    # A run stopped by a guard or limit continues only with changed settings.
    stopped_by = None if self._changes else self._saved.get("stopped_by")
    stop = Stop(should_stop, stopped_by or "")
    if "optimizer.learning_rate" in self._changes:
      # Undo a guard's factor, which applied to the old rate.
      learner.work.scale_learning_rate(1 / learner.work.learning_rate_scale)

    publish = Publish(config, learner.work, parts.sink)
    guard = Guard(config, parts, stop)
    evaluate = Evaluate(config, parts.evaluations, learner.work, guard, stop)
    save = Save(config, parts, stop, self._saved)

    def record(step: int, draw: types.Draw, metrics: Any) -> None:
      with recorder.span("record", step=step):
        recorder.step(step, metrics, draw, source, parts.guards.failures)

    flow = schedule.make_schedule(config)

    def may_run_ahead(step: int) -> bool:
      # Evaluations and saves need params and buffer between two steps.
      saves = save.is_due(step)
      return not (
          step >= config.train.num_steps
          or evaluate.is_due(step)
          or saves
          or stop
          or not flow.may_run_ahead(step)
      )

    behind = Behind(
        learner,
        source,
        recorder,
        parts.decisions,
        [guard, record, TimeLimit(config, recorder, stop), evaluate, save],
        may_run_ahead,
        skips_nonfinite=config.train.nonfinite == "skip",
    )
    first = behind.done
    source.is_publishing = parts.sink.is_publishing
    publish.first(first, stop.asked)
    if self._evaluate_first(first, guard, evaluate):
      while_waiting = parts.evaluations.while_waiting
      draws = Draws(
          config, source, recorder, publish, stop, first, while_waiting
      )
      loop.run(draws, learner, [publish, behind])
      behind.flush()
    is_whole = behind.done >= config.train.num_steps or stop.reason
    if stop.asked() or not is_whole:
      return self._interrupt(behind.done, save)
    return self._finish(behind.done, stop, evaluate, save)

  def _evaluate_first(
      self, step: int, guard: Guard, evaluate: Evaluate
  ) -> bool:
    """Runs missing evaluations; returns False if interrupted."""
    recorder = self._parts.recorder
    # The checkpoint's guards may not have seen the newest evaluations.
    for result in recorder.evaluations(step):
      guard.evaluated(step, (result["step"], result))
    if evaluate.has_prompts("before") and not recorder.has_result("before"):
      # Open the queue first: searchers compile and sample meanwhile.
      self._parts.source.open(step)
      if evaluate.start_before(step, self._parts.initial_params):
        return True
      if step:
        recorder.event(
            "evaluation_lost",
            "eval.json lacks the evaluation before training; using the one"
            f" of step {step}",
        )
      return evaluate.run("before", step)
    # An earlier process may have ended before evaluating this step.
    if (
        0 < step < self._config.train.num_steps
        and evaluate.is_due(step)
        and not recorder.has_evaluation(step)
    ):
      return evaluate.run("", step)
    return True

  def _interrupt(self, step: int, save: Save) -> bool:
    self._parts.source.stop_searchers(_INTERRUPT_S)
    save.run(step, wait=True)
    self._parts.recorder.event("interrupted", f"saved at step {step}")
    # Do not wait: the thread may be waiting for completions, or hang.
    self._parts.evaluations.close()
    return False

  def _finish(
      self, step: int, stop: Stop, evaluate: Evaluate, save: Save
  ) -> bool:
    recorder = self._parts.recorder
    recorder.phase("finish")
    recorder.train_ended()
    with recorder.span("wait_searchers"):
      ledger = self._parts.source.finish(step, _FINISH_S)
      evaluate.finish(step)
    save.run(step, wait=True)
    # An extended run already has the result of an earlier step.
    if not recorder.has_result("after", step):
      if not evaluate.run("after", step):
        recorder.event("interrupted", "during the last evaluation")
        return False
    recorder.finish(step, ledger, stop.reason or None)
    return True
