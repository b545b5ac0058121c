# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs whose trainer is several processes, and the curve that all must give."""

import pathlib
import tempfile

from absl.testing import parameterized
import numpy as np

from tests.multi_process import run_program

CONFIG = "configs/arithmetic.py:smoke,lockstep"
NUM_STEPS = 6
# Float32, sums in another order; of losses of about 1.
TOLERANCE = dict(rtol=1e-4, atol=1e-5)
OVERRIDES = {
    "train.num_steps": NUM_STEPS,
    # Old completions are drawn too, with the reference log-probs they have.
    "replay.recent_fraction": 0.75,
    "checkpoint.every_steps": 2,
    "evaluate.every_steps": 0,
    "evaluate.final_prompts": 4,
    "evaluate.batch_prompts": 4,
    # A busy machine may stop all of them for a while.
    "trainer.heartbeat_s": 1000.0,
}


def layout(num_processes: int, cpu_devices: int) -> dict[str, int]:
  """Returns the settings of a layout of eight devices."""
  return {
      "mesh.data": 4,
      "mesh.fsdp": 2,
      "trainer.num_processes": num_processes,
      "trainer.cpu_devices": cpu_devices,
  }


class LayoutsCase(parameterized.TestCase):
  """Base of such tests: a run of one device, whose start the others share."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = tempfile.TemporaryDirectory()
    cls.addClassCleanup(folder.cleanup)
    cls.folder = pathlib.Path(folder.name)
    run = cls.start("alone", init="sft")
    if run.wait() != 0:
      raise AssertionError(run.text())
    cls.losses = cls.losses_of(run)
    if max(cls.losses.values()) < 0.01:
      raise AssertionError(f"losses that show nothing: {cls.losses}")

  @classmethod
  def start(cls, name, **overrides):
    init = {"init": cls.folder / "alone" / "sft" / "model"}
    run = run_program.Run(
        cls.folder / name, {**OVERRIDES, **init, **overrides}, CONFIG
    )
    cls.addClassCleanup(run.close)
    return run

  @staticmethod
  def losses_of(run):
    """Returns the losses by step; of one made again, the last."""
    return {r["step"]: r["train/loss"] for r in run.steps()}

  def assert_same_curve(self, run):
    losses = self.losses_of(run)
    self.assertCountEqual(losses, self.losses)
    for step, loss in self.losses.items():
      np.testing.assert_allclose(losses[step], loss, **TOLERANCE)
    self.assertTrue(run.read("summary.json")["ledger_closed"])
    self.assertEmpty(run_program.leftovers(run.workdir))
