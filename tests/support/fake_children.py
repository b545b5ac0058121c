# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Children of a supervisor that only pretend to run."""

import signal

from tba_jax.programs import train


class FakeProcess:
  """Ends with a status at the first look, or runs until it is told to end."""

  def __init__(self, pid, status, on_poll=lambda: None):
    self.pid = pid
    self.returncode = None
    self.signals = []
    self._status = status
    self._on_poll = on_poll

  def poll(self):
    if self.returncode is None:
      self._on_poll()
      self.returncode = self._status
    return self.returncode

  def send_signal(self, number):
    self.signals.append(number)

  def wait(self, timeout=None):
    self.returncode = 0 if self._status is None else self._status
    return self.returncode

  def kill(self):
    self.returncode = -signal.SIGKILL


class FakeChildren(train.Children):
  """Starts `FakeProcess`es with the statuses listed for a child's name."""

  statuses: dict[str, list] = {}

  def __init__(self, workdir):
    super().__init__(workdir)
    self.started = []
    self.ended = []
    self.on_poll = None

  def start(self, child):
    self.started.append(child.name)
    self.log_path(child).write_text(f"last words of {child.name}")
    left = self.statuses.get(child.name, [])
    child.process = FakeProcess(
        100 + len(self.started),
        left.pop(0) if left else None,
        lambda: self.on_poll and self.on_poll(child),
    )

  def end(self, roles, deadline_s):
    self.ended.append(tuple(roles))
    super().end(roles, deadline_s)
