# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Smoke runs of the benchmarks that start runs, each at its smallest size."""

import pathlib
import statistics
import tempfile

from absl.testing import absltest

from benchmarks import cost_ratios
from benchmarks import throughput
from tba_jax.config import variants
from tests.support import harness
from tests.support import tiny_model

countdown = variants.import_config("configs/countdown.py")


class BenchmarksTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory(prefix="tba_bench_")
    self.addCleanup(folder.cleanup)
    self.folder = pathlib.Path(folder.name)

  def run_benchmark(self, *operands, **settings):
    return harness.run_benchmark(self.folder, *operands, **settings)

  def test_delays_steps_by_their_bounds(self):
    out = cost_ratios.run(countdown.get_config(), ["0.25x1"], num_steps=3)
    (row,) = out["rows"]
    for name in ("synchronous", "lockstep", "asynchronous"):
      # The clocks of a few steps begin where the one before ended.
      self.assertGreater(row[f"{name}_s"], 0.8 * row[f"{name}_bound_s"])
    self.assertAlmostEqual(
        row["speedup"], row["synchronous_s"] / row["asynchronous_s"]
    )
    self.assertGreater(row["staleness"], 0)

  def test_compares_asynchronous_runs_with_lockstep(self):
    out = self.run_benchmark("end_to_end", "4", "1")
    (repeat,) = out["repeats"]
    self.assertAlmostEqual(
        repeat["achieved"], repeat["lockstep_wall_s"] / repeat["async_wall_s"]
    )
    self.assertBetween(repeat["ideal"], 1, 2)
    self.assertAlmostEqual(out["share"], repeat["achieved"] / repeat["ideal"])

  def test_compares_steps_with_synchronous_loop(self):
    model = tiny_model.make_model(num_layers=1, max_positions=128).config
    out = throughput.run(countdown.get_config(), ["1"], model)
    ours, other = (out["runs"][n] for n in ("asynchronous", "synchronous"))
    for run in (ours, other):
      self.assertAlmostEqual(
          run["tokens_per_s"] / run["completions_per_s"], 64.0
      )
    self.assertAlmostEqual(
        statistics.median(out["ratios"]["synchronous"]),
        ours["tokens_per_s"] / other["tokens_per_s"],
    )

  def test_keeps_results_and_skips_missing_peers(self):
    for seeds in ("0", "0,1"):
      out = self.run_benchmark(
          *("time_to_reward", seeds, "ours", "grpo"),
          env={"TBA_JAX_TRL": "false"},
      )
      self.assertEqual(out["left_out"], ["grpo"])
      self.assertEqual(
          [run["seed"] for run in out["runs"]], list(map(int, seeds.split(",")))
      )
      for run in out["runs"]:
        self.assertEqual(run["end_steps"], 6)
        self.assertGreater(run["end_seconds"], 0)
    results = self.folder / "runs" / "time_to_reward"
    self.assertTrue((results / "time_to_reward.png").exists())
    self.assertIn("ours", (results / "table.md").read_text())

  def test_scales_with_searchers_and_cleans_up(self):
    out = self.run_benchmark(
        *("scale", "1", "1", "0.1", "1,2"), env={"TMPDIR": str(self.folder)}
    )
    self.assertEmpty(list(self.folder.iterdir()))
    self.assertEqual(list(out["runs"]), ["1", "2"])
    one, two = out["runs"].values()
    # None of its sleeps is shorter than half of .1 s.
    self.assertBetween(one["groups_per_s"], 1.0, 20.5)
    self.assertGreater(two["groups_per_s"], one["groups_per_s"])
    self.assertGreater(out["full"]["2"]["groups_per_s"], two["groups_per_s"])
    self.assertGreater(one["hand_over_ms"], 0)
    # It is what the model is calibrated by.
    self.assertAlmostEqual(one["groups_per_s_error"], 0.0)
