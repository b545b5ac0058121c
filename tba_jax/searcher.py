# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Searcher: samples granted prompts with the newest params and delivers groups.

The devices decode a stream of prompts. Assignments join the stream while slots
are free, and prompts leave it in any order once their completions are finished.
Another thread rewards and submits them. A stream ends when the next assignment
needs other params. `programs/roles.py` makes the components.
"""

import collections
from collections.abc import Callable, Sequence
from concurrent import futures
import contextlib
import dataclasses
import itertools
import math
import threading
import time
from typing import Any

from absl import logging
import numpy as np

from tba_jax import collect
from tba_jax import types
from tba_jax.run import metrics
from tba_jax.system import background
from tba_jax.system import processes
from tba_jax.transport import ports
from tba_jax.transport.params import version as version_lib

# Timeline lane of the judge's thread; the default lane is the devices'.
JUDGE_LANE = "judge"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearcherParts:
  """Components and capabilities of a searcher.

  sink: receiver of groups and source of assignments.
  put: (leaves of a version by path) -> params on the devices.
  problem: (leaves, params) -> how the params differ from the published version,
    or ""; see `probe.Check`.
  on_event: function called with (kind, message).
  warm_up: (params) -> None; compiles.
  has_room: (params) -> whether the devices have room for a second copy of the
    params after warm-up. If so, new params are transferred while the old ones
    still sample.
  judge_totals: () -> counts of the judge, for the statistics.
  kind: sampler and dtype, which may differ from other searchers'.
  price_per_hour: see `search.price_per_hour`.
  spans: timeline writer, which also measures busy time.
  swaps_in_flight: whether newer params may continue a completion.
  judge_shares_mesh: whether judge and sampler share a mesh. If so, the decoding
    thread waits for the judge, because two threads that launch collectives
    could order them differently on each device.
  reference_first: whether the decoding thread dispatches the reference pass,
    for the same reason. The pass then precedes the rewards and includes all
    groups.
  lag_steps: most versions that a required version may lag behind the newest.
  takes_newer: whether a version newer than the required one is acceptable.
  """

  sink: ports.GroupSink
  source: ports.ParamsSource
  collector: collect.Collector
  put: Callable[[dict[str, Any]], types.PyTree]
  problem: Callable[[dict[str, Any], types.PyTree], str]
  on_event: Callable[[str, str], None]
  warm_up: Callable[[types.PyTree], None]
  judge_totals: Callable[[], dict[str, Any]]
  spans: metrics.SpanWriter
  kind: str = ""
  price_per_hour: float = 0.0
  has_room: Callable[[types.PyTree], bool] = lambda params: False
  swaps_in_flight: bool = False
  judge_shares_mesh: bool = False
  reference_first: bool = False
  lag_steps: int = 0
  takes_newer: bool = False


@dataclasses.dataclass(frozen=True)
class _FinishedPrompts:
  """Sampled prompts on their way to the judge's thread.

  sampled: prompts, in the order in which they finished.
  ref_logprobs: function that waits for reference log-probs; None starts the
    reference pass after the rewards.
  epoch: start count of the trainer that published the params.
  """

  sampled: Sequence[collect.Sampled]
  ref_logprobs: Callable[[], Sequence[np.ndarray | None]] | None
  epoch: int


class _UnfinishedAssignment:
  """An assignment with prompts that are still being sampled."""

  def __init__(self, num_prompts: int):
    self._num_prompts = num_prompts
    self._sampled: list[collect.Sampled] = []

  def add(self, sampled: collect.Sampled) -> list[collect.Sampled] | None:
    """Adds a prompt; the last one returns all prompts, in order."""
    self._sampled.append(sampled)
    if len(self._sampled) < self._num_prompts:
      return None
    return sorted(self._sampled, key=lambda one: one.prompt)


class WrongParamsError(RuntimeError):
  """The searcher's params differ from the published ones."""


