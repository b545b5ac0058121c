# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A disk that is full while two processes save a checkpoint together.

A limit on the size of files stands for the disk: the next large file fails. It
is the processes' own, so one of them may fail where the other does not.
"""

import pathlib
import resource

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np

from tba_jax.learning import checkpoint
from tba_jax.system import processes
from tba_jax.tools import verify
from tests.multi_process import save_child
from tests.support import harness

# Bytes of a file: fewer than the params, more than all else that a step
# writes.
_LIMIT = 200_000
_OVERRIDES = {
    "init": "scratch",
    "train.num_steps": 16,
    "checkpoint.every_steps": 2,
    "evaluate.every_steps": 0,
    "evaluate.final_prompts": 4,
    "evaluate.batch_prompts": 4,
    "trainer.heartbeat_s": 1000.0,
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
    result = harness.run_together(
        [save_child.__file__, i, address, directory, what]
        for i, what in enumerate(whats)
    )
    return [out for out, _, _ in result], directory

  def check_restores(self, directory, step):
    saver = checkpoint.Checkpointer(directory, keep=2)
    self.addCleanup(saver.close)
    self.assertEqual(saver.latest_step(), step)
    expected = save_child.make_state(step)
    state, host = saver.restore({"noise": jnp.asarray(expected["noise"])})
    np.testing.assert_array_equal(state["noise"], expected["noise"])
    self.assertEqual(host["step"], step)

  def test_both_processes_report_uncreatable_directory(self):
    outs, directory = self.save("nowhere", "nothing")
    for out in outs:
      self.assertRegex(
          out,
          f"^error checkpoint directory {directory} cannot be used: process 0"
          " of the trainer: .*No room for a folder",
      )

  @parameterized.parameters(
      ("nothing", "full", 1, "File too large"),
      ("full", "full", r"\d", "File too large"),
      # Process 0 alone makes folders; the other one does not wait for it.
      ("no_folder", "nothing", 0, "No room for a folder"),
  )
  def test_both_processes_report_failed_write(
      self, first, second, culprit, cause
  ):
    outs, directory = self.save(first, second)
    # The cause itself, no deadline that has passed.
    for out in outs:
      self.assertRegex(
          out,
          f"saved 1\nerror checkpoint 2 could not be written to {directory}:"
          f" process {culprit} of the trainer: (?s:.*){cause}",
      )
    self.check_restores(directory, 1)

  @parameterized.parameters(("damaged", "restores"), ("restores", "damaged"))
  def test_both_processes_skip_checkpoint_unreadable_to_one(
      self, first, second
  ):
    outs, directory = self.save(first, second)
    # Process 0 alone has the host state. No deadline has passed.
    self.assertEndsWith(outs[0], "saved 2\nrestored 1 (2, 150000)\n")
    self.assertEndsWith(outs[1], "saved 2\nrestored None (2, 150000)\n")
    self.assertEqual(
        sorted(p.name for p in pathlib.Path(directory).iterdir()),
        ["1", "damaged-2"],
    )

  def test_reports_hanging_process_at_deadline(self):
    outs, directory = self.save("slow", "nothing")
    self.assertRegex(outs[0], "error checkpoint 2 .*process 0 .*timed out")
    self.assertRegex(
        outs[1], "error checkpoint 2 .*process 0 .*trainer.save_deadline_s"
    )
    self.check_restores(directory, 1)


class FullDiskTest(absltest.TestCase):

  def test_restarts_all_processes_after_failed_write(self):
    folder = self.create_tempdir().full_path
    run = harness.Run(
        folder, _OVERRIDES, "configs/arithmetic.py:smoke,lockstep"
    )
    self.addCleanup(run.close)
    checkpoints = run.workdir / "checkpoints"
    run.wait_for(
        lambda: [p for p in checkpoints.glob("*") if p.name.isdigit()],
        "checkpoint",
    )
    # Those that are started again have no limit.
    pid = run.pids("trainer")[1]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (_LIMIT, _LIMIT))
    self.assertEqual(run.wait(), 0, run.text())
    restarts = run.read("summary.json")["restarts"]
    self.assertEqual(restarts["trainer"], 1, run.text())
    self.assertTrue(run.read("summary.json")["ledger_closed"])
    parts, _ = verify.audit(run.workdir)
    self.assertEmpty([one for part in parts for one in part.problems])
    for process in range(2):
      log = (run.workdir / "logs" / f"trainer-{process}.log").read_text()
      self.assertRegex(
          log,
          r"checkpoint \d+ could not be written to"
          f" {checkpoints}: process 1 of the trainer: ",
      )
