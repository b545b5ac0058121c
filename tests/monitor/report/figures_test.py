# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of report.figures: what is drawn, and that it can be saved."""

import io
import tempfile

from absl.testing import absltest
from matplotlib import colors as mpl_colors
from matplotlib.backends import backend_agg

from tba_jax.monitor.report import figures
from tba_jax.monitor.report import load
from tests.monitor.report import fake_run


def save(fig):
  """Draws the figure, so that what can't be drawn raises; returns the PNG."""
  out = io.BytesIO()
  backend_agg.FigureCanvasAgg(fig).print_png(out)
  return out.getvalue()


class FiguresTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    fake_run.make_run(folder, num_steps=40, num_samples=2)
    cls.run_ = load.read_run(folder)
    cls.empty = load.read_run(
        cls.enterClassContext(tempfile.TemporaryDirectory())
    )

  def test_a_panel_for_each_chart_a_line_for_each_run(self):
    runs = {"tb": self.run_, "a\n$b$": self.run_}
    fig = figures.curves(runs, ["Reward", "Held-out pass@1", "Batch", "Loss"])
    panels = {ax.get_title(): ax for ax in fig.axes if ax.get_title()}
    self.assertCountEqual(
        panels, ["Reward", "Held-out pass@1", "Batch", "Loss"]
    )
    reward, accuracy = panels["Reward"], panels["Held-out pass@1"]
    self.assertLen(reward.lines, 2)
    self.assertEqual(reward.get_xlabel(), "optimizer step")
    self.assertEqual(reward.get_ylabel(), "task units")
    steps, values = load.column(self.run_.records, "train/reward_mean")
    for line, other in zip(reward.lines, reward.lines[1:]):
      self.assertNotEqual(line.get_color(), other.get_color())
    self.assertSequenceEqual(list(reward.lines[0].get_xdata()), list(steps))
    self.assertAlmostEqual(reward.lines[0].get_ydata()[3], values[3], places=4)
    # The band of an accuracy, and the series of a chart of several.
    self.assertLen(accuracy.collections, 2)
    legend = panels["Batch"].get_legend().get_texts()
    self.assertLen(legend, 4)
    self.assertEqual(
        [t.get_text() for t in fig.legends[0].get_texts()], ["tb", r"a␊\$b\$"]
    )
    fig = figures.curves({"$a$": self.run_, "b_$": self.run_}, ["Reward"])
    self.assertStartsWith(save(fig), b"\x89PNG")

  def test_what_a_run_does_not_have_is_said(self):
    fig = figures.curves({"": self.empty}, ["Reward"])
    (ax,) = fig.axes
    self.assertEqual(ax.texts[0].get_text(), "no data")
    save(fig)
    with self.assertRaisesRegex(ValueError, "no span of the run"):
      figures.timeline(self.empty)
    with self.assertRaisesRegex(ValueError, "none has a histogram"):
      figures.staleness({"a": self.empty})
    for titles, runs in ((["Rewards"], {"": self.run_}), (["Reward"], {})):
      with self.assertRaisesRegex(ValueError, "any of .'Reward', 'Held-out"):
        figures.curves(runs, titles)

  def test_a_timeline_has_a_bar_for_each_lane(self):
    fig = figures.timeline(self.run_, first_s=75, last_s=85)
    (ax,) = fig.axes
    self.assertEqual(
        [label.get_text() for label in ax.get_yticklabels()],
        ["trainer 0", "trainer 0 (publish)", "searcher 0", "searcher 1"],
    )
    self.assertEqual(ax.get_xlim(), (75, 85))
    names = [t.get_text() for t in fig.legends[0].get_texts()]
    self.assertIn("decode", names)
    self.assertNotIn("evaluate", names)
    patches = fig.legends[0].get_patches()
    color_of = dict(
        zip(names, (mpl_colors.to_hex(p.get_fc()) for p in patches))
    )
    waits = [name for name, c in color_of.items() if c == "#d9d9d9"]
    self.assertEqual(waits, ["waiting"])
    save(fig)

  def test_staleness_is_a_share_of_the_completions(self):
    fig = figures.staleness({"a": self.run_, "b": self.run_})
    (ax,) = fig.axes
    heights = [bar.get_height() for bar in ax.patches]
    self.assertAlmostEqual(sum(heights), 2.0)
    self.assertLen(ax.get_legend().get_texts(), 2)
    save(fig)


if __name__ == "__main__":
  absltest.main()
