# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""When and where a run evaluates its policy: in its turn, or beside the steps.

Beside: a thread samples from a copy of the params while trainer and searchers
go on, and its result is told as that of the step that it is of. At most one
runs at a time; one that falls due meanwhile is left out, with an event.
"""

from collections.abc import Callable, Mapping
import pathlib
import shutil
import threading
import time
from typing import Any, TYPE_CHECKING

import jax

from tba_jax import types
from tba_jax.system import jsonl
from tba_jax.training import evaluator as evaluator_lib
from tba_jax.training import periods as periods_lib

if TYPE_CHECKING:
  from tba_jax.monitor import recorder as recorder_lib


# Keeps the params that did best on the validation split.
#
# WORKDIR/best/model is a Hugging Face folder, WORKDIR/best/best.json says of
# which step it is and what it reached. The test split has no part in the
# choice:
# what is chosen by it would look better than it is.


METRIC = "pass_at_1"
SaveFn = Callable[[pathlib.Path, types.PyTree], None]


class BestModel:
  """Compares each evaluation with the best one, and keeps the better."""

  def __init__(self, folder: pathlib.Path, save: SaveFn | None):
    """Finds what an earlier process kept.

    Args:
      folder: WORKDIR/best; `best.partial` and `best.old` beside it are where
        one takes the other's place.
      save: writes params into a folder; None = nothing is kept.
    """
    self._folder = folder
    self._partial = folder.with_name(folder.name + ".partial")
    self._old = folder.with_name(folder.name + ".old")
    self._save = save
    if self._old.exists() and not folder.exists():
      self._old.rename(folder)
    found = jsonl.read_json(folder / "best.json") or {}
    self._best = found.get(METRIC, float("-inf"))

  def offer(
      self, step: int, params: types.PyTree, result: Mapping[str, Any]
  ) -> bool:
    """Keeps the params where the result is better; True where it was.

    Args:
      step: steps that the params have done.
      params: of the policy.
      result: of the evaluator.
    """
    if self._save is None or result[METRIC] <= self._best:
      return False
    shutil.rmtree(self._partial, ignore_errors=True)
    self._partial.mkdir(parents=True)
    self._save(self._partial / "model", params)
    names = ("split", METRIC, f"{METRIC}_interval", "num_prompts")
    kept = {name: result[name] for name in names if name in result}
    jsonl.atomic_write_json(self._partial / "best.json", {"step": step, **kept})
    # Params and what is said of them change together.
    shutil.rmtree(self._old, ignore_errors=True)
    if self._folder.exists():
      self._folder.rename(self._old)
    self._partial.rename(self._folder)
    shutil.rmtree(self._old, ignore_errors=True)
    self._best = result[METRIC]
    return True


# A thread that was told to stop ends with the batch that it is sampling.
_BATCH_S = 60.0


class Evaluations:
  """Evaluates before, while and after training, and records what it finds."""

  def __init__(
      self,
      *,
      evaluator: evaluator_lib.Evaluator,
      validator: evaluator_lib.Evaluator,
      best: BestModel,
      recorder: "recorder_lib.Recorder",
      periods: periods_lib.Periods,
      beside: bool,
      deadline_s: float,
  ):
    """Takes the parts.

    Args:
      evaluator: on held-out prompts, before and after.
      validator: while training, on a split that may be another one; it may
        share its sampler with `evaluator`.
      best: keeps the params that the validator found best.
      recorder: receives the results.
      periods: how often and over how many prompts.
      beside: evaluate in a thread while training.
      deadline_s: of an evaluation in the thread.
    """
    self._evaluator = evaluator
    self._validator = validator
    self._best = best
    self._recorder = recorder
    self._periods = periods
    self._beside = beside
    self._deadline_s = deadline_s
    # The train step takes its params' memory.
    self._copy = jax.jit(lambda tree: jax.tree.map(lambda x: x + 0, tree))
    self._thread: threading.Thread | None = None
    self._running_step = -1
    self._stop = threading.Event()
    self._result: dict[str, Any] | None = None
    self._error: Exception | None = None

  @property
  def beside(self) -> bool:
    return self._beside

  def is_due(self, step: int) -> bool:
    """Tells whether the params after `step` steps are to be evaluated."""
    every = self._periods.evaluate_every
    return bool(every) and step % every == 0

  def run(
      self,
      name: str,
      step: int,
      params: types.PyTree,
      should_stop: Callable[[], bool],
  ) -> dict[str, Any] | None:
    """Evaluates here and records; None where it was stopped.

    Args:
      name: "before", "after", or "" while training.
      step: steps that the params have done.
      params: of the policy.
      should_stop: asked between batches.
    """
    evaluator = self._evaluator if name else self._validator
    periods = self._periods
    with self._recorder.span("evaluate", step=step):
      try:
        result = evaluator.run(
            params,
            periods.final_prompts if name else periods.evaluate_prompts,
            version=step,
            should_stop=should_stop,
            on_progress=self._recorder.progress,
        )
      except evaluator_lib.Interrupted:
        return None
    self._recorder.evaluation(name, step, result)
    if not name:
      self._best.offer(step, params, result)
    return result

  def start(self, step: int, params: types.PyTree) -> None:
    """Begins to evaluate a copy of the params in the thread."""
    if self._thread is not None:
      self._recorder.event(
          "evaluation_skipped",
          f"step {step}: the evaluation of step {self._running_step} is not"
          " done; raise config.evaluate.every_steps or lower"
          " config.evaluate.num_prompts",
      )
      return
    self._running_step = step
    self._thread = threading.Thread(
        target=self._run_beside,
        args=(step, self._copy(params)),
        name="evaluate",
        daemon=True,
    )
    self._thread.start()

  def take(self) -> tuple[int, dict[str, Any]] | None:
    """Returns step and result of an evaluation that is done, once; else None.

    Raises:
      Exception: what the thread raised.
    """
    if self._thread is None or self._thread.is_alive():
      return None
    self._thread.join()
    self._thread = None
    if self._error is not None:
      raise self._error
    result, self._result = self._result, None
    if result is None:
      return None
    self._recorder.evaluation("", self._running_step, result)
    return self._running_step, result

  def finish(self) -> tuple[int, dict[str, Any]] | None:
    """Waits for the thread within its deadline; then as `take`.

    Raises:
      TimeoutError: it hangs in a batch.
    """
    self._join(self._deadline_s + _BATCH_S)
    return self.take()

  def close(self) -> None:
    """Stops the thread after its batch; what it was at is left out.

    Raises:
      TimeoutError: it hangs in a batch.
    """
    self._stop.set()
    self._join(_BATCH_S)

  def _join(self, timeout_s: float) -> None:
    if self._thread is not None:
      self._thread.join(timeout_s)
      if self._thread.is_alive():
        raise TimeoutError(
            f"the evaluation of step {self._running_step} hangs: a batch took"
            f" more than {_BATCH_S:g} s"
        )

  def _run_beside(self, step: int, params: types.PyTree) -> None:
    end = time.monotonic() + self._deadline_s
    try:
      with self._recorder.span("evaluate", lane="evaluate", step=step):
        result = self._validator.run(
            params,
            self._periods.evaluate_prompts,
            version=step,
            should_stop=lambda: self._stop.is_set() or time.monotonic() > end,
        )
        self._best.offer(step, params, result)
      self._result = result
    except evaluator_lib.Interrupted:
      if not self._stop.is_set():
        self._recorder.event(
            "evaluation_failed",
            f"step {step}: not done within config.evaluate.deadline_s"
            f"={self._deadline_s:g}",
        )
    except Exception as error:  # The trainer raises it.
      self._error = error
