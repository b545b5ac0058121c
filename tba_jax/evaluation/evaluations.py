# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Schedules evaluations before, during and after training.

During training the steps either wait, or a thread evaluates a copy of the
params; results are recorded under the step whose params were evaluated. Steps
wait for an evaluation that is not done when the next one falls due: programs of
one device run in turn, so that an evaluation hardly advances while the next
step is always queued. With a thread, the evaluation before training also runs
in it, mostly while steps wait for data.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import math
import pathlib
import shutil
import threading
import time
from typing import Any

import jax
import ml_collections

from tba_jax import types
from tba_jax.evaluation import evaluator as evaluator_lib
from tba_jax.models.hf import hf
from tba_jax.policy import policy as policy_lib
from tba_jax.run import metrics
from tba_jax.run import recorder as recorder_lib
from tba_jax.system import background
from tba_jax.system import jsonl


class BestModel:
  """Keeps the params that do best in the evaluations during training.

  WORKDIR/best/model is a Hugging Face folder; best/best.json has its step, its
  result by `metrics.deciding_metric`, and the split. A task without a
  validation split is evaluated on the held-out split, where the best result is
  biased upwards; a run reports the result of its last step.
  """

  def __init__(self, workdir: pathlib.Path, policy: policy_lib.Policy):
    """Reads the best result of an earlier process, if any.

    Raises ValueError if best.json is damaged: a worse model would replace it.
    """
    self._policy = policy
    self._folder = workdir / "best"
    # The new folder while it is written, and the old one while it is replaced.
    self._partial = workdir / "best.partial"
    self._old = workdir / "best.old"
    if self._old.exists() and not self._folder.exists():
      self._old.rename(self._folder)
    saved = jsonl.read_object(
        self._folder / "best.json", {"metric": str, "value": float}
    )
    self._metric = saved["metric"] if saved else ""
    self._best = saved["value"] if saved else float("-inf")

  def offer(
      self, step: int, params: types.PyTree, result: Mapping[str, Any]
  ) -> bool:
    """Saves the params if the result is the best; returns whether it is."""
    metric = metrics.deciding_metric(result)
    if metric is None:
      return False  # No completion could be judged.
    # A win rate is not comparable with a reward; pass@1 is a reward.
    names = {self._metric, metric}
    is_comparable = len(names) == 1 or "win_rate" not in names
    has_judge = "no_verdict" in result
    if has_judge and metric != "win_rate" and self._metric == "win_rate":
      return False  # The judge has failed this time.
    if is_comparable and result[metric] <= self._best:
      return False
    shutil.rmtree(self._partial, ignore_errors=True)
    self._partial.mkdir(parents=True)
    policy = self._policy
    hf.save(
        self._partial / "model", policy.model.config, params, policy.tokenizer
    )
    summary = {"step": step, "metric": metric, "value": result[metric]}
    names = ("split", f"{metric}_interval", "num_prompts")
    summary |= {name: result[name] for name in names if name in result}
    jsonl.atomic_write_json(self._partial / "best.json", summary)
    # Model and best.json are replaced together.
    shutil.rmtree(self._old, ignore_errors=True)
    if self._folder.exists():
      self._folder.rename(self._old)
    self._partial.rename(self._folder)
    shutil.rmtree(self._old, ignore_errors=True)
    self._metric, self._best = metric, result[metric]
    return True


# A batch of completions takes at most this long, in seconds.
BATCH_S = 60.0
# The evaluation before training yields to steps for this multiple of the time
# of its last batch.
GIVE_WAY = 3.0
# Seconds between two checks by a waiting thread.
_LOOK_S = 0.05


def is_in_background(
    config: ml_collections.ConfigDict, num_devices: int
) -> bool:
  """Returns whether evaluations run in parallel with the next steps.

  Steps wait in lockstep, so that guards act at the same step in every run; and
  on several devices, since two threads that launch collectives could order them
  differently on each device.
  """
  return (
      config.evaluate.background
      and not config.search.lockstep
      and num_devices == 1
  )


