# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A disk that is full while two processes save a checkpoint together.

A limit on the size of files stands for the disk: the next large file fails. It
is the processes' own, so one of them may fail where the other does not.
"""

import os
import pathlib
import resource
import subprocess
import sys
import time

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.system import processes
from tba_jax.training import checkpoint
from tests.multi_process import layouts_case
from tests.multi_process import run_program
from tests.multi_process import save_child

_CHILD = pathlib.Path(save_child.__file__)
# Of a file: less than the params, more than all else that a step writes.
_LIMIT = 200_000
_OVERRIDES = {
    **layouts_case.OVERRIDES,
    "init": "scratch",
    "mesh.fsdp": 2,
    "trainer.num_processes": 2,
    "trainer.cpu_devices": 1,
    "model.width": 128,
    "model.mlp_width": 512,
}


class SaveTest(parameterized.TestCase):

  def save(self, *whats):
    """Has processes save; returns what each printed, and the directory."""
    directory = self.create_tempdir().full_path
    address = f"127.0.0.1:{processes.free_port()}"
    children = [
        subprocess.Popen(
            [sys.executable, _CHILD, str(i), address, directory, what],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": str(run_program.ROOT)},
        )
        for i, what in enumerate(whats)
    ]
    for child in children:
      self.addCleanup(child.kill)
    return [c.communicate(timeout=120)[0] for c in children], directory

  def check_restores(self, directory, step):
    saver = checkpoint.Checkpointer(directory, keep=2)
    self.addCleanup(saver.close)
    self.assertEqual(saver.latest_step(), step)
    expected = save_child.make_state(step)
    state, host = saver.restore({"noise": jnp.asarray(expected["noise"])})
    np.testing.assert_array_equal(state["noise"], expected["noise"])
    self.assertEqual(host["step"], step)

  def test_two_processes_save_together(self):
    outs, directory = self.save("nothing", "nothing")
    for out in outs:
      self.assertEndsWith(out, "saved 1\nsaved 2\n")
    self.check_restores(directory, 2)

  @parameterized.parameters(0, 1)
  def test_one_that_cannot_write_is_the_error_of_both(self, full):
    whats = ["nothing", "nothing"]
    whats[full] = "full"
    begun = time.monotonic()
    outs, directory = self.save(*whats)
    # Two starts and two saves; no deadline has passed.
    self.assertLess(time.monotonic() - begun, 60)
    for out in outs:
      self.assertRegex(
          out,
          f"saved 1\\nerror checkpoint 2 could not be written to {directory}:"
          f" process {full} of the trainer: (?s:.*)File too large",
      )
    self.check_restores(directory, 1)

  def test_a_folder_that_cannot_be_made_is_the_error_of_both(self):
    begun = time.monotonic()
    outs, directory = self.save("no_folder", "nothing")
    # Process 0 alone makes folders; the other one does not wait for it.
    self.assertLess(time.monotonic() - begun, 60)
    for out in outs:
      self.assertRegex(
          out,
          f"saved 1\nerror checkpoint 2 could not be written to {directory}:"
          " process 0 of the trainer: .*No room for a folder",
      )
    self.check_restores(directory, 1)

  def test_a_directory_that_cannot_be_made_is_the_error_of_both(self):
    outs, directory = self.save("nowhere", "nothing")
    for out in outs:
      self.assertRegex(
          out,
          f"^error checkpoint directory {directory} cannot be used: process 0"
          " of the trainer: .*No room for a folder",
      )

  def test_one_that_hangs_is_an_error_at_the_deadline(self):
    outs, directory = self.save("slow", "nothing")
    self.assertRegex(outs[0], "error checkpoint 2 .*process 0 .*timed out")
    self.assertRegex(
        outs[1], "error checkpoint 2 .*process 0 .*trainer.save_deadline_s"
    )
    self.check_restores(directory, 1)


class FullDiskTest(absltest.TestCase):

  def start(self, **more):
    folder = self.create_tempdir().full_path
    run = run_program.Run(folder, {**_OVERRIDES, **more}, layouts_case.CONFIG)
    self.addCleanup(run.close)
    run.wait_for(lambda: self.saved(run), "checkpoint")
    return run

  def saved(self, run):
    folder = run.workdir / "checkpoints"
    return [int(p.name) for p in folder.glob("*") if p.name.isdigit()]

  def limit(self, pid):
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (_LIMIT, _LIMIT))

  def test_where_one_process_cannot_write_all_start_again(self):
    run = self.start(**{"train.num_steps": 40})
    self.limit(run.pids("trainer")[1])
    # The next ones have no limit.
    self.assertEqual(run.wait(), 0, run.text())
    restarts = run.read("summary.json")["restarts"]
    self.assertEqual(restarts["trainer"], 1, run.text())
    self.assertTrue(run.read("summary.json")["ledger_closed"])
    for process in range(2):
      log = (run.workdir / "logs" / f"trainer-{process}.log").read_text()
      self.assertRegex(
          log,
          r"checkpoint \d+ could not be written to"
          f" {run.workdir}/checkpoints: process 1 of the trainer: ",
      )

  @pytest.mark.timeout(900)
  def test_where_none_can_the_run_ends_and_keeps_what_it_has(self):
    run = self.start(**{"train.num_steps": 100_000})
    for pid in [run.process.pid, *run.pids("trainer")]:
      self.limit(pid)
    self.assertEqual(run.wait(400), 1, run.text())
    out = pathlib.Path(run.workdir, "out.txt").read_text()
    self.assertIn("could not be written to", out)
    self.assertEmpty(run_program.leftovers(run.workdir))
    saver = checkpoint.Checkpointer(str(run.workdir / "checkpoints"), keep=3)
    steps = saver.complete_steps()
    saver.close()
    self.assertNotEmpty(steps)
    # With room again the same command goes on.
    again = run_program.Run(
        run.workdir,
        {**_OVERRIDES, "train.num_steps": max(steps) + 4},
        layouts_case.CONFIG,
    )
    self.assertEqual(again.wait(), 0, again.text())
    self.assertTrue(again.read("summary.json")["ledger_closed"])


if __name__ == "__main__":
  absltest.main()
