# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Channel between the threads of one process: a queue of groups, and params.

Nothing is packed, encoded or written, except that a run with a directory
journals a block before `submit` returns, so that a kill loses no acknowledged
block.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import threading
import time
from typing import Any

import ml_collections
import numpy as np

from tba_jax import schedule
from tba_jax import types
from tba_jax.transport import byte_store
from tba_jax.transport import ports
from tba_jax.transport import wire
from tba_jax.transport.groups import inbox
from tba_jax.transport.groups import memory_journal
from tba_jax.transport.groups import messages
from tba_jax.transport.groups import receiver
from tba_jax.transport.params import version as version_lib


class MemoryChannel(receiver.Receiver):
  """Receiver that a run's threads share; they may attach in any order.

  Without leases, a searcher is gone once it has closed its end.

  params: hands over the params.
  credits: `search.credits`, for the status; a searcher delivers one block at a
    time.
  changed: condition of grants and stop; its lock guards the shared state.
  searchers: sid -> a searcher's end.
  leaving: sid -> totals and cause of searchers to write off.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      run: wire.RunIdentity | None,
      copy: Callable[[types.PyTree], Mapping[str, Any]],
  ):
    """Makes a channel that grants nothing before `start`.

    Args:
      config: reads `search`, `replay`, `rounds` and `train`.
      run: owner of the journal's directory; None for no journal.
      copy: function from params to a copy of the published leaves, by path.
    """
    super().__init__()
    self.stop_requested = self.run_done = False
    self.changed = threading.Condition(self.lock)
    self.credits = config.search.credits
    self.searchers: dict[str, MemorySink] = {}
    self.leaving: dict[str, tuple[dict[str, int], str]] = {}
    keep = 1 + schedule.make_schedule(config).lag_steps
    self.params = MemoryParams(copy, keep=keep)
    self._config = config
    self._run = run
    self.intake: memory_journal.JournalHook | None = None
    self._writing_off = threading.Lock()
    self._is_open = self._is_closed = False

  def claim(self) -> None:
    """Does nothing: the channel has a single user."""

  def make_receiver(
      self,
      *,
      on_event: Callable[[str, str], None],
      saved: Mapping[str, Any] | None = None,
      policy: Any = None,
      **kwargs: Any,
  ) -> "MemoryChannel":
    """Returns the trainer's end; opens the journal and replays its tail."""
    del policy  # All threads share a config.
    with self._writing_off:
      self._on_event = on_event
      self._begin(self._config, saved=saved or {}, **kwargs)
      if self._run is not None:
        self.intake = memory_journal.JournalHook(
            self._config,
            self._run,
            deliver=self._deliver,
            on_event=on_event,
            lock=self.lock,
            saved=saved or {},
        )
        for sid, totals in self.intake.left.items():
          self.leaving[sid] = totals, "replaced"
    self.write_off()
    return self

  def make_params_sink(self, *, epoch: int, **unused: Any) -> "MemoryParams":
    self.params.epoch = epoch
    return self.params

  def wait_for_trainer(self, *unused: Any) -> None:
    """Does nothing: all threads share a config."""

  def make_params_source(self, **unused: Any) -> "MemoryParams":
    return self.params

  def make_group_sink(self, *, index: int, **unused: Any) -> "MemorySink":
    return MemorySink(self, ports.make_sid(index), index)

  def start(self) -> None:
    with self.changed:
      self._is_open = True
      self.changed.notify_all()

  def close(self) -> None:
    with self.changed:
      self._is_closed = self.stop_requested = True
      self.changed.notify_all()
    if self.intake:
      self.intake.close()

  def check(self) -> None:
    if self.intake:
      self.intake.check()

  def announced(self, *, from_disk: bool = False) -> dict[str, dict[str, int]]:
    del from_disk
    with self.changed:
      return {sid: s.totals for sid, s in self.searchers.items()}

  def stop_searchers(self, *, done: bool) -> None:
    with self.changed:
      self.stop_requested, self.run_done = True, done
      self.changed.notify_all()

  def has_searchers(self) -> bool:
    self.write_off()
    with self.changed:
      lives = any(not s.has_left for s in self.searchers.values())
      return lives or bool(self.leaving)

  def heard(self) -> dict[str, dict[str, Any]]:
    with self.changed:
      return {sid: s.heard() for sid, s in sorted(self.searchers.items())}

  def assign(self) -> None:
    """Grants admitted positions. Under the lock."""
    if self._is_open:
      alive = [sid for sid, s in self.searchers.items() if not s.has_left]
      for sid, blocks in self.grants.assign(alive).items():
        self.searchers[sid].grant(blocks)

  def record(
      self,
      header: dict[str, Any],
      groups: list[types.Group] | None,
      should_stop: Callable[[], bool],
  ) -> bool:
    """Delivers a block or a searcher's end; returns False if stopped.

    Args:
      header: metadata of the record, see `inbox.Record`.
      should_stop: ends the wait for room in the journal.
    """
    if self.intake:
      return self.intake.record(header, groups, should_stop)
    if not self._is_closed:
      self._deliver(inbox.Record(0, header, groups))
    return not self._is_closed

  def write_off(self) -> None:
    """Writes off departed searchers while the journal has room."""
    with self._writing_off:
      if self.grants is None:
        return  # The trainer has not started.
      for sid, (totals, cause) in list(self.leaving.items()):
        header = {"kind": "gone", "sid": sid, "cause": cause, "totals": totals}
        if not self.record(header, None, lambda: True):
          return
        self._on_event("searcher_gone", f"{sid} ({cause})")
        del self.leaving[sid]

  def _wake(self) -> None:
    self.changed.notify_all()

  def _deliver(self, record: inbox.Record) -> None:
    super()._deliver(record)
    with self.changed:
      self._wake()  # Another searcher may now be granted its prompts.


