# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Curves and histograms of the charts."""

from absl.testing import absltest

from tba_jax.report import curves


def _records(values, name="train/loss"):
  return [
      {"step": i, "time": 100.0 + i, name: value}
      for i, value in enumerate(values)
  ]


class ThinTest(absltest.TestCase):

  def test_keeps_short_series(self):
    out = curves.thin(_records([1.0, 3.0]), "train/loss")
    self.assertEqual(out["step"], [0, 1])
    self.assertEqual(out["time"], [100.0, 101.0])
    self.assertEqual(out["mean"], [1.0, 3.0])
    self.assertEqual(out["low"], out["high"])

  def test_thins_long_series(self):
    values = [float(i % 10) for i in range(10 * curves.MAX_POINTS)]
    out = curves.thin(_records(values), "train/loss")
    self.assertLen(out["step"], curves.MAX_POINTS)
    self.assertEqual(set(out["mean"]), {4.5})
    self.assertEqual((set(out["low"]), set(out["high"])), ({0.0}, {9.0}))
    self.assertEqual(out["step"][-1], len(values) - 1)

  def test_leaves_out_missing_and_non_finite_values(self):
    records = _records([1.0, None, float("nan"), True, 2.0])
    out = curves.thin(records, "train/loss")
    self.assertEqual(out["step"], [0, 4])

  def test_draws_band(self):
    records = [{"step": 0, "time": 1.0, "a": 0.5, "se": 0.01}]
    out = curves.thin(records, "a", "se", 2.0)
    self.assertEqual((out["low"], out["high"]), ([0.48], [0.52]))


class ChartsTest(absltest.TestCase):

  def test_charts_have_data(self):
    charts = curves.known_charts(_records([0.1], "train/reward_mean"))
    self.assertEqual([chart["title"] for chart in charts], ["Reward"])

  def test_adds_charts_of_unknown_metrics(self):
    records = [
        {"step": 0, "time": 1.0, "mine/a": 1, "train/loss": 2.0, "s": ""}
    ]
    titles = [chart["title"] for chart in curves.other_charts(records)]
    self.assertEqual(titles, ["mine/a"])

  def test_custom_metrics_have_charts(self):
    records = [
        {"step": 0, "time": 1.0, "loss/share": 0.5, "reward/length": 3.0},
        {
            "step": 1,
            "time": 2.0,
            "eval/reward/length": 4.0,
            "reward/turns": 2.0,
        },
        {"step": 2, "time": 3.0, "reward/failed_nan": 1.0},
    ]
    charts = {c["title"]: c["series"] for c in curves.known_charts(records)}
    self.assertEqual(
        {
            title: [s["name"] for s in series]
            for title, series in charts.items()
        },
        {
            "Turns": ["reward/turns"],
            "Loss: share": ["loss/share"],
            "Reward: length": ["reward/length", "eval/reward/length"],
        },
    )
    (other,) = curves.other_charts(records)
    self.assertEqual(other["title"], "reward/failed_nan")
    # Many parts of a reward would push the other charts away.
    many = [{"step": 0, **{f"reward/{i}": 1.0 for i in range(20)}}]
    self.assertEmpty(curves.known_charts(many))
    self.assertLen(curves.other_charts(many), 20)

  def test_evaluations_join_records(self):
    records = _records([1.0])
    history = {"history": [{"step": 0, "pass_at_1": 0.3}, {"step": 9}]}
    out = curves.with_evaluations(records, history)
    self.assertEqual([r["step"] for r in out], [0, 9])
    self.assertEqual(out[0]["eval/pass_at_1"], 0.3)
    self.assertNotIn("eval/pass_at_1", records[0])


class AxesTest(absltest.TestCase):

  def test_axes_are_steps_time_completions_and_tokens(self):
    records = [
        {"step": i, "total/completions": 8 * i, "total/tokens": 90 * i}
        for i in range(3 * curves.MAX_POINTS)
    ]
    records.insert(1, {"step": 0, "eval/pass_at_1": 0.5})
    axes = curves.axes(records)
    self.assertLessEqual(len(axes["step"]), curves.MAX_POINTS + 1)
    self.assertEqual((axes["step"][0], axes["tokens"][0]), (0, 0))
    last = 3 * curves.MAX_POINTS - 1
    self.assertEqual((axes["step"][-1], axes["tokens"][-1]), (last, 90 * last))
    self.assertEqual(axes["completions"][1], 8 * axes["step"][1])

  def test_has_no_axes_without_totals(self):
    self.assertEqual(curves.axes(_records([1.0])), {})


class HistogramTest(absltest.TestCase):

  def test_averages_histograms_over_time(self):
    records = [
        {"step": i, "h": {"0": 1, "2": i % 2, "9": 0}}
        for i in range(2 * curves.MAX_COLUMNS)
    ]
    out = curves.histogram_over_time([*records, {"step": 999}], "h")
    self.assertEqual(out["step"], list(range(1, 2 * curves.MAX_COLUMNS, 2)))
    self.assertEqual(out["value"], [0.0, 2.0])
    self.assertFalse(out["more"])
    self.assertEqual(out["share"][0], curves.MAX_COLUMNS * [0.667])
    self.assertEqual(out["share"][1], curves.MAX_COLUMNS * [0.333])
    self.assertEqual(curves.histogram_over_time(records, "none"), {})

  def test_last_row_has_all_larger_values(self):
    histogram = {str(v): 1 for v in range(2 * curves.MAX_ROWS)}
    out = curves.histogram_over_time([{"step": 0, "h": histogram}], "h")
    self.assertLen(out["value"], curves.MAX_ROWS)
    self.assertTrue(out["more"])
    self.assertAlmostEqual(sum(row[0] for row in out["share"]), 1.0, places=2)

  def test_sums_histograms(self):
    records = [{"h": {"10": 1, "2": 3}}, {}, {"h": {"2": 1, "x": 5, "3": None}}]
    self.assertEqual(curves.sum_histograms(records, "h"), [[2.0, 4], [10.0, 1]])

  def test_takes_last_histogram(self):
    records = [{"h": {"1": 1}}, {"h": {"2": 2}}, {"h": 3.0}]
    self.assertEqual(curves.last_histogram(records, "h"), [[2.0, 2]])
    self.assertEqual(curves.last_histogram([], "h"), [])
