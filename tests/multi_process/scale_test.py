# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The scale benchmark runs, cleans up and says what it promises."""

import json
import os
import tempfile
from unittest import mock

from absl.testing import absltest

from benchmarks import scale
from tests.support import tiny_model


class ScaleRunTest(absltest.TestCase):

  def test_small_numbers(self):
    with tempfile.TemporaryDirectory(prefix="tba-") as folder:
      with mock.patch.object(tempfile, "tempdir", folder):
        out = scale.run(tiny_model.make_config(), ["1", "1", "0.1", "1,2"])
      self.assertEmpty(os.listdir(folder))
    self.assertEqual(json.loads(json.dumps(out)), out)
    self.assertEqual(list(out["runs"]), ["1", "2"])
    one, two = out["runs"].values()
    # None of its sleeps is shorter than half of .1 s.
    self.assertBetween(one["groups_per_s"], 1.0, 20.5)
    self.assertGreater(two["groups_per_s"], one["groups_per_s"])
    self.assertGreater(out["full"]["2"]["groups_per_s"], two["groups_per_s"])
    self.assertGreater(one["hand_over_ms"], 0)
    # It is what the model is calibrated by.
    self.assertAlmostEqual(one["groups_per_s_error"], 0.0)


if __name__ == "__main__":
  absltest.main()