class MemorySink:
  """A searcher thread's `ports.GroupSink`, and its state for the trainer.

  totals: delivered prompts, completions and tokens.
  has_left: whether the searcher has closed its end.
  """

  def __init__(self, channel: MemoryChannel, sid: str, index: int):
    """Joins the channel.

    Args:
      sid: id of this searcher, never used before.
    """
    self.begun_s: dict[int, float] = {}
    self.works: Callable[[], bool] = lambda: False
    self.totals = {"prompts": 0, "completions": 0, "tokens": 0}
    self.has_left = False
    self._channel = channel
    self._sid = sid
    self._index = index
    self._stats: dict[str, Any] = {}
    self._sequence = self._unacked = 0
    self._heard_at = time.monotonic()
    # Assignments that have not started, and the number of the newest.
    self._granted: collections.deque[ports.Assignment] = collections.deque()
    self._last_block = -1
    with channel.changed:
      channel.searchers[sid] = self

  @property
  def epoch(self) -> int:
    return self._channel.epoch

  @property
  def stop_requested(self) -> bool:
    return self._channel.stop_requested

  @property
  def run_done(self) -> bool:
    return self._channel.run_done

  def next_assignment(self, timeout_s: float) -> ports.Assignment | None:
    deadline, channel = time.monotonic() + timeout_s, self._channel
    with channel.changed:
      while not channel.stop_requested:
        channel.check()
        self._heard_at = now = time.monotonic()
        channel.assign()
        if self._granted:
          block = self._granted.popleft()
          channel.grants.note_begun(self._sid, block.number)
          return block
        if now >= deadline:
          break
        channel.changed.wait(deadline - now)
    return None

  def submit(
      self,
      groups: Sequence[types.Group],
      should_stop: Callable[[], bool] = lambda: False,
  ) -> bool:
    amount = messages.amount_of(groups)
    header = {
        "sid": self._sid,
        "sequence": self._sequence,
        "totals": {unit: self.totals[unit] + amount[unit] for unit in amount},
        "amount": amount,
    }
    self._unacked = 1
    try:
      if not self._channel.record(header, list(groups), should_stop):
        return False
    finally:
      self._unacked = 0
    self.totals, self._sequence = header["totals"], self._sequence + 1
    self._heard_at = time.monotonic()
    if self._channel.leaving:  # The journal was full, and now has room.
      self._channel.write_off()
    return True

  def set_stats(self, stats: dict[str, Any]) -> None:
    self._stats = dict(stats)

  def close(self, flush_s: float) -> bool:
    """Leaves the run; granted prompts go to other searchers."""
    del flush_s  # A submitted block is acknowledged.
    if not self.has_left:
      self._channel.leaving[self._sid] = self.totals, "finished"
      self.has_left = True
      self._channel.write_off()
    return True

  def grant(self, blocks: Sequence[Mapping[str, Any]]) -> None:
    """Adds the new blocks from the full list of `Grants.assign`."""
    for block in blocks:
      number = block["number"]
      if number > self._last_block:
        self._last_block, prompts = number, tuple(block["prompts"])
        self._granted.append(
            ports.Assignment(self.epoch, number, block["version"], prompts)
        )

  def heard(self) -> dict[str, Any]:
    """Returns the lease that a store would hold for this searcher."""
    now = time.monotonic()
    ages = [now - begun_s for begun_s in list(self.begun_s.values())[:1]]
    return {
        "index": self._index,
        "unacked": self._unacked,
        "credits": self._channel.credits,
        "totals": self.totals,
        "stats": self._stats
        | ({"works": True} if self.works() else {})
        | {"block_age_s": age for age in ages},
        "age_s": now - self._heard_at,
        "alive": not self.has_left,
    }


