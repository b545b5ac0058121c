# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests that the store benchmark runs, cleans up and says what it promises."""

import json
import os
import tempfile
from unittest import mock

from absl.testing import absltest

from benchmarks import store
from benchmarks import store_queue
from tests.support import tiny_model


class StoreBenchmarkTest(absltest.TestCase):

  def test_small_numbers(self):
    with (
        tempfile.TemporaryDirectory(prefix="tba-") as folder,
        mock.patch.object(store, "_SHAPE", (2, 2, 4, 4)),
        mock.patch.object(store_queue, "_SETTLE_S", 0.05),
    ):
      with mock.patch.object(tempfile, "tempdir", folder):
        out = store.run(tiny_model.make_config(), ["2", "1", "1", "3"])
      # Journal, spool and sockets are gone, and with them their processes.
      self.assertEmpty(os.listdir(folder))
    self.assertEqual(json.loads(json.dumps(out)), out)
    self.assertGreater(out["completions_per_s"], 0)
    self.assertAlmostEqual(
        out["share_of_raw"],
        out["completions_per_s"] / out["raw_completions_per_s"],
    )
    self.assertAlmostEqual(
        out["mb_per_s"] * 1e6,
        out["completions_per_s"] * store_queue.TOKENS * 8,
    )
    self.assertLen(out["rounds"], 1)
    self.assertEqual(out["steps"], 3)
    self.assertAlmostEqual(
        out["drain_p99_ms"],
        out["step_p99_ms"]["on"] - out["step_p99_ms"]["off"],
    )

  def test_the_cores_are_given_back(self):
    before = os.sched_getaffinity(0)
    failing = mock.patch.object(store, "_measure_speed", side_effect=OSError)
    with failing, self.assertRaises(OSError):
      store.run(tiny_model.make_config(), [])
    self.assertEqual(os.sched_getaffinity(0), before)

  def test_operands_are_checked(self):
    for operands in (["0"], ["1"] * 5, ["x"]):
      with self.assertRaises(ValueError):
        store.run(tiny_model.make_config(), operands)


if __name__ == "__main__":
  absltest.main()
