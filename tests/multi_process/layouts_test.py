# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trainers of several processes have the loss curve of one, faults or not.

The curve is that of one process with one device, in float32: each step's loss
within a relative difference of 1e-4, or 1e-5 where that is more.
"""

import pathlib
import signal
import tempfile

from absl.testing import parameterized
import numpy as np
import pytest

from tests.support import harness

CONFIG = "configs/arithmetic.py:smoke,lockstep"
NUM_STEPS = 10
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


def layout(num_processes, cpu_devices):
  """Returns the settings of a layout of eight devices."""
  return {
      "mesh.data": 4,
      "mesh.fsdp": 2,
      "trainer.num_processes": num_processes,
      "trainer.cpu_devices": cpu_devices,
  }


# The first test's time has that of the run which all compare with.
@pytest.mark.timeout(600)
class LayoutsTest(parameterized.TestCase):

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
    run = harness.Run(
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
    self.assertEmpty(harness.leftovers(run.workdir))

  def test_continues_one_process_as_two_on_another_mesh_and_as_four(self):
    run = self.start("moved", **layout(1, 8))
    run.wait_for_step(2)
    self.interrupt(run)
    other_mesh = {"mesh.data": 2, "mesh.tensor": 2}
    run = self.start("moved", **(layout(2, 4) | other_mesh))
    run.wait_for_step(5)
    self.interrupt(run)
    run = self.start("moved", **layout(4, 2))
    self.assertEqual(run.wait(), 0, run.text())
    # The next step and all after it; none was made twice.
    self.assertLen(run.steps(), NUM_STEPS)
    self.assertLen({r["epoch"] for r in run.steps()}, 3)
    self.assert_same_curve(run)
    self.assertLen(list((run.workdir / "logs").glob("trainer-*")), 4)

  def interrupt(self, run):
    run.process.send_signal(signal.SIGTERM)
    self.assertEqual(run.wait(60), 128 + signal.SIGTERM, run.text())

  def test_continues_after_two_processes_are_preempted_and_killed(self):
    run = self.start("faults", **layout(2, 4))
    run.wait_for_step(1)
    # A process that is preempted has all save and leave; on this machine the
    # supervisor starts them again.
    run.kill("trainer", signal.SIGTERM, index=1)
    (event,) = run.wait_for(lambda: run.events("interrupted"), "save")
    self.assertIn("saved at step", event["message"])
    # Any process may be killed: all of the trainer begin anew.
    for epoch, index in ((2, 0), (3, 1)):
      run.wait_for(
          lambda: run.steps()[-1]["epoch"] == epoch,  # noqa: B023
          f"step of epoch {epoch}",
      )
      if epoch == 2:
        # No step was made twice: none was lost.
        steps = [r["step"] for r in run.steps()]
        self.assertLen(set(steps), len(steps))
      searcher, before = run.pids("searcher"), run.pids("trainer")
      run.kill("trainer", index=index)
      run.wait_for(
          lambda: run.steps()[-1]["epoch"] == epoch + 1,  # noqa: B023
          f"step of epoch {epoch + 1}",
      )
      self.assertEmpty(set(before) & set(run.pids("trainer")))
      self.assertEqual(run.pids("searcher"), searcher)
    self.assertEqual(run.wait(), 0, run.text())
    self.assert_same_curve(run)
    # Once for the preemption and once for each kill.
    restarts = run.read("summary.json")["restarts"]
    self.assertEqual(restarts, {"trainer": 3, "searcher": 0, "store": 0})

  @parameterized.parameters("orbax", "network")
  def test_searchers_join_and_die_without_other_processes(self, carrier):
    # Half a step's prompts each, so that two find work. Either process of the
    # trainer publishes shards that the other has not; a version with less than
    # all of them is none.
    changes = {
        "train.num_steps": 100,
        "search.prompts_per_round": 4,
        "publish.carrier": carrier,
        "mesh.fsdp": 2,
        "trainer.num_processes": 2,
        "trainer.cpu_devices": 1,
    }
    run = self.start(f"elastic-{carrier}", **changes)
    run.wait_for_step(10)
    joined = harness.Process(
        harness.command("searcher", run.workdir, "7"),
        run.workdir / "logs" / "joined.log",
    )
    self.addCleanup(joined.close)

    def has_sampled():
      result = (run.read("status.json") or {}).get("searchers", {})
      return any(s["index"] == 7 and s.get("busy_s") for s in result.values())

    run.wait_for(has_sampled, "work of the one that joined")
    joined.process.kill()
    self.assertEqual(run.wait(), 0, run.text())
    gone = [e["message"] for e in run.events("searcher_gone")]
    self.assertTrue(any(m.startswith("s007-") for m in gone), gone)
    for kind in ("died", "refused_version", "carrier_full"):
      self.assertEmpty(run.events(kind))
    summary = run.read("summary.json")
    self.assertTrue(summary["ledger_closed"])
    self.assertEqual(set(summary["restarts"].values()), {0})
