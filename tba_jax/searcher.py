# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Searcher: samples what it is granted with the newest params, and delivers.

The devices decode one stream of prompts: blocks join it while slots are free,
and prompts leave it in any order, once their completions are over. A thread
rewards and submits them meanwhile. A stream ends where its blocks need other
params. `programs/roles.py` makes the parts.
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

# The timeline has two lanes: the devices and the judge's thread.
JUDGE_LANE = "judge"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearcherParts:
  """The parts of a searcher.

  sink: takes groups, and hands out assignments.
  source: source of the params.
  collector: collector of training prompts.
  put: leaves of a version by path -> params for the collector, on the devices.
  problem: (these leaves, these params) -> why the params are not the version's,
    "" if they are; see `probe.Check`.
  on_event: function called with (kind, message).
  warm_up: compiles, given params.
  has_room: whether the devices have room for another copy of params that they
    have, once warmed up; then new ones get there while the old ones sample.
  judge_totals: () -> counts of the judge, for the statistics.
  spans: writer of the timeline, which knows the busy time.
  swaps_in_flight: whether newer params may go on with a completion.
  judge_shares_mesh: whether the judge uses the mesh that decodes; then the
    thread that decodes waits for it, since two threads that launch collectives
    could order them differently on each device.
  reference_first: whether the thread that decodes dispatches the reference
    pass, for the same reason; it then comes before the rewards, and leaves out
    no group.
  lag_steps: versions by which a required one may be behind the newest.
  takes_newer: whether a version newer than a required one will do.
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
  has_room: Callable[[types.PyTree], bool] = lambda params: False
  swaps_in_flight: bool = False
  judge_shares_mesh: bool = False
  reference_first: bool = False
  lag_steps: int = 0
  takes_newer: bool = False


@dataclasses.dataclass(frozen=True)
class _Over:
  """Prompts that are sampled.

  sampled: prompts in the order in which they ended.
  ref_logprobs: function that waits for their reference log-probs; None starts
    the pass once they are rewarded.
  epoch: counts restarts of the trainer; the params are from it.
  """

  sampled: Sequence[collect.Sampled]
  ref_logprobs: Callable[[], Sequence[np.ndarray | None]] | None
  epoch: int


class _Unfinished:
  """A block, prompts of which are still sampled."""

  def __init__(self, num_prompts: int):
    self._num_prompts = num_prompts
    self._sampled: list[collect.Sampled] = []

  def add(self, sampled: collect.Sampled) -> list[collect.Sampled] | None:
    """Adds a prompt; returns all in their order once none is missing."""
    self._sampled.append(sampled)
    if len(self._sampled) < self._num_prompts:
      return None
    return sorted(self._sampled, key=lambda one: one.prompt)


class WrongParamsError(RuntimeError):
  """The searcher cannot make the params that the trainer published."""


class Stage:
  """Puts the newest params on the devices, in a thread, before they are used.

  Besides those in use there is one copy at a time.

  Args:
    source: source of the params.
    put: see `SearcherParts`.
    in_use: version in use.
  """

  def __init__(
      self,
      source: ports.ParamsSource,
      put: Callable[[dict[str, Any]], types.PyTree],
      in_use: version_lib.Version,
  ):
    self._source = source
    self._put = put
    # Held while params are put, by whoever puts them.
    self._lock = threading.Lock()
    self._newest_taken = in_use
    self._staged: tuple[version_lib.Version, types.PyTree] | None = None
    self._thread = background.Thread("stage", self._run)

  def take(self, version: version_lib.Version) -> types.PyTree | None:
    """Returns the params of a version, None unless they are staged.

    Waits if params are on their way. Nothing is staged until `resume`.
    """
    self._lock.acquire()
    staged, self._staged = self._staged, None
    self._newest_taken = max(self._newest_taken, version)
    return staged[1] if staged is not None and staged[0] == version else None

  def resume(self) -> None:
    """Goes on staging: params that are not used any more have been dropped."""
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
        except Exception as error:  # Such as a lack of memory.
          logging.warning("params are not put ahead any more: %s", error)
          return


# Interval of looking for params to stage.
STAGE_EVERY_S = 0.05
# Versions refused in a row after which a searcher gives up.
_MOST_REFUSED = 3
# Seconds between requests for another block while others are decoded.
ASK_EVERY_S = 0.1
# Seconds between lines in the log.
_LOG_EVERY_S = 10.0


class Searcher:
  """Samples the prompts granted to it and submits them with their rewards."""

  def __init__(self, parts: SearcherParts, should_stop: Callable[[], bool]):
    """Takes the parts; `should_stop` is checked in every wait."""
    self._parts = parts
    self._sink, self._source = parts.sink, parts.source
    self._collector, self._spans = parts.collector, parts.spans
    self._sink.works = self._spans.works
    self._should_stop = should_stop
    self._version: version_lib.Version | None = None
    self._params: types.PyTree = None
    self._mixed_completions = 0
    self._stage: Stage | None = None
    # The statistics that the trainer sees.
    self._stats: dict[str, Any] = {}
    # Versions refused: all, and those since the one in use.
    self._num_refused = 0
    self._refused: list[version_lib.Version] = []
    # Time at which sampling began, and the busy seconds until then.
    self._started = self._busy_before_s = 0.0
    self._judging = futures.ThreadPoolExecutor(1, thread_name_prefix="judge")
    # Prompts that are over, for the judge's thread; and its tasks.
    self._over: list[_Over] = []
    self._over_lock = threading.Lock()
    self._tasks: collections.deque[futures.Future[None]] = collections.deque()
    self._judged = threading.Event()
    self._judged.set()
    # Whether the judge's thread submits, and so may wait for credit.
    self._submits = False
    # A block that needs other params than the stream before it.
    self._kept: ports.Assignment | None = None
    # Most prompts of a block so far.
    self._most_prompts = 1
    self._asked_s = -math.inf

  def close(self) -> None:
    """Ends the threads, after what they work on."""
    self._judging.shutdown()
    if self._stage is not None:
      self._stage.close()

  def run(self) -> bool:
    """Samples until a stop; returns whether the trainer ended the run.

    Raises:
      WrongParamsError: the params differ from the trainer's, and there are none
        to go on with, or several versions in a row were refused.
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
      block = self._wait_for_block()
      if block is not None and self._use_version(block):
        self._stream(block)
        self._wait_for_judge(self._most_prompts)
    self._wait_for_judge()
    return self._sink.run_done

  def _stop(self) -> bool:
    return self._should_stop() or self._sink.stop_requested

  def _wait_for_block(self) -> ports.Assignment | None:
    """Returns the next granted block; None if the searcher should stop."""
    block, self._kept = self._kept, None
    if block is not None and block.epoch >= self._sink.epoch:
      return block
    with self._spans.span("wait_work"):
      while not self._stop():
        self._check_handed_over()
        block = self._sink.next_block(0.1)
        if block is not None:
          return block
    return None

  def _use_version(self, block: ports.Assignment) -> bool:
    """Takes the block's params; returns False if the block is obsolete."""
    wanted = block.require_version
    if not self._is_exact(block):
      return self._use_newest(block)
    with self._spans.span("wait_version"):
      while (taken := self._wait_for(wanted)) is None:
        self._check_handed_over()
        if self._stop() or self._sink.epoch > block.epoch:
          return False
        newest = self._source.latest()
        if newest and newest[0] > (block.epoch, wanted + self._parts.lag_steps):
          # Others delivered its prompts while the store was out of reach.
          return False
    return self._load(*taken, is_needed=True)

  def _wait_for(
      self, version: int
  ) -> tuple[version_lib.Version, dict[str, Any]] | None:
    """Returns a version of the source, None after a while.

    Meanwhile the trainer can see whether one is on its way.
    """
    taken = self._source.wait_for(version, 0.2)
    is_pulling = taken is None and self._source.is_pulling()
    if is_pulling != self._stats.get("is_pulling", False):
      self._set_stats({**self._stats, "is_pulling": is_pulling})
    return taken

  def _set_stats(self, stats: dict[str, Any]) -> None:
    self._stats = stats
    self._sink.set_stats(stats)

  def _is_exact(self, block: ports.Assignment) -> bool:
    """Returns whether one version alone may sample a block."""
    return block.require_version >= 0 and not self._parts.takes_newer

  def _use_newest(self, block: ports.Assignment) -> bool:
    """Takes the newest params, once they are new enough for the block.

    Returns False if the block is obsolete.
    """
    oldest = block.epoch, block.require_version
    has_oldest = block.require_version >= 0
    taken = self._source.wait_for(-1, 0.0)
    if has_oldest and (taken is None or taken[0] < oldest):
      with self._spans.span("wait_version"):
        while taken is None or taken[0] < oldest:
          self._check_handed_over()
          if self._stop() or self._sink.epoch > block.epoch:
            return False
          # A version that came too late to be kept does not end the wait.
          self._wait_for(block.require_version)
          taken = self._source.wait_for(-1, 0.0)
    if taken is not None:
      # The params in use may be too old to go on with.
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
    """Switches to a version between blocks, in a span of its own.

    Takes and returns what `_put_params` does.
    """
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
      is_needed: whether no other version will do.
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
    message += f"; the searcher goes on with version {self._version.step}"
    self._parts.on_event("wrong_params", message)
    return False

  def _newer_params(self) -> tuple[int, types.PyTree] | None:
    """Returns newer params of this epoch, to go on with within a block."""
    newest, version = self._source.latest(), self._version
    # A group has one epoch: params of a restarted trainer wait for a new block.
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
    """Decodes a block and those that may join it, and hands prompts over.

    Ends once newer params are due, unless they may be swapped in flight.
    """
    blocks = [first]
    is_exact = self._is_exact(first)
    # By position.
    unfinished: dict[int, _Unfinished] = {}

    def more() -> Sequence[collect.Prompt] | None:
      block = blocks.pop() if blocks else self._block_meanwhile(is_exact)
      if block is None:
        return None
      # What is granted again is on its way.
      prompts = [p for p in block.prompts if p[0] not in unfinished]
      positions = [position for position, *_ in prompts]
      self._sink.begun_s.update(dict.fromkeys(positions, time.monotonic()))
      pending = _Unfinished(len(positions))
      unfinished.update(dict.fromkeys(positions, pending))
      self._most_prompts = max(self._most_prompts, len(positions))
      return prompts or None

    swaps = self._parts.swaps_in_flight and not is_exact
    over = self._collector.stream(
        more,
        self._params,
        self._version.step,
        self._newer_params if swaps else None,
    )
    with contextlib.closing(over):
      while True:
        with self._spans.span("decode", version=self._version.step):
          sampled = next(over, None)
        if sampled is None:
          return
        self._note_mixed(sampled)
        blocks_over = [
            unfinished.pop(one.prompt[0]).add(one) for one in sampled
        ]
        if not self._collector.has_reference:
          self._hand_over(sampled)
          continue
        # Reference log-probs are of whole blocks, so that their bits do not
        # depend on which prompts are over at the same time.
        for block in filter(None, blocks_over):
          self._hand_over(block)

  def _block_meanwhile(self, is_exact: bool) -> ports.Assignment | None:
    """Returns a granted block that may join the stream, if any.

    None does while the judge's thread is a block behind.
    """
    now_s = time.monotonic()
    if self._kept is not None or now_s < self._asked_s + ASK_EVERY_S:
      return None
    newest = self._source.latest()
    is_newer = newest is not None and newest[0] > self._version
    if is_newer and not is_exact and newest[0] not in self._refused:
      comes_in_flight = newest[0].epoch == self._version.epoch
      if not (self._parts.swaps_in_flight and comes_in_flight):
        return None
    if self._sink.epoch > self._version.epoch:
      return None  # A new trainer grants again what is not delivered yet.
    if self._stop() or self._num_over() >= self._most_prompts:
      return None
    block = self._sink.next_block(0.0)
    if block is None:
      self._asked_s = now_s
      return None
    wanted = block.epoch, block.require_version
    is_new_enough = self._version >= wanted
    if is_exact:
      is_new_enough = self._version == wanted
    if not is_new_enough or self._is_exact(block) != is_exact:
      # Its params come first.
      self._kept = block
      return None
    return block

  def _note_mixed(self, sampled: Sequence[collect.Sampled]) -> None:
    for one in sampled:
      c = one.completions
      is_mixed_S = (c.token_versions > c.versions[:, None]).any(1)
      self._mixed_completions += int(is_mixed_S.sum())

  def _hand_over(self, sampled: Sequence[collect.Sampled]) -> None:
    """Passes prompts that are over to the judge's thread."""
    ref_logprobs = None
    if self._parts.reference_first and self._collector.has_reference:
      with self._spans.span("reference"):
        ref_logprobs = self._collector.start_reference(sampled)
    epoch = self._version.epoch  # A stream is sampled within one epoch.
    with self._over_lock:
      self._over.append(_Over(sampled, ref_logprobs, epoch))
      self._judged.clear()
    self._tasks.append(self._judging.submit(self._judge_and_submit))
    if self._parts.judge_shares_mesh:
      with self._spans.span("wait_credit" if self._submits else "reward"):
        self._judged.wait()
    self._check_handed_over()

  def _check_handed_over(self) -> None:
    """Raises the thread's error, if any, without waiting for the thread."""
    while self._tasks and self._tasks[0].done():
      self._tasks.popleft().result()

  def _num_over(self) -> int:
    """Returns the number of prompts that wait for the judge's thread."""
    with self._over_lock:
      return sum(len(one.sampled) for one in self._over)

  def _wait_for_judge(self, most_prompts: int = 0) -> None:
    """Waits until fewer prompts wait for the thread; raises its error.

    Args:
      most_prompts: their number; 0 waits until the thread is done with all.
    """
    # Waiting for a slow judge counts as work, waiting for credit as idle time.
    while self._tasks and self._num_over() >= most_prompts:
      if not self._submits:
        with self._spans.span("reward"):
          self._judged.wait()
      with self._spans.span("wait_credit"):
        self._tasks.popleft().result()

  def _judge_and_submit(self) -> None:
    """Rewards and submits the prompts that are over by now."""
    with self._over_lock:
      over, self._over = self._over, []
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
    # Their age ends here: time spent waiting for credit does not count.
    for group in groups:
      self._sink.begun_s.pop(group.position, None)
    with self._spans.span("wait_credit", lane=JUDGE_LANE):
      self._sink.submit(groups, self._stop)
    self._submits = False
    self._report()

  def _report(self) -> None:
    """Reports the rates since the start to the trainer."""
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
            "rewards": self._parts.judge_totals(),
        }
    )