class Stage:
  """Prefetches the newest params to the devices in a background thread.

  Holds at most one copy besides the params in use.

  Args:
    put: see `SearcherParts`.
  """

  def __init__(
      self,
      source: ports.ParamsSource,
      put: Callable[[dict[str, Any]], types.PyTree],
      in_use: version_lib.Version,
  ):
    self._source = source
    self._put = put
    # Held by the thread that transfers params.
    self._lock = threading.Lock()
    self._newest_taken = in_use
    self._staged: tuple[version_lib.Version, types.PyTree] | None = None
    self._thread = background.Thread("stage", self._run)

  def take(self, version: version_lib.Version) -> types.PyTree | None:
    """Returns the staged params of a version, or None.

    Waits for a transfer in progress. Staging pauses until `resume`.
    """
    self._lock.acquire()
    staged, self._staged = self._staged, None
    self._newest_taken = max(self._newest_taken, version)
    return staged[1] if staged is not None and staged[0] == version else None

  def resume(self) -> None:
    """Resumes staging once the caller has dropped its old params."""
    self._lock.release()

  def close(self) -> None:
    self._thread.close()

  def _run(self, stop: threading.Event) -> None:
    while not stop.wait(STAGE_EVERY_S):
      newest = self._source.latest()
      with self._lock:
        staged = self._staged[0] if self._staged else self._newest_taken
        if newest is None or newest[0] <= max(staged, self._newest_taken):
          continue
        self._staged = None
        try:
          self._staged = newest[0], self._put(newest[1])
        except Exception as error:  # For example, out of memory.
          logging.warning("params are no longer prefetched: %s", error)
          return


# Seconds between polls for params to stage.
STAGE_EVERY_S = 0.05
# Number of consecutive refused versions after which a searcher gives up.
_MOST_REFUSED = 3
# Seconds between polls for another assignment during decoding.
ASK_EVERY_S = 0.1
# Seconds between log lines.
_LOG_EVERY_S = 10.0


