# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Means, intervals, tables and progress of a sweep, from made-up results."""

import io
import math

from absl.testing import absltest
import ml_collections
import rich.console

from tba_jax.programs import stale_loop
from tba_jax.programs import sweep

LAGS = (stale_loop.Lag(), stale_loop.Lag(staleness_steps=4))


def make_runs(seeds=(0, 1, 2)):
  config = ml_collections.ConfigDict()
  return [
      stale_loop.Run(objective, lag, seed, config)
      for seed in seeds
      for objective in ("tb", "rloo")
      for lag in LAGS
  ]


def make_result(reward, *, diverged_step=None):
  before = {"reward": 0.0, "kl": 0.0, "ref_perplexity": 8.0}
  last = {"reward": reward, "kl": 2.5, "ref_perplexity": 9.0}
  return {
      "curve": [before] if diverged_step is not None else [before, last],
      "diverged_step": diverged_step,
      "wall_s": 3.0,
  }


class CellsTest(absltest.TestCase):

  def test_student_interval(self):
    mean, half = sweep.mean_and_half_width([1.0, 2.0, 3.0])
    self.assertEqual(mean, 2.0)
    # t_{2, 0.975} = 4.3027, s = 1.
    self.assertAlmostEqual(half, 4.3027 / math.sqrt(3), places=3)
    mean, half = sweep.mean_and_half_width([0.5])
    self.assertEqual(mean, 0.5)
    self.assertTrue(math.isnan(half))

  def test_counts_what_is_done_and_what_diverged(self):
    results = {
        "tb-s0-seed0": make_result(0.2),
        "tb-s0-seed1": make_result(0.4),
        "tb-s4-seed0": make_result(0.1),
        "rloo-s4-seed1": make_result(0.0, diverged_step=7),
    }
    cells = sweep.table_cells(make_runs(), results, "reward")
    self.assertEqual(
        list(cells), [(o, lag) for o in ("tb", "rloo") for lag in LAGS]
    )
    self.assertAlmostEqual(cells["tb", LAGS[0]].mean, 0.3)
    self.assertEqual(cells["tb", LAGS[0]].num_seeds, 2)
    texts = [cell.text(2) for cell in cells.values()]
    # t_{1, 0.975} = 12.706.
    self.assertEqual(texts, ["0.30 ± 1.27", "0.10", "–", "– (1 diverged)"])

  def test_markdown(self):
    results = {"tb-s0-seed0": make_result(0.25)}
    self.assertEqual(
        sweep.markdown_table(make_runs(), results).splitlines(),
        [
            "| objective | lag | reward | KL to the reference, nats a"
            " completion | perplexity under the reference | seeds |",
            "| --- | --- | --- | --- | --- | --- |",
            "| before training |  | 0.000 | 0.00 | 8.00 |  |",
            "| tb | s=0 | 0.250 | 2.50 | 9.00 | 1 |",
            "| tb | s=4 | – | – | – | 0 |",
            "| rloo | s=0 | – | – | – | 0 |",
            "| rloo | s=4 | – | – | – | 0 |",
        ],
    )


class ViewTest(absltest.TestCase):

  def test_lines_where_there_is_no_terminal(self):
    runs = make_runs(seeds=(0,))
    out = io.StringIO()
    console = rich.console.Console(file=out, width=200)
    results = {"tb-s0-seed0": make_result(0.25)}
    with sweep.View(console, runs) as view:
      view.update(results)
      self.assertEqual(out.getvalue(), "")  # It was there before.
      results["tb-s4-seed0"] = make_result(0.125)
      view.update(results, "rloo-s0-seed0")
      view.update(results)
      results["rloo-s0-seed0"] = make_result(0.0, diverged_step=3)
      view.update(results)
    first, second = out.getvalue().splitlines()
    self.assertRegex(first, r"2/4 runs, about \d+ min left  tb-s4-seed0: ")
    self.assertEndsWith(
        first, "reward 0.125, kl 2.50, ref_perplexity 9.00 (3 s)"
    )
    self.assertEndsWith(second, "rloo-s0-seed0: diverged at step 3")

  def test_the_table(self):
    out = io.StringIO()
    results = {
        "tb-s0-seed0": make_result(0.25),
        "rloo-s4-seed1": make_result(0.0, diverged_step=7),
    }
    rich.console.Console(file=out, width=200).print(
        sweep.progress_table(make_runs(), results)
    )
    text = out.getvalue()
    self.assertRegex(text, r"objective +s=0 +s=4")
    self.assertRegex(text, r"tb +0\.250 \(1\) +– \(0\)")
    self.assertRegex(text, r"rloo +– \(0\) +– \(1 diverged\) \(1\)")

  def test_in_place_on_a_terminal(self):
    out = io.StringIO()
    console = rich.console.Console(file=out, width=120, force_terminal=True)
    with sweep.View(console, make_runs()) as view:
      view.update({"tb-s0-seed0": make_result(0.25)}, "tb-s4-seed0")
    self.assertIn("1/12 runs", out.getvalue())
    self.assertIn("tb-s4-seed0", out.getvalue())


if __name__ == "__main__":
  absltest.main()
