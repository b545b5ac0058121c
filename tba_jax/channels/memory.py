# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Channel between the threads of one process: no store, socket or encoding.

With a run directory each block is journaled, in the format of the store's
receiver, before `submit` returns: a kill loses nothing that was acknowledged,
and separate processes may go on where the threads were. Without one nothing is
written. Params are copies on the devices.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
import dataclasses
import threading
import time
from typing import Any

import ml_collections
import numpy as np

from tba_jax import types
from tba_jax.channels import intake as intake_lib
from tba_jax.channels import journal as journal_lib
from tba_jax.channels import leases as leases_lib
from tba_jax.channels import messages
from tba_jax.channels import ports
from tba_jax.channels import queue_client
from tba_jax.replay import prompt_order
from tba_jax.system import worker
from tba_jax.transport import base

# Pause after the journal had no room.
_FULL_RETRY_S = 0.25
# Period of looking whether the caller should stop.
_TICK_S = 0.1
_CLOSE_S = 5.0


class MemoryChannel:
  """Where trainer and searchers of one process meet, in any order.

  groups: the trainer's `MemoryQueue`, once it has started.
  params: the trainer's `MemoryParams`, once they are there.
  """

  def __init__(self):
    self.groups: futures.Future[MemoryQueue] = futures.Future()
    self.params: futures.Future[MemoryParams] = futures.Future()


@dataclasses.dataclass
class _Member:
  """A searcher's thread, as the trainer's end knows it.

  index: slot of the searcher.
  begun_s: start times of the blocks in work.
  granted: assignments that the searcher has not begun.
  totals: prompts, completions and tokens that are journaled.
  sequence: number of the next block.
  unacked: number of blocks that are being journaled.
  heard_at: time of the last call.
  stats: statistics that the searcher has set.
  has_left: whether the searcher has closed its end.
  """

  index: int
  begun_s: Sequence[float]
  granted: queue_client.GrantedBlocks = dataclasses.field(
      default_factory=queue_client.GrantedBlocks
  )
  totals: dict[str, int] = dataclasses.field(
      default_factory=lambda: dict.fromkeys(messages.UNITS, 0)
  )
  sequence: int = 0
  unacked: int = 0
  heard_at: float = dataclasses.field(default_factory=time.monotonic)
  stats: dict[str, Any] = dataclasses.field(default_factory=dict)
  has_left: bool = False


