# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A supervisor over children that only pretend to run."""

import contextlib
import io
import json
import pathlib
import signal
from unittest import mock

from absl.testing import parameterized
import rich.console

from tba_jax.monitor import panel
from tba_jax.monitor import run_directory
from tba_jax.monitor.report import build as report
from tba_jax.monitor.report import verdict
from tba_jax.programs import train
from tests.support import fake_children
from tests.support import tiny_model

SIGNALS = train._END_SIGNALS
VERDICT = verdict.Verdict("learned", "Learned: much.")
RESULT = {"steps": 100, "num_steps": 100, "ledger_closed": True}


class SuperviseCase(parameterized.TestCase):
  """Base of the supervisor's tests; it has none of its own."""

  def setUp(self):
    super().setUp()
    self.workdir = pathlib.Path(self.create_tempdir().full_path) / "run"
    self.config = tiny_model.make_config(cores__searcher="all")
    self.config.init = "scratch"
    self.config.search.num_searchers = 2
    self.config.task = {"name": "countdown"}
    self.config.store.spool_dir = self.create_tempdir().full_path + "/spool"
    for number in (*SIGNALS, signal.SIGUSR1):
      self.addCleanup(signal.signal, number, signal.getsignal(number))
    for patch in (
        mock.patch.object(train, "_TICK_S", 0.0),
        mock.patch.object(train, "Children", fake_children.FakeChildren),
        mock.patch.object(panel, "Panel", autospec=True),
        mock.patch.object(panel, "final_table", return_value="TABLE"),
        mock.patch.object(
            report, "conclude", return_value=("REPORT", VERDICT, ["*"])
        ),
    ):
      patch.start()
      self.addCleanup(patch.stop)
    self.stdout, self.stderr = io.StringIO(), io.StringIO()

  def make(self, **statuses):
    """Returns a supervisor; `trainer_0=[1, 0]` are statuses of its starts."""
    names = {"-".join(k.rsplit("_", 1)): list(v) for k, v in statuses.items()}
    patch = mock.patch.object(fake_children.FakeChildren, "statuses", names)
    patch.start()
    self.addCleanup(patch.stop)
    run, _ = run_directory.create(str(self.workdir), self.config)
    supervisor = train._Supervisor(
        self.config, run, rich.console.Console(file=self.stdout)
    )
    self.addCleanup(supervisor._events.close)
    return supervisor

  def run_it(self, supervisor, result=RESULT):
    """Runs it; the trainer leaves `result` at its end."""
    children = supervisor._children

    def leave(child):
      if child.name == "trainer-0" and result is not None:
        self.write("result.json", result)

    children.on_poll = children.on_poll or leave
    with contextlib.redirect_stderr(self.stderr):
      return supervisor.run()

  def write(self, name, value):
    path = self.workdir / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))

  def read(self, name):
    return json.loads((self.workdir / name).read_text())

  def events(self):
    lines = (self.workdir / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
