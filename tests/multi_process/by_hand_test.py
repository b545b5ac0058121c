# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Two processes of a trainer started by hand, as on hosts of their own.

Where they may not run, process 0 alone finds out, before anything is written
or computed; all end, soon.
"""

import os
import pathlib
import tempfile
import time

from absl.testing import absltest

from tba_jax.config import load
from tba_jax.config import variants
from tba_jax.run import run_directory
from tba_jax.system import processes
from tests.support import harness
from tests.transport import running_host

arithmetic = variants.import_config("configs/arithmetic.py")

# Deadline of its settings, and time to start Python twice on a busy machine.
DEADLINE_S = 180.0


class ByHandTest(absltest.TestCase):
  """Makes run directories, starts trainers in them, and looks at their ends."""

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory(prefix="tba_hand_")
    self.addCleanup(folder.cleanup)
    self.folder = pathlib.Path(folder.name)

  def make_run(self, name, *, changes=(), **store):
    """Returns the identity of a new run, of two processes with one device.

    Args:
      name: name of its directory.
      changes: other settings, `key=value` each.
      **store: settings of `config.store`.
    """
    config = arithmetic.get_config("smoke,lockstep")
    config.init = "scratch"
    config.mesh.data = 2
    config.trainer.num_processes = 2
    config.trainer.cpu_devices = 1
    config.store.update({"deadline_s": 3.0, **store})
    load.apply_overrides(config, changes)
    workdir = str(self.folder / name)
    run, _ = run_directory.create(workdir, config)
    return run

  def start(self, program, run, *operands):
    name = "-".join([program, run.workdir.name, *operands[:1]])
    process = harness.Process(
        harness.command(program, run.workdir, *operands),
        self.folder / f"{name}.log",
    )
    self.addCleanup(process.close)
    return process

  def start_trainer(self, run, other):
    address = f"127.0.0.1:{processes.free_port()}"
    return [
        self.start("trainer", one, str(index), address)
        for index, one in enumerate((run, other or run))
    ]

  def assert_refused(self, run, statuses, words, other=None):
    """Checks that a trainer ends: in time, with one error, nothing changed.

    Args:
      run: run of process 0.
      statuses: exit statuses of both.
      words: pattern of the error.
      other: the run's directory on the host of process 1, None = the same.
    """
    before = _snapshot(run.workdir)
    trainer = self.start_trainer(run, other)
    deadline = time.monotonic() + DEADLINE_S
    ended = [
        process.wait(max(0.1, deadline - time.monotonic()))
        for process in trainer
    ]
    self.assertEqual(ended, list(statuses), self.text())
    errors = [s for s in self.text().splitlines() if s.startswith("error: ")]
    self.assertLen(errors, 1, self.text())
    self.assertRegex(errors[0], words)
    self.assertEqual(_snapshot(run.workdir), before)
    self.assertEmpty(harness.leftovers(run.workdir))

  def text(self):
    """Returns what the trainers printed."""
    return "\n".join(
        f"== {path.name}\n{path.read_text()}"
        for path in sorted(self.folder.glob("trainer-*.log"))
    )

  def test_refuses_two_trainers_on_one_workdir(self):
    run = self.make_run("run")
    lock = run_directory.lock(str(run.workdir), "trainer")
    self.addCleanup(os.close, lock)
    words = f"process {os.getpid()} already runs there as the trainer"
    self.assert_refused(run, (2, 2), words)

  def test_refuses_unwritable_workdir(self):
    run = self.make_run("run")
    # Root may write into any folder, but not open one as a file.
    (run.workdir / ".trainer.lock").mkdir()
    self.assert_refused(run, (2, 2), f"Is a directory: {run.workdir}")

  def test_refuses_process_with_other_settings(self):
    store = self.make_run("store")
    spool = {"spool_dir": str(store.spool)}
    run = self.make_run("run", **spool)
    changes = ["loss.beta=0.1", "train.num_steps=9"]
    other = self.make_run("other", changes=changes, **spool)
    words = r"config.loss.beta = 0.1 at process 1 \(.*/other\), 0.05 at process"
    with running_host.RunningHost(store.spool, run_id=run.run_id):
      self.assert_refused(run, (2, 2), words, other)
    # The other key is named below the first.
    self.assertRegex(
        self.text(), "(?m)^config.train.num_steps = 9 at process 1"
    )


def _snapshot(workdir):
  """Returns what lies in a directory, but for the locks."""
  return {
      path: path.read_bytes()
      for path in workdir.rglob("*")
      if path.is_file() and not path.name.endswith(".lock")
  }