class MemoryQueue:
  """Journals what the searchers' threads submit; a `ports.Receiver`.

  There are no leases: a thread that has closed its end is gone.
  """

  def __init__(
      self,
      channel: MemoryChannel,
      config: ml_collections.ConfigDict,
      run: messages.RunIdentity,
      *,
      order: prompt_order.PromptOrder,
      epoch: int,
      on_event: Callable[[str, str], None],
      first_version: int = 0,
      saved: Mapping[str, Any] | None = None,
  ):
    """Opens the journal and replays its tail; `start` lets searchers in.

    Args:
      channel: meeting point of the process.
      config: reads `search`, `replay`, `rounds` and `train`.
      run: the run; without a directory nothing is written.
      order: order of the prompts.
      epoch: the trainer's start count.
      on_event: function called with (kind, message).
      first_version: oldest version that can be sampled with.
      saved: `ReplayService.get_state` of a checkpoint.
    """
    self.order = order
    self.epoch = epoch
    self.generation = 0
    self.urgent = False
    self.stop_requested = self.run_done = False
    self._channel = channel
    self._run = run
    self._credits = config.search.credits
    self._changed = threading.Condition(threading.RLock())
    # Held while a record is journaled, outside of `_changed`.
    self._writing = threading.Lock()
    self._is_closed = False
    self._error: OSError | None = None
    self._members: dict[str, _Member] = {}
    self._num_updates = 0
    self._intake = intake_lib.Intake(
        config,
        run,
        order=order,
        on_event=on_event,
        lock=self._changed,
        first_version=first_version,
        saved=saved or {},
    )
    self.inbox = self._intake.inbox
    kept, damaged = leases_lib.read_files(run)
    for path in damaged:
      on_event("damaged", f"{path}: no valid lease")
    leases = {sid: lease for sid, (lease, _) in kept.items()}
    self._intake.replay(leases)
    # An absent log beside a checkpoint would look like a loss.
    self._wait_for_room(self._intake.ack_log.sync, lambda: True)
    # sid -> totals and cause of searchers to write off: first, processes that
    # were here before the threads.
    self._leaving: dict[str, tuple[dict[str, int], str]] = {
        sid: (lease["totals"], "replaced")
        for sid, lease in leases.items()
        if self._intake.written_off.get(sid) != lease["totals"]
    }
    self._write_off()

  @property
  def journal_start(self) -> int:
    """Position of the journal's oldest record."""
    return self._intake.journal.start

  def start(self) -> None:
    """Lets searchers in."""
    self._channel.groups.set_result(self)

  def close(self) -> None:
    """Refuses what comes from now on, and closes the journal."""
    with self._writing, self._changed:
      self._is_closed = self.stop_requested = True
      self._changed.notify_all()
      self._intake.close()

  def check(self) -> None:
    """Raises TransportError if the journal has failed."""
    if self._error is not None:
      message = f"the journal has failed: {self._error}"
      raise base.TransportError(message) from self._error

  def admit(self, limit: int) -> None:
    """Admits positions below `limit`, to be granted to searchers."""
    with self._changed:
      if self._intake.grants.admit(limit):
        self._changed.notify_all()

  def drain(self) -> bool:
    """Grants no more; returns whether all that was granted is in the inbox."""
    with self._changed:
      return self._intake.grants.drain()

  def resume(self, least_version: int) -> None:
    """Grants again, to be sampled with this version or a newer one."""
    with self._changed:
      self._intake.grants.resume(least_version)
      self._changed.notify_all()

  def announced(self, *, from_disk: bool = False) -> dict[str, dict[str, int]]:
    """Returns the totals of each searcher, by sid; nothing is on disk alone."""
    del from_disk
    with self._changed:
      return {sid: dict(m.totals) for sid, m in self._members.items()}

  def acknowledged(self) -> dict[str, list[int]]:
    """Returns sid -> [next sequence, *totals] of acknowledged blocks."""
    return self._intake.acknowledged()

  def stop_searchers(self, *, done: bool) -> None:
    """Asks all searchers to deliver and leave; `done` at the end of the run."""
    with self._changed:
      self.stop_requested, self.run_done = True, done
      self._changed.notify_all()

  def has_searchers(self) -> bool:
    """Returns whether a searcher lives, or its end is not in the journal."""
    self._write_off()
    with self._changed:
      lives = any(not m.has_left for m in self._members.values())
      return lives or bool(self._leaving)

  def describe(self) -> str:
    """Returns the searchers, and what holds data up, for a message."""
    return self._intake.describe(self.heard())

  def heard(self) -> dict[str, dict[str, Any]]:
    """Returns what a store would have of each searcher, by sid."""
    now, out = time.monotonic(), {}
    with self._changed:
      for sid, member in sorted(self._members.items()):
        ages = [now - begun_s for begun_s in list(member.begun_s)[:1]]
        out[sid] = {
            "index": member.index,
            "unacked": member.unacked,
            "credits": self._credits,
            "totals": dict(member.totals),
            "stats": member.stats | {"block_age_s": age for age in ages},
            "age_s": now - member.heard_at,
            "alive": not member.has_left,
        }
    return out

  def set_status(self, status: dict[str, Any]) -> None:
    """Does nothing: there is no other host."""

  def drop_journal_before(self, position: int) -> None:
    """Deletes segments of the journal that end before a position."""
    self._intake.journal.truncate_before(position)

  # Methods of searchers' threads.

  def join(self, sid: str, index: int, begun_s: Sequence[float]) -> None:
    """Adds a searcher, which may then be granted prompts."""
    with self._changed:
      self._members[sid] = _Member(index, begun_s)

  def next_block(self, sid: str, timeout_s: float) -> ports.Assignment | None:
    """Returns a searcher's next assignment, None after a timeout or a stop."""
    deadline = time.monotonic() + timeout_s
    with self._changed:
      member = self._members[sid]
      while not self.stop_requested:
        self.check()
        member.heard_at = time.monotonic()
        self._assign()
        if member.granted.blocks:
          return member.granted.blocks.pop(0)
        if (left_s := deadline - time.monotonic()) <= 0:
          break
        self._changed.wait(left_s)
    return None

  def submit(
      self,
      sid: str,
      groups: Sequence[types.Group],
      should_stop: Callable[[], bool],
  ) -> bool:
    """Journals a block; returns False if it is given up.

    Waits while another block is journaled, or there is no room.
    """
    member = self._members[sid]
    header, arrays = messages.pack_groups(groups)
    amount = {
        "prompts": len(groups),
        "completions": sum(g.num_completions for g in groups),
        "tokens": sum(g.num_tokens for g in groups),
    }
    totals = {unit: member.totals[unit] + amount[unit] for unit in amount}
    header.update(
        run=self._run.run_id,
        key=messages.block_key(sid, member.sequence),
        sid=sid,
        sequence=member.sequence,
        totals=totals,
        amount=amount,
    )
    member.unacked = 1
    try:
      entry = intake_lib.Entry(header, arrays)
      if not self._wait_for_room(lambda: self._write(entry), should_stop):
        return False
      with self._changed:
        member.totals, member.sequence = totals, member.sequence + 1
        member.heard_at = time.monotonic()
        self._changed.notify_all()
      # The block is in the journal, whether or not its mark still finds room.
      self._wait_for_room(self._intake.ack_log.sync, should_stop)
    finally:
      member.unacked = 0
    self._write_off()
    return True

  def set_stats(self, sid: str, stats: dict[str, Any]) -> None:
    with self._changed:
      self._members[sid].stats = stats

  def leave(self, sid: str) -> None:
    """Writes a searcher off: what it was granted goes to others."""
    with self._changed:
      member = self._members[sid]
      if member.has_left:
        return
      member.has_left = True
      self._leaving[sid] = member.totals, "finished"
    self._write_off()

  def _assign(self) -> None:
    alive = [sid for sid, m in self._members.items() if not m.has_left]
    for sid, blocks in self._intake.grants.assign(alive).items():
      self._num_updates += 1
      self._members[sid].granted.update(
          {"epoch": self.epoch, "count": self._num_updates, "blocks": blocks}
      )

  def _write(self, entry: intake_lib.Entry) -> None:
    self._intake.write([entry])

  def _wait_for_room(
      self, write: Callable[[], Any], should_stop: Callable[[], bool]
  ) -> bool:
    """Writes once there is room; returns False if it is given up.

    Raises:
      TransportError: the disk has failed.
    """
    while True:
      if self._writing.acquire(timeout=_TICK_S):
        try:
          if self._is_closed:
            return False
          write()
          self._intake.set_obstacle(None)
          return True
        except journal_lib.JournalFullError as error:
          self._intake.set_obstacle(error)
        except OSError as error:
          self._error = error
          self.check()
        finally:
          self._writing.release()
        with self._changed:
          self._changed.wait_for(lambda: self._is_closed, _FULL_RETRY_S)
      if should_stop():
        return False

  def _write_off(self) -> None:
    """Journals which searchers are gone, as far as there is room."""
    with self._writing:
      with self._changed:
        leaving = {} if self._is_closed else dict(self._leaving)
      for sid, (totals, cause) in leaving.items():
        if not self._intake.write_off(sid, totals, cause):
          return
        with self._changed:
          del self._leaving[sid]
          self._changed.notify_all()