class Searcher:
  """Samples the prompts granted to it and submits them with their rewards."""

  def __init__(self, parts: SearcherParts, should_stop: Callable[[], bool]):
    """Initializes the searcher; every wait checks `should_stop`."""
    self._parts = parts
    self._sink, self._source = parts.sink, parts.source
    self._collector, self._spans = parts.collector, parts.spans
    self._sink.works = self._spans.works
    self._should_stop = should_stop
    self._version: version_lib.Version | None = None
    self._params: types.PyTree = None
    self._mixed_completions = 0
    self._stage: Stage | None = None
    # Statistics for the trainer.
    self._stats: dict[str, Any] = {}
    # Number of versions refused in total, and those refused since the version
    # in use.
    self._num_refused = 0
    self._refused: list[version_lib.Version] = []
    # Start time of sampling, and busy seconds before that.
    self._started = self._busy_before_s = 0.0
    self._judging = futures.ThreadPoolExecutor(1, thread_name_prefix="judge")
    # Finished prompts for the judge's thread, and its tasks.
    self._finished: list[_FinishedPrompts] = []
    self._finished_lock = threading.Lock()
    self._tasks: collections.deque[futures.Future[None]] = collections.deque()
    self._judged = threading.Event()
    self._judged.set()
    # Whether the judge's thread is submitting, and thus may wait for credit.
    self._submits = False
    # Assignment that needs other params than the current stream.
    self._deferred: ports.Assignment | None = None
    # Number of prompts in the largest assignment so far.
    self._most_prompts = 1
    self._asked_s = -math.inf

  def close(self) -> None:
    """Ends the threads once their current work is done."""
    self._judging.shutdown()
    if self._stage is not None:
      self._stage.close()

  def run(self) -> bool:
    """Samples until a stop; returns whether the trainer ended the run.

    Raises:
      WrongParamsError: the params differ from the trainer's, and there are none
        to continue with or several consecutive versions were refused.
    """
    taken = None
    with self._spans.span("wait_params"):
      while taken is None and not self._stop():
        taken = self._wait_for(-1)
    if taken is None or self._stop():
      return self._sink.run_done
    self._load(*taken)
    with self._spans.span("compile"):
      self._parts.warm_up(self._params)
    if self._parts.has_room(self._params):
      self._stage = Stage(self._source, self._parts.put, self._version)
    processes.note_begun("searcher")
    self._started = time.monotonic()
    self._busy_before_s = self._spans.clock.busy_s
    while not self._stop():
      assignment = self._wait_for_assignment()
      if assignment is not None and self._use_version(assignment):
        self._stream(assignment)
        self._wait_for_judge(self._most_prompts)
    self._wait_for_judge()
    return self._sink.run_done

  def _stop(self) -> bool:
    return self._should_stop() or self._sink.stop_requested

  def _wait_for_assignment(self) -> ports.Assignment | None:
    """Returns the next granted assignment; None if the searcher should stop."""
    assignment, self._deferred = self._deferred, None
    if assignment is not None and assignment.epoch >= self._sink.epoch:
      return assignment
    with self._spans.span("wait_work"):
      while not self._stop():
        self._check_handed_over()
        assignment = self._sink.next_assignment(0.1)
        if assignment is not None:
          return assignment
    return None

  def _use_version(self, assignment: ports.Assignment) -> bool:
    """Switches to an assignment's params; returns False if it is obsolete."""
    wanted = assignment.require_version
    if not self._is_exact(assignment):
      return self._use_newest(assignment)
    with self._spans.span("wait_version"):
      while (taken := self._wait_for(wanted)) is None:
        self._check_handed_over()
        if self._stop() or self._sink.epoch > assignment.epoch:
          return False
        newest = self._source.latest()
        if newest and newest[0] > (
            assignment.epoch,
            wanted + self._parts.lag_steps,
        ):
          # While the store was unreachable, others delivered these prompts.
          return False
    return self._load(*taken, is_needed=True)

  def _wait_for(
      self, version: int
  ) -> tuple[version_lib.Version, dict[str, Any]] | None:
    """Waits for a version of the source; returns None after a timeout.

    The statistics report meanwhile whether a download is in progress.
    """
    taken = self._source.wait_for(version, 0.2)
    is_pulling = taken is None and self._source.is_pulling()
    if is_pulling != self._stats.get("is_pulling", False):
      self._set_stats({**self._stats, "is_pulling": is_pulling})
    return taken

  def _set_stats(self, stats: dict[str, Any]) -> None:
    self._stats = stats
    self._sink.set_stats(stats)

  def _is_exact(self, assignment: ports.Assignment) -> bool:
    """Returns whether an assignment must be sampled with a single version."""
    return assignment.require_version >= 0 and not self._parts.takes_newer

  def _use_newest(self, assignment: ports.Assignment) -> bool:
    """Waits for sufficiently new params and switches to the newest.

    Returns False if the assignment is obsolete.
    """
    oldest = assignment.epoch, assignment.require_version
    has_oldest = assignment.require_version >= 0
    taken = self._source.wait_for(-1, 0.0)
    if has_oldest and (taken is None or taken[0] < oldest):
      with self._spans.span("wait_version"):
        while taken is None or taken[0] < oldest:
          self._check_handed_over()
          if self._stop() or self._sink.epoch > assignment.epoch:
            return False
          # A version that was already dropped does not end the wait.
          self._wait_for(assignment.require_version)
          taken = self._source.wait_for(-1, 0.0)
    if taken is not None:
      # If the params in use are too old, they cannot stay in use.
      is_needed = has_oldest and (
          self._version is None or self._version < oldest
      )
      self._load(*taken, is_needed=is_needed)
    return True

  def _load(
      self,
      version: version_lib.Version,
      leaves: dict[str, Any],
      *,
      is_needed: bool = False,
  ) -> bool:
    """Calls `_put_params` between assignments, within a span."""
    if version == self._version:
      return True
    with self._spans.span("load", version=version.step):
      return self._put_params(version, leaves, is_needed=is_needed)

  def _put_params(
      self,
      version: version_lib.Version,
      leaves: dict[str, Any],
      *,
      is_needed: bool = False,
  ) -> bool:
    """Switches to a version; returns False if the older one stays in use.

    Args:
      version, leaves: a version of the source.
      is_needed: whether to raise an error instead of keeping the older version.
    """
    if version == self._version:
      return True
    if version in self._refused and not is_needed:
      return False
    params = self._stage.take(version) if self._stage is not None else None
    try:
      if params is None:
        params = self._parts.put(leaves)
      problem = self._parts.problem(leaves, params)
      if not problem:
        self._params, self._version, self._refused = params, version, []
        return True
    finally:
      params = None
      if self._stage is not None:
        self._stage.resume()
    self._refused.append(version)
    self._num_refused += 1
    message = f"version {version.step}: {problem}"
    if (
        is_needed
        or self._version is None
        or len(self._refused) >= _MOST_REFUSED
    ):
      self._parts.on_event("wrong_params", f"{message}; the searcher ends")
      raise WrongParamsError(
          f"{message}: this searcher would sample from another policy than the"
          " trainer's (docs/reference/faults.md)"
      )
    message += f"; the searcher continues with version {self._version.step}"
    self._parts.on_event("wrong_params", message)
    return False

  def _newer_params(self) -> tuple[int, types.PyTree] | None:
    """Returns newer params of this epoch, to continue completions with."""
    newest, version = self._source.latest(), self._version
    # A group has a single epoch, so the params of a restarted trainer have to
    # wait for the next stream.
    if (
        newest is None
        or newest[0] <= version
        or newest[0].epoch != version.epoch
    ):
      return None
    if not self._put_params(*newest):
      return None
    return self._version.step, self._params

  def _stream(self, first: ports.Assignment) -> None:
    """Decodes an assignment and those that join it; hands prompts over.

    Ends once newer params are due, unless they may be swapped in flight.
    """
    assignments = [first]
    is_exact = self._is_exact(first)
    # By position.
    unfinished: dict[int, _UnfinishedAssignment] = {}

    def more() -> Sequence[collect.Prompt] | None:
      assignment = (
          assignments.pop()
          if assignments
          else self._joining_assignment(is_exact)
      )
      if assignment is None:
        return None
      # Skip prompts that were granted again but are still being sampled.
      prompts = [p for p in assignment.prompts if p[0] not in unfinished]
      positions = [position for position, *_ in prompts]
      self._sink.begun_s.update(dict.fromkeys(positions, time.monotonic()))
      pending = _UnfinishedAssignment(len(positions))
      unfinished.update(dict.fromkeys(positions, pending))
      self._most_prompts = max(self._most_prompts, len(positions))
      return prompts or None

    swaps = self._parts.swaps_in_flight and not is_exact
    finished = self._collector.stream(
        more,
        self._params,
        self._version.step,
        self._newer_params if swaps else None,
    )
    with contextlib.closing(finished):
      while True:
        with self._spans.span("decode", version=self._version.step):
          sampled = next(finished, None)
        if sampled is None:
          return
        self._note_mixed(sampled)
        finished_assignments = [
            unfinished.pop(one.prompt[0]).add(one) for one in sampled
        ]
        if not self._collector.has_reference:
          self._hand_over(sampled)
          continue
        # Reference passes run on whole assignments, so that their bits do not
        # depend on which prompts happen to finish together.
        for assignment in filter(None, finished_assignments):
          self._hand_over(assignment)

  def _joining_assignment(self, is_exact: bool) -> ports.Assignment | None:
    """Returns a granted assignment that may join the stream, or None.

    No assignment joins while the judge's thread is an assignment behind.
    """
    now_s = time.monotonic()
    if self._deferred is not None or now_s < self._asked_s + ASK_EVERY_S:
      return None
    newest = self._source.latest()
    is_newer = newest is not None and newest[0] > self._version
    if is_newer and not is_exact and newest[0] not in self._refused:
      comes_in_flight = newest[0].epoch == self._version.epoch
      if not (self._parts.swaps_in_flight and comes_in_flight):
        return None
    if self._sink.epoch > self._version.epoch:
      return None  # A restarted trainer grants undelivered prompts again.
    if self._stop() or self._num_finished() >= self._most_prompts:
      return None
    assignment = self._sink.next_assignment(0.0)
    if assignment is None:
      self._asked_s = now_s
      return None
    wanted = assignment.epoch, assignment.require_version
    is_new_enough = self._version >= wanted
    if is_exact:
      is_new_enough = self._version == wanted
    if not is_new_enough or self._is_exact(assignment) != is_exact:
      # The assignment has to wait for its params.
      self._deferred = assignment
      return None
    return assignment

  def _note_mixed(self, sampled: Sequence[collect.Sampled]) -> None:
    for one in sampled:
      c = one.completions
      is_mixed_S = (c.token_versions > c.versions[:, None]).any(1)
      self._mixed_completions += int(is_mixed_S.sum())

  def _hand_over(self, sampled: Sequence[collect.Sampled]) -> None:
    """Passes finished prompts to the judge's thread."""
    ref_logprobs = None
    if self._parts.reference_first and self._collector.has_reference:
      with self._spans.span("reference"):
        ref_logprobs = self._collector.start_reference(sampled)
    epoch = self._version.epoch  # A stream is sampled within one epoch.
    with self._finished_lock:
      self._finished.append(_FinishedPrompts(sampled, ref_logprobs, epoch))
      self._judged.clear()
    self._tasks.append(self._judging.submit(self._judge_and_submit))
    if self._parts.judge_shares_mesh:
      with self._spans.span("wait_credit" if self._submits else "reward"):
        self._judged.wait()
    self._check_handed_over()

  def _check_handed_over(self) -> None:
    """Raises an error of the judge's thread, if any; does not wait."""
    while self._tasks and self._tasks[0].done():
      self._tasks.popleft().result()

  def _num_finished(self) -> int:
    """Returns the number of prompts waiting for the judge's thread."""
    with self._finished_lock:
      return sum(len(one.sampled) for one in self._finished)

  def _wait_for_judge(self, most_prompts: int = 0) -> None:
    """Waits for the judge's thread to catch up; raises its error.

    Args:
      most_prompts: ends the wait when fewer prompts are pending; 0 waits until
        the thread is done.
    """
    # Waiting for a slow judge counts as busy, waiting for credit as idle.
    while self._tasks and self._num_finished() >= most_prompts:
      if not self._submits:
        with self._spans.span("reward"):
          self._judged.wait()
      with self._spans.span("wait_credit"):
        self._tasks.popleft().result()

  def _judge_and_submit(self) -> None:
    """Rewards and submits all finished prompts."""
    with self._finished_lock:
      over, self._finished = self._finished, []
    if not over:
      return  # An earlier task took them.
    try:
      with self._spans.span("reward", lane=JUDGE_LANE):
        rewards = iter(
            self._collector.rewards([one for o in over for one in o.sampled])
        )
        rewards_P = [[*itertools.islice(rewards, len(o.sampled))] for o in over]
      with self._spans.span("reference", lane=JUDGE_LANE):
        start = self._collector.start_reference
        ref_logprobs_P = [
            (o.ref_logprobs or start(o.sampled, own_P))()
            for o, own_P in zip(over, rewards_P)
        ]
      self._submits = True
    finally:
      self._judged.set()
    groups = [
        group
        for o, *values in zip(over, rewards_P, ref_logprobs_P)
        for group in self._collector.groups(o.sampled, *values, o.epoch)
    ]
    # Their age is measured up to here, before any wait for credit.
    for group in groups:
      self._sink.begun_s.pop(group.position, None)
    with self._spans.span("wait_credit", lane=JUDGE_LANE):
      self._sink.submit(groups, self._stop)
    self._submits = False
    self._report()

  def _report(self) -> None:
    """Reports rates since the start to the trainer."""
    busy_s = self._spans.clock.busy_s - self._busy_before_s
    wall_s = max(time.monotonic() - self._started, 1e-9)
    totals = self._sink.totals
    logging.log_every_n_seconds(
        logging.INFO,
        "%d completions, %.1f tokens/s, of version %d",
        _LOG_EVERY_S,
        totals["completions"],
        totals["tokens"] / wall_s,
        self._version.step,
    )
    self._set_stats(
        {
            **self._collector.stats(wall_s),
            "samples_per_s": totals["completions"] / wall_s,
            "tokens_per_s": totals["tokens"] / wall_s,
            "version": self._version.step,
            "busy_s": busy_s,
            "wall_s": wall_s,
            "busy_share": min(1.0, busy_s / wall_s),
            "refused_versions": self._source.stats.refused + self._num_refused,
            "mixed_completions": self._mixed_completions,
            "kind": self._parts.kind,
            "cost": self._parts.price_per_hour * wall_s / 3600.0,
            "rewards": self._parts.judge_totals(),
        }
    )
