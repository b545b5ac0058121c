# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmark of publication with one small size."""

from absl.testing import absltest

from benchmarks import publish
from tests.support import base_config


class PublishTest(absltest.TestCase):

  def test_every_carrier_is_measured_beside_a_copy(self):
    found = publish.run(base_config.make(), ["1"])
    self.assertEqual(found["left_out_mb"], [])
    self.assertLen(found["rows"], 3)
    for row in found["rows"]:
      self.assertEqual(row["mb"], 1)
      for name in ("publish", "pull"):
        self.assertGreater(row[f"{name}_s"], 0)
        self.assertAlmostEqual(
            row[f"{name}_share"], row["copy_s"] / row[f"{name}_s"]
        )

  def test_sizes_without_room_are_named(self):
    found = publish.run(base_config.make(), ["100000000"])
    self.assertEqual(found, {"rows": [], "left_out_mb": [100000000]})

  def test_a_wrong_size_is_refused(self):
    with self.assertRaisesRegex(ValueError, "sizes in MB"):
      publish.run(base_config.make(), ["0"])


if __name__ == "__main__":
  absltest.main()