class MemorySink:
  """A searcher thread's `ports.GroupSink`."""

  def __init__(self, channel: MemoryChannel, sid: str, index: int):
    """Makes the sink; the trainer's end may come later.

    Args:
      channel: meeting point of the process.
      sid: id of this searcher, never used before.
      index: slot of this searcher.
    """
    self.begun_s: collections.deque[float] = collections.deque()
    self._channel = channel
    self._sid = sid
    self._index = index
    self._queue: MemoryQueue | None = None

  @property
  def epoch(self) -> int:
    queue = self._join(0.0)
    return -1 if queue is None else queue.epoch

  @property
  def stop_requested(self) -> bool:
    queue = self._join(0.0)
    return queue is not None and queue.stop_requested

  @property
  def run_done(self) -> bool:
    return self._queue is not None and self._queue.run_done

  @property
  def totals(self) -> dict[str, int]:
    if self._queue is None:
      return dict.fromkeys(messages.UNITS, 0)
    return self._queue.announced()[self._sid]

  def next_block(self, timeout_s: float) -> ports.Assignment | None:
    deadline = time.monotonic() + timeout_s
    queue = self._join(timeout_s)
    if queue is None:
      return None
    return queue.next_block(self._sid, deadline - time.monotonic())

  def submit(
      self,
      groups: Sequence[types.Group],
      should_stop: Callable[[], bool] = lambda: False,
  ) -> bool:
    return self._queue.submit(self._sid, groups, should_stop)

  def set_stats(self, stats: dict[str, Any]) -> None:
    self._queue.set_stats(self._sid, dict(stats))

  def close(self, flush_s: float) -> bool:
    del flush_s  # A submitted block is acknowledged.
    if self._queue is not None:
      self._queue.leave(self._sid)
    return True

  def _join(self, timeout_s: float) -> MemoryQueue | None:
    """Returns the trainer's end, once it is there."""
    if self._queue is None:
      try:
        queue = self._channel.groups.result(timeout_s)
      except TimeoutError:
        return None
      queue.join(self._sid, self._index, self.begun_s)
      self._queue = queue
    return self._queue


