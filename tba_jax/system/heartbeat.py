# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Signs of progress, from a process to the supervisor that started it.

The loops of a process mark their activities (`Activity`). Once a second a
thread writes a line for each loop to a pipe:

    AGE NAME DOING

AGE is the number of seconds without progress. It is 0

  - while the loop waits for another process,
  - for up to twice the longest time that the same activity has taken,
  - in an activity's first run, which may compile code or read data, as long as
    the process uses CPU time.

A stopped process writes nothing. Both sides count beats rather than compare
times, so neither a changed clock nor a suspended machine matters.
"""

from collections.abc import Iterator
import contextlib
import os
import threading
import time

# Environment variable with the descriptor of the pipe.
_VARIABLE = "TBA_JAX_PULSE"
_BEAT_S = 1.0
# Least CPU time that shows work: absolute, and as a share of the elapsed time.
# The other threads of a process whose main loop hangs use less.
_WORK_S, _WORK_SHARE = 1.0, 0.02
# Longest time without progress at which a loop still counts as at work: on a
# busy machine, a second of CPU time can take many seconds.
_AT_WORK_S = 30.0
_MAX_READ = 1 << 16

# Activities of this process, oldest first.
_activities: list["Activity"] = []


class Activity:
  """Activity of a loop; marked by the loop, counted by the heartbeat's thread.

  name: ROLE-INDEX of the loop.
  doing: kind of its present activity.
  works: whether the loop was at work at the last beat, rather than waiting or
    without progress; False in a process without a supervisor.
  """

  def __init__(self, name: str):
    self.name = name
    self.doing = "start"
    self.works = False
    self._waits = False
    # Beats since the last mark, and since the last sign of work.
    self._beats = self._idle = 0
    self._cpu_s = 0.0
    # Longest time of each kind of activity, in beats.
    self._longest: dict[str, int] = {}
    _activities.append(self)

  def mark(self, doing: str = "", *, waits: bool = False) -> None:
    """Notes progress.

    Args:
      doing: kind of the activity that begins now; "" for the present one.
      waits: whether the activity is a wait for another process.
    """
    longest = self._longest.get(self.doing, 0)
    self._longest[self.doing] = max(longest, self._beats)
    self._beats = self._idle = 0
    if doing:
      self.doing, self._waits = doing, waits

  @contextlib.contextmanager
  def span(self, doing: str, *, waits: bool = False) -> Iterator[None]:
    """Marks the beginning and the end of a nested activity."""
    outer, outer_waits = self.doing, self._waits
    self.mark(doing, waits=waits)
    try:
      yield
    finally:
      self.mark(outer, waits=outer_waits)

  def beat(self, cpu_s: float) -> int:
    """Counts a beat; returns the seconds without progress.

    Args:
      cpu_s: CPU time that the process has used so far.
    """
    if not self._idle:
      self._cpu_s = cpu_s
    self._beats += 1
    self._idle += 1
    worked_s = cpu_s - self._cpu_s
    works = worked_s >= max(_WORK_S, _WORK_SHARE * self._idle * _BEAT_S)
    if self._waits or (works and self.doing not in self._longest):
      self._idle = 0
    usual = 2 * self._longest.get(self.doing, 0)
    age_s = round(self._idle * _BEAT_S) if self._beats > usual else 0
    self.works = not self._waits and age_s <= _AT_WORK_S
    return age_s

  def close(self) -> None:
    """Ends the activity."""
    if self in _activities:
      _activities.remove(self)


def start(name: str) -> None:
  """Starts the heartbeat thread, if a supervisor listens.

  Args:
    name: activity of an otherwise idle process.
  """
  descriptor = os.environ.pop(_VARIABLE, None)
  if descriptor is None:
    return
  pipe = int(descriptor)
  os.set_inheritable(pipe, False)
  os.set_blocking(pipe, False)
  base = Activity(name)
  base.close()
  threading.Thread(
      target=_write, args=(pipe, base), name="heartbeat", daemon=True
  ).start()


def _write(pipe: int, base: Activity) -> None:
  while True:
    time.sleep(_BEAT_S)
    cpu_s = time.process_time()
    lines = [
        f"{activity.beat(cpu_s)} {activity.name} {activity.doing}\n"
        for activity in list(_activities) or [base]
    ]
    try:
      os.write(pipe, "".join(lines).encode())
    except BlockingIOError:
      continue  # The supervisor is stopped.
    except OSError:
      return  # The supervisor has ended.


class Listener:
  """The supervisor's end of a pipe.

  pipe: descriptor of the other end, to be inherited by the process alone.
  environment: variables that name the process's end of the pipe.
  silent: number of looks since the last sign of life.
  """

  def __init__(self) -> None:
    self.descriptor, self.pipe = os.pipe()
    os.set_blocking(self.descriptor, False)
    self.environment = {_VARIABLE: str(self.pipe)}
    self.silent = 0

  def look(self) -> list[tuple[int, str, str]]:
    """Returns (age_s, name, doing) of each line written since the last look."""
    try:
      lines = os.read(self.descriptor, _MAX_READ).decode().splitlines()
    except BlockingIOError:
      lines = []
    self.silent = 0 if lines else self.silent + 1
    fields = [line.split(" ", 2) for line in lines]
    return [(int(age_s), name, doing) for age_s, name, doing in fields]

  def close(self) -> None:
    os.close(self.descriptor)
