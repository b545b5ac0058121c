# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""One trainer of 1 x 8, 2 x 4 and 4 x 2 processes x devices: one loss curve.

The curve is that of one process with one device, in float32: each step's loss
within a relative difference of 1e-4, or 1e-5 where that is more.
"""

import signal

from absl.testing import absltest
from absl.testing import parameterized

from tests.multi_process import layouts_case


class LayoutsTest(layouts_case.LayoutsCase):

  @parameterized.parameters((2, 4), (4, 2))
  def test_the_loss_curve_is_that_of_one_device(self, processes, devices):
    layout = layouts_case.layout(processes, devices)
    run = self.start(f"{processes}x{devices}", **layout)
    self.assertEqual(run.wait(), 0, run.text())
    self.assert_same_curve(run)
    self.assertLen(list((run.workdir / "logs").glob("trainer-*")), processes)

  def test_each_process_publishes_its_own_shards(self):
    run = self.start(
        "shards",
        **{
            "publish.carrier": "orbax",
            # Either process has shards that the other has not; a version with
            # less than all of them is none.
            "mesh.fsdp": 4,
            "trainer.num_processes": 2,
            "trainer.cpu_devices": 2,
        },
    )
    self.assertEqual(run.wait(), 0, run.text())
    self.assertLen(run.steps(), layouts_case.NUM_STEPS)
    self.assertTrue(run.read("summary.json")["ledger_closed"])
    for kind in ("refused_version", "carrier_full"):
      self.assertEmpty(run.events(kind))

  def test_a_checkpoint_of_1_x_8_goes_on_as_2_x_4_on_another_mesh(self):
    run = self.start("moved", **layouts_case.layout(1, 8))
    run.wait_for_step(2)
    run.process.send_signal(signal.SIGTERM)
    self.assertEqual(run.wait(60), 128 + signal.SIGTERM, run.text())
    self.assertLess(max(self.losses_of(run)), layouts_case.NUM_STEPS - 1)
    other_mesh = {"mesh.data": 2, "mesh.tensor": 2, "sharding.vocab": ""}
    run = self.start("moved", **(layouts_case.layout(2, 4) | other_mesh))
    self.assertEqual(run.wait(), 0, run.text())
    # The next step and all after it; none was made twice.
    self.assertLen(run.steps(), layouts_case.NUM_STEPS)
    self.assert_same_curve(run)


if __name__ == "__main__":
  absltest.main()