class MemoryParams:
  """Hands over copies of the params; a `ports.ParamsSink`.

  A version is there once its step is known to be finite, which a thread waits
  for. The newest `keep` are kept.
  """

  def __init__(
      self,
      channel: MemoryChannel,
      copy: Callable[[types.PyTree], Mapping[str, Any]],
      *,
      epoch: int,
      keep: int,
  ):
    """Starts the thread, and lets searchers in.

    Args:
      channel: meeting point of the process.
      copy: function from params to a copy of the published leaves, by path.
      epoch: the trainer's start count.
      keep: number of versions to keep.
    """
    self._copy = copy
    self._epoch = epoch
    self._keep = keep
    self._changed = threading.Condition()
    self._pending: collections.deque[tuple[int, Any, Any]] = collections.deque()
    # Newest last.
    self._kept: dict[int, Mapping[str, Any]] = {}
    self._thread = worker.Worker(
        "params", self._serve, close_s=_CLOSE_S, wake=self._wake
    )
    channel.params.set_result(self)

  def submit(
      self, version: int, params: types.PyTree, nonfinite: Any = 0
  ) -> int | None:
    """Copies the params on the devices; no version is skipped."""
    base.check_thread(self._thread, "publishing")
    copy = self._copy(params)
    with self._changed:
      self._pending.append((version, copy, nonfinite))
      self._changed.notify_all()
    return None

  def wait(self, version: int, deadline_s: float) -> None:
    """Waits until `version` or a later one is there."""
    with self._changed:
      done = self._changed.wait_for(
          lambda: self._newest() >= version or self._thread.failed, deadline_s
      )
    base.check_thread(self._thread, "publishing")
    if not done:
      raise base.DeadlineExceededError(
          f"version {version} was not published within {deadline_s:.0f} s:"
          f" version {self._newest()} was"
      )

  def read(
      self, version: int, timeout_s: float
  ) -> tuple[ports.Tag, dict[str, Any]] | None:
    """Returns exactly a version, -1 for the newest; None after a timeout."""

    def ready() -> bool:
      return self._thread.failed or (
          bool(self._kept) if version < 0 else version in self._kept
      )

    with self._changed:
      done = self._changed.wait_for(ready, timeout_s)
      base.check_thread(self._thread, "publishing")
      if not done:
        return None
      wanted = self._newest() if version < 0 else version
      return (self._epoch, wanted), dict(self._kept[wanted])

  def close(self) -> None:
    """Ends the thread, and frees what it holds."""
    base.close_thread(self._thread, "publishing")
    with self._changed:
      self._pending.clear()
      self._kept.clear()

  def _newest(self) -> int:
    return next(reversed(self._kept), -1)

  def _wake(self) -> None:
    with self._changed:
      self._changed.notify_all()

  def _serve(self, stop: threading.Event) -> None:
    while True:
      with self._changed:
        self._changed.wait_for(
            lambda: self._pending or stop.is_set(), timeout=_TICK_S
        )
        if stop.is_set():
          return
        if not self._pending:
          continue
        version, copy, nonfinite = self._pending.popleft()
      if not float(np.asarray(nonfinite)):
        with self._changed:
          self._kept.pop(version, None)
          self._kept[version] = copy
          while len(self._kept) > self._keep:
            del self._kept[next(iter(self._kept))]
          self._changed.notify_all()
      del copy


class MemorySource:
  """A searcher thread's `ports.ParamsSource`."""

  def __init__(self, channel: MemoryChannel):
    self.stats = ports.PullStats()  # It refuses no version.
    self._channel = channel
    self._tag: ports.Tag | None = None

  def latest(self) -> tuple[ports.Tag, dict[str, Any]] | None:
    return self.wait_for(-1, 0.0)

  def wait_for(
      self, version: int, timeout_s: float
  ) -> tuple[ports.Tag, dict[str, Any]] | None:
    deadline = time.monotonic() + timeout_s
    try:
      params = self._channel.params.result(timeout_s)
    except TimeoutError:
      return None
    read = params.read(version, max(0.0, deadline - time.monotonic()))
    if read is not None and read[0] != self._tag:
      self._tag = read[0]
      self.stats.taken += 1
    return read

  def close(self) -> None:
    """Does nothing: the trainer's end holds the params."""
