# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A trainer of two processes, each started by hand as on hosts of their own."""

import ctypes
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from absl.testing import absltest

from tba_jax.config import load
from tba_jax.config import variants
from tba_jax.monitor import run_directory
from tba_jax.system import processes
from tests.multi_process import run_program

arithmetic = variants.import_config("configs/arithmetic.py")

# That of its settings, and of starting Python twice on a busy machine.
DEADLINE_S = 180.0
_PR_CAPBSET_DROP = 24
_CAP_DAC_OVERRIDE = 1


class ByHandCase(absltest.TestCase):
  """Makes run directories, starts trainers in them, and looks at their ends."""

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory(prefix="tba_hand_")
    self.addCleanup(folder.cleanup)
    self.folder = pathlib.Path(folder.name)
    self.processes = []
    self.addCleanup(self.kill)

  def kill(self):
    for process in self.processes:
      process.kill()
      process.wait()

  def make_run(self, name, *, changes=(), **store):
    """Returns the identity of a new run, of two processes with one device.

    Args:
      name: of its directory.
      changes: of other settings, `key=value` each.
      **store: of `config.store`.
    """
    config = arithmetic.get_config("smoke,lockstep")
    config.init = "scratch"
    config.mesh.data = 2
    config.trainer.num_processes = 2
    config.trainer.cpu_devices = 1
    config.store.update({"deadline_s": 3.0, "probe_timeout_s": 1.0, **store})
    load.apply_overrides(config, changes)
    workdir = str(self.folder / name)
    run, _ = run_directory.create(workdir, config)
    return run

  def start(self, program, run, *operands, as_user=False):
    """Starts a program; `as_user`: without root's leave to write anywhere."""
    name = "-".join([program, run.workdir.name, *operands[:1]])
    with (self.folder / f"{name}.log").open("wb") as log:
      process = subprocess.Popen(
          [
              *(sys.executable, "-m", "tba_jax.main", f"--program={program}"),
              f"--workdir={run.workdir}",
              *operands,
          ],
          cwd=run_program.ROOT,
          stdin=subprocess.DEVNULL,
          stdout=log,
          stderr=log,
          env={**os.environ, "JAX_PLATFORMS": "cpu"},
          preexec_fn=_drop_override if as_user else None,
      )
    self.processes.append(process)
    return process

  def start_trainer(self, run, other, **options):
    address = f"127.0.0.1:{processes.free_port()}"
    return [
        self.start("trainer", one, str(index), address, **options)
        for index, one in enumerate((run, other or run))
    ]

  def assert_refused(self, run, statuses, words, other=None, **options):
    """Checks that a trainer ends: in time, with one error, nothing changed.

    Args:
      run: of process 0.
      statuses: of both.
      words: pattern of the error.
      other: the run's directory on the host of process 1, None = the same.
      **options: of `start`.
    """
    before = _snapshot(run.workdir)
    trainer = self.start_trainer(run, other, **options)
    deadline = time.monotonic() + DEADLINE_S
    ended = []
    for process in trainer:
      try:
        ended.append(process.wait(max(0.0, deadline - time.monotonic())))
      except subprocess.TimeoutExpired:
        raise AssertionError(f"it still runs:\n{self.text()}") from None
    self.assertEqual(ended, list(statuses), self.text())
    errors = [s for s in self.text().splitlines() if s.startswith("error: ")]
    self.assertLen(errors, 1, self.text())
    self.assertRegex(errors[0], words)
    self.assertEqual(_snapshot(run.workdir), before)
    self.assertEmpty(run_program.leftovers(run.workdir))

  def text(self):
    """Returns what the trainers printed."""
    return "\n".join(
        f"== {path.name}\n{path.read_text()}"
        for path in sorted(self.folder.glob("trainer-*.log"))
    )


def _snapshot(workdir):
  """Returns what lies in a directory, but for the locks."""
  return {
      path: path.read_bytes()
      for path in workdir.rglob("*")
      if path.is_file() and not path.name.endswith(".lock")
  }


def _drop_override():
  # Root without it is refused where a file's mode says so, as everybody is.
  ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE, 0, 0, 0)