class MemoryParams:
  """Copies of the params on the devices: `ports.ParamsSink` and `ParamsSource`.

  A version is available once its step is known to be finite.
  """

  def __init__(
      self, copy: Callable[[types.PyTree], Mapping[str, Any]], *, keep: int
  ):
    """Takes `copy` of `MemoryChannel`, and the number of versions to keep."""
    self.epoch = -1
    self.stats = version_lib.PullStats()  # No version is refused.
    self._copy = copy
    self._keep = keep
    self._changed = threading.Condition()
    # Version, leaves, and a number that is 0 after a finite step.
    self._pending: collections.deque[tuple[int, Any, Any]] = collections.deque()
    self._kept: dict[int, Mapping[str, Any]] = {}  # Newest last.

  def submit(
      self, version: int, params: types.PyTree, nonfinite: Any = 0
  ) -> int | None:
    copy = self._copy(params)
    with self._changed:
      self._pending.append((version, copy, nonfinite))
      self._settle()
      self._changed.notify_all()
    return None

  def wait(self, version: int, should_stop: Callable[[], bool]) -> None:
    while not should_stop():
      if self._wait(lambda: self._newest() >= version, 0.5) is not None:
        return

  def latest(self) -> tuple[version_lib.Version, dict[str, Any]] | None:
    return self.wait_for(-1, 0.0)

  def wait_for(
      self, version: int, timeout_s: float
  ) -> tuple[version_lib.Version, dict[str, Any]] | None:
    if version < 0:
      return self._wait(lambda: bool(self._kept), timeout_s)
    return self._wait(lambda: version in self._kept, timeout_s, version)

  def is_pulling(self) -> bool:
    return False

  def is_publishing(self) -> bool:
    return False

  def close(self) -> None:
    """Does nothing: the other threads may still need the params."""

  def _newest(self) -> int:
    return next(reversed(self._kept), -1)

  def _wait(
      self, ready: Callable[[], bool], timeout_s: float, version: int = -1
  ) -> tuple[version_lib.Version, dict[str, Any]] | None:
    """Waits for a version and the devices; returns None after a timeout."""
    deadline = time.monotonic() + timeout_s
    while True:
      with self._changed:
        self._settle()
        if ready():
          wanted = self._newest() if version < 0 else version
          number = version_lib.Version(self.epoch, wanted)
          return number, dict(self._kept[wanted])
        left_s = deadline - time.monotonic()
        if left_s <= 0:
          return None
        if not self._pending:
          self._changed.wait(left_s)
          continue
        nonfinite = self._pending[0][2]
      _is_finite(nonfinite)  # Without the lock: a device may be at work.

  def _settle(self) -> None:
    """Keeps versions whose steps turned out finite. Under the lock."""
    while self._pending:
      version, copy, nonfinite = self._pending[0]
      if not getattr(nonfinite, "is_ready", lambda: True)():
        return
      is_finite = _is_finite(nonfinite)
      self._pending.popleft()
      if is_finite:
        self._kept.pop(version, None)
        self._kept[version] = copy
        while len(self._kept) > self._keep:
          del self._kept[next(iter(self._kept))]


def _is_finite(nonfinite: Any) -> bool:
  """Waits for the device; raises TransportError if it has failed."""
  try:
    return not float(np.asarray(nonfinite))
  except Exception as error:  # Both roles raise it, whatever its type.
    message = f"publishing has ended: {error}"
    raise byte_store.TransportError(message) from error
