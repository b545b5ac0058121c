# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Whole runs whose searcher has two devices: the params of one with one."""

from absl.testing import parameterized
import numpy as np

from tests.support import harness

_STEPS = 6
_OVERRIDES = {
    "init": "scratch",
    "train.num_steps": _STEPS,
    "search.lockstep": "true",
    "search.lead_steps": 0,
    "evaluate.every_steps": 0,
    "checkpoint.every_steps": _STEPS,
    # A CPU's products of so many rows on each device have the bits of one.
    "sampling.num_slots": 32,
}


class SearcherDevicesTest(parameterized.TestCase):

  def run_to_the_end(self, name, **overrides):
    workdir = f"{self.create_tempdir().full_path}/{name}"
    run = harness.Run(workdir, {**_OVERRIDES, **overrides})
    self.addCleanup(run.close)
    self.assertEqual(run.wait(), 0, run.text())
    summary = run.read("summary.json")
    self.assertTrue(summary["ledger_closed"])
    self.assertEqual(summary["completions"], _STEPS * 8 * 4)
    self.assertEmpty(run.events("refused_version"))
    self.assertEmpty(run.events("idle_devices"))
    return run, harness.params_of(workdir, _STEPS)

  def test_trains_params_of_one_device_but_for_rounding(self):
    # On some CPUs the bits of a product depend on how many rows it has.
    _, expected = self.run_to_the_end("one")
    two = {"search.mesh.data": 2, "search.cpu_devices": 2}
    _, actual = self.run_to_the_end("two", **two)
    self.assertCountEqual(actual, expected)
    for name, leaf in expected.items():
      np.testing.assert_allclose(
          actual[name], leaf, rtol=1e-3, atol=1e-4, err_msg=name
      )

  def test_params_arrive_in_trainer_shards(self):
    run, _ = self.run_to_the_end(
        "split",
        **{
            "search.mesh.fsdp": 2,
            "search.cpu_devices": 2,
            "publish.carrier": "orbax",
        },
    )
    # What the trainer computes of the same tokens with its own params.
    gaps = [record["train/logprob_gap"] for record in run.steps()]
    self.assertLess(max(gaps), 1e-5)
