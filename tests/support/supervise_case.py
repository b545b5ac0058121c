# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A supervisor of fake children."""

import contextlib
import io
import json
import pathlib
import signal
from unittest import mock

from absl.testing import parameterized
import rich.console

from tba_jax.programs import train
from tba_jax.report import diagnosis
from tba_jax.report import page as report
from tba_jax.report import panel
from tba_jax.run import run_directory
from tba_jax.system import heartbeat
from tba_jax.system import jsonl
from tests.support import tiny_model

SIGNALS = train.END_SIGNALS
VERDICT = diagnosis.Finding("learned", "Learned: much.")
# No pauses, no grace period, every check in each poll.
LIMITS = train.Limits(tick_s=0.0, check_every_s=0.0, together_s=0.0)
RESULT = {
    "steps": 100,
    "num_steps": 100,
    "completions": 400,
    "ledger_closed": True,
}


class FakeProcess:
  """Ends with a status at the first poll, or runs until stopped."""

  def __init__(self, pid, status, on_poll=lambda: None):
    self.pid = pid
    self.returncode = None
    self.signals = []
    self.status = status
    self._on_poll = on_poll

  def poll(self):
    if self.returncode is None:
      self._on_poll()
      self.returncode = self.status
    return self.returncode

  def send_signal(self, number):
    self.signals.append(number)

  def wait(self, timeout=None):
    self.returncode = 0 if self.status is None else self.status
    return self.returncode

  def kill(self):
    self.returncode = -signal.SIGKILL


class FakeChildren(train.Children):
  """Starts `FakeProcess`es with statuses by child."""

  def __init__(self, workdir, limits, statuses):
    super().__init__(workdir, limits)
    self.statuses = statuses
    self.started = []
    self.ended = []
    self.on_poll = None

  def start(self, child):
    self.started.append(child.name)
    self.log_path(child).write_text(f"last words of {child.name}")
    child.listener = mock.create_autospec(heartbeat.Listener, silent=0)
    child.listener.look.return_value = []
    left = self.statuses.get(child.name, [])
    child.process = FakeProcess(
        100 + len(self.started),
        left.pop(0) if left else None,
        lambda: self.on_poll and self.on_poll(child),
    )

  def end(self, roles, *args):
    self.ended.append(tuple(roles))
    super().end(roles, *args)


class SuperviseCase(parameterized.TestCase):
  """Base of the supervisor's tests."""

  def setUp(self):
    super().setUp()
    self.workdir = pathlib.Path(self.create_tempdir().full_path) / "run"
    self.config = tiny_model.make_config()
    self.config.init = "scratch"
    self.config.search.num_searchers = 2
    self.config.task = {"name": "countdown"}
    self.config.store.spool_dir = self.create_tempdir().full_path + "/spool"
    for number in (*SIGNALS, signal.SIGUSR1):
      self.addCleanup(signal.signal, number, signal.getsignal(number))
    for patch in (
        mock.patch.object(panel, "Panel", autospec=True),
        mock.patch.object(panel, "final_table", return_value="TABLE"),
        mock.patch.object(
            report, "conclude", return_value=("REPORT", VERDICT, ["*"])
        ),
    ):
      patch.start()
      self.addCleanup(patch.stop)
    self.stdout, self.stderr = io.StringIO(), io.StringIO()

  def make(self, limits=LIMITS, changes=(), **statuses):
    """Returns a supervisor; `trainer_0=[1, 0]` are exit statuses of a child.

    `changes` are changed settings of the resumed run.
    """
    names = {"-".join(k.rsplit("_", 1)): list(v) for k, v in statuses.items()}
    self.run_info, _ = run_directory.create(str(self.workdir), self.config)
    self.children = FakeChildren(self.workdir, limits, names)
    supervisor = train.Supervisor(
        self.config,
        self.run_info,
        rich.console.Console(file=self.stdout),
        changes=dict(changes),
        limits=limits,
        children=self.children,
    )
    self.addCleanup(supervisor.close)
    return supervisor

  def run_to_end(self, supervisor, result=RESULT):
    """Runs the newest supervisor; the trainer writes `result.json`."""

    def leave(child):
      if child.name == "trainer-0" and result is not None:
        self.write("result.json", result)

    self.children.on_poll = self.children.on_poll or leave
    with contextlib.redirect_stderr(self.stderr):
      return supervisor.run()

  def write(self, name, value):
    path = self.workdir / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))

  def read(self, name):
    return jsonl.loads((self.workdir / name).read_text())

  def events(self):
    lines = (self.workdir / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