class Evaluations:
  """Evaluates before, during and after training, and records the results."""

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      evaluator: evaluator_lib.Evaluator,
      recorder: recorder_lib.Recorder,
      best: BestModel | None,
  ):
    """Makes both evaluators.

    Args:
      config: settings `evaluate`, `search.lockstep` and `mesh`.
      evaluator: used before and after training; its `while_training` is used
        during training.
      best: keeper of the best params evaluated during training; None = keep
        none.
    """
    self._config = config.evaluate
    self._evaluator = evaluator
    self._validator = evaluator.while_training()
    self._recorder = recorder
    self._best = best
    self.in_background = is_in_background(
        config, math.prod(config.mesh.values())
    )
    # A copy, since the train step donates the params.
    self._copy = jax.jit(lambda tree: jax.tree.map(lambda x: x + 0, tree))
    self._thread: background.Thread | None = None
    # Name of the evaluation in the thread, and its step.
    self._running = ("", -1)
    # Set while the trainer has nothing else to do.
    self._idle = threading.Event()
    self._result: dict[str, Any] | None = None

  def size(self, name: str) -> int:
    """Returns the prompts of an evaluation `name`, as in `run`; 0 = none."""
    c = self._config
    if name:
      return min(c.final_prompts, self._evaluator.num_prompts)
    return min(c.num_prompts, self._validator.num_prompts)

  def is_due(self, step: int) -> bool:
    """Returns whether the params after `step` steps are due for evaluation."""
    every = self._config.every_steps
    return bool(every) and step % every == 0 and self.size("") > 0

  def run(
      self,
      name: str,
      step: int,
      params: types.PyTree,
      should_stop: Callable[[], bool],
  ) -> dict[str, Any] | None:
    """Evaluates in this thread and records; returns None if stopped.

    Args:
      name: "before", "after", or "" during training.
      params: policy, on its mesh.
      should_stop: checked between batches.
    """
    with self._recorder.span("evaluate", step=step):
      try:
        result = self._evaluate(
            name, step, params, should_stop, self._recorder.progress
        )
      except evaluator_lib.Interrupted:
        return None
    self._recorder.evaluation(name, step, result)
    return result

  @contextlib.contextmanager
  def while_waiting(self) -> Iterator[None]:
    """Marks time in which the trainer waits and evaluations may continue."""
    self._idle.set()
    try:
      yield
    finally:
      self._idle.clear()

  def start(
      self,
      name: str,
      step: int,
      params: types.PyTree,
      wait_first: Callable[[], None] = lambda: None,
  ) -> None:
    """Starts evaluating a copy of the params in a thread; see also `finish`.

    Args:
      name, step, params: arguments of `run`.
      wait_first: function that the thread calls before it evaluates.
    """
    copy = self._copy(params)
    self._running, self._result = (name, step), None
    self._thread = background.Thread(
        f"evaluation of step {step}",
        lambda stop: wait_first()
        or self._run_in_background(name, step, copy, stop),
        close_s=BATCH_S,
    )

  def take(self) -> tuple[int, dict[str, Any]] | None:
    """Returns (step, result) once the thread is done; raises its error."""
    if self._thread is None or self._thread.is_alive():
      return None
    thread, self._thread = self._thread, None
    thread.check()
    if self._result is None:
      return None
    self._recorder.evaluation(*self._running, self._result)
    return self._running[1], self._result

  def finish(
      self, should_stop: Callable[[], bool] = lambda: False
  ) -> tuple[int, dict[str, Any]] | None:
    """Waits for the thread, if any, and takes its result.

    The wait ends when `should_stop` returns True. Raises TimeoutError if the
    thread hangs; the evaluation before training has no deadline.
    """
    name, step = self._running
    limit_s = math.inf if name else self._config.deadline_s + BATCH_S
    end = time.monotonic() + limit_s
    with self.while_waiting():
      while self._thread is not None and self._thread.is_alive():
        if should_stop():
          return None
        if time.monotonic() > end:
          raise TimeoutError(
              f"evaluation of step {step}: did not end within {limit_s:g} s"
          )
        time.sleep(_LOOK_S)
    return self.take()

  def close(self) -> None:
    """Stops the thread after its batch; records a result that is complete.

    Raises TimeoutError if the batch hangs.
    """
    thread, self._thread = self._thread, None
    if thread is None:
      return
    try:
      thread.close()
    except TimeoutError:
      raise
    except Exception:  # The thread has logged it.
      return
    if self._result is not None:
      self._recorder.evaluation(*self._running, self._result)

  def _evaluate(
      self,
      name: str,
      step: int,
      params: types.PyTree,
      should_stop: Callable[[], bool],
      on_progress: Callable[[int, int], None] | None = None,
  ) -> dict[str, Any]:
    evaluator = self._evaluator if name else self._validator
    run = evaluator.run_all if name else evaluator.run
    result = run(
        params,
        self.size(name),
        version=step,
        should_stop=should_stop,
        on_progress=on_progress,
    )
    if not name and self._best is not None:
      self._best.offer(step, params, result)
    return result

  def _run_in_background(
      self, name: str, step: int, params: types.PyTree, stop: threading.Event
  ) -> None:
    deadline_s = self._config.deadline_s
    end = batch_began = time.monotonic()
    end += math.inf if name else deadline_s

    def should_stop() -> bool:
      nonlocal batch_began
      if name:
        self._give_way(GIVE_WAY * (time.monotonic() - batch_began), stop)
        batch_began = time.monotonic()
      return stop.is_set() or time.monotonic() > end

    try:
      with self._recorder.span("evaluate", lane="evaluate", step=step):
        self._result = self._evaluate(name, step, params, should_stop)
    except evaluator_lib.Interrupted:
      if not stop.is_set():
        self._recorder.event(
            "evaluation_failed",
            f"step {step}: not done within config.evaluate.deadline_s"
            f"={deadline_s:g}",
        )

  def _give_way(self, most_s: float, stop: threading.Event) -> None:
    """Waits for the trainer to be idle, for `most_s` seconds at most."""
    end = time.monotonic() + most_s
    while not (stop.is_set() or self._idle.wait(_LOOK_S)):
      if time.monotonic() > end:
        return
