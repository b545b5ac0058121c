# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests that the replay benchmark runs and says what it promises."""

import json
from unittest import mock

from absl.testing import absltest

from benchmarks import replay
from tba_jax.config import settings


class ReplayBenchmarkTest(absltest.TestCase):

  def test_small_sizes(self):
    with (
        mock.patch.object(replay, "_SIZES", (100, 2_000)),
        mock.patch.object(replay, "_ROUNDS", 3),
    ):
      out = replay.run(settings.get_config(), [])
    self.assertEqual(json.loads(json.dumps(out)), out)
    for part in ("insert", "draw", "total"):
      self.assertEqual(set(out[f"{part}_us"]), {"100", "2000"})
      self.assertGreater(out[f"{part}_ratio"], 0)

  def test_operands_are_refused(self):
    with self.assertRaisesRegex(ValueError, "faster"):
      replay.run(settings.get_config(), ["faster"])


if __name__ == "__main__":
  absltest.main()
