# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Several runs on one page."""

import json
import pathlib
import tempfile

from absl.testing import absltest
from etils import epath

from tba_jax.report import compare
from tba_jax.report import run_reader
from tba_jax.tools import report
from tests.report import fake_run
from tests.report import page as page_lib


class CompareTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.folder = pathlib.Path(folder.name)

  def make(self, name, beta=0.05, **changes):
    path = self.folder / name
    settings = dict(num_steps=12, num_samples=2, num_searchers=1)
    fake_run.make_run(str(path), **{**settings, **changes})
    config = fake_run.config()
    config["run_id"] = name
    config["config"]["loss"]["beta"] = beta
    (path / "config.json").write_text(json.dumps(config))
    return path

  def test_runs_are_found_by_folder(self):
    self.make("runs/a")
    self.make("runs/b", beta=0.1, finished=False)
    (self.folder / "runs" / "notes").mkdir()
    crashed = self.folder / "crashed"
    crashed.mkdir()
    (crashed / "metrics.jsonl").write_text('{"step": 0, "train/los')
    runs = str(self.folder / "runs")
    self.assertEqual(report.run(None, None, [runs, str(crashed)]), 0)
    # The page is beside the first.
    page = page_lib.Page(self.folder / "runs" / "compare.html")
    self.assertEqual(page.data["runs"], ["a", "b", "crashed"])
    reward = next(c for c in page.data["charts"] if c["title"] == "Reward")
    self.assertEqual([s["label"] for s in reward["series"]], ["a", "b"])
    self.assertEqual([s["run"] for s in reward["series"]], [0, 1])
    self.assertEqual({row["run"] for row in page.data["time"]}, {"a", "b"})
    # A chart of several metrics would mix runs and metrics.
    titles = [chart["title"] for chart in page.data["charts"]]
    self.assertIn("Batch: fresh", titles)
    self.assertNotIn("Batch", titles)

  def test_lists_differing_settings(self):
    paths = [self.make("a"), self.make("b", beta=0.1)]
    runs = [run_reader.read_run(path) for path in paths]
    self.assertEqual(
        compare.settings(runs),
        [{"name": "loss.beta", "values": ["0.05", "0.1"]}],
    )
    self.assertEqual(compare.settings(runs[:1] * 2), [])

  def test_runs_of_several_seeds_are_pooled(self):
    paths = [self.make("a"), self.make("b"), self.make("c", beta=0.1)]
    runs = [run_reader.read_run(path) for path in paths]
    for seed, run in enumerate(runs):
      run.config["config"]["seed"] = seed
      run.eval["after"]["pass_at_1"] = 0.5 + 0.1 * seed
    pooled = compare.over_seeds(runs, "abc")
    self.assertEqual(pooled["groups"], ["a, b"])
    cells = {row["name"]: row["values"] for row in pooled["rows"]}
    self.assertEqual(cells["pass@1"], ["55.0 % (50.0 % to 60.0 %)"])
    self.assertEmpty(compare.over_seeds(runs[1:], "bc"))
    self.assertIn("over-seeds", compare.write_comparison(paths).read_text())
    runs[0].eval.clear()
    self.assertEmpty(compare.over_seeds(runs, "abc"))

  def test_fills_missing_setting_with_its_default(self):
    runs = [
        run_reader.read_run(self.make("a")),
        run_reader.read_run(self.make("b")),
    ]
    del runs[1].config["config"]["loss"]["ratio_clip"]
    (row,) = compare.settings(runs)
    self.assertEqual(row, {"name": "loss.ratio_clip", "values": ["0.2", "0.0"]})
    runs[1].config.clear()
    rows = {row["name"]: row["values"] for row in compare.settings(runs)}
    self.assertEqual(rows["loss.ratio_clip"], ["0.2", "–"])

  def test_warns_of_different_tasks(self):
    paths = [self.make("a"), self.make("b")]
    word = "different tasks"
    self.assertNotIn(word, compare.write_comparison(paths).read_text())
    config = fake_run.config()
    config["config"]["task"] = {"name": "arithmetic"}
    (paths[1] / "config.json").write_text(json.dumps(config))
    page = compare.write_comparison(paths).read_text()
    self.assertIn(word, page)
    self.assertIn("name arithmetic", page)

  def test_shows_figures_of_each_run(self):
    runs = [run_reader.read_run(self.make("a"))]
    runs.append(run_reader.read_run(self.make("b", finished=False)))
    rows = {row["name"]: row["values"] for row in compare.figures(runs)}
    self.assertEqual(rows["state"][0], "finished")
    self.assertIn("no summary", rows["state"][1])
    self.assertStartsWith(rows["verdict"][0], "Learned")
    self.assertStartsWith(rows["verdict"][1], "Not known yet")
    self.assertEqual(rows["completions"], ["164,576", "–"])
    self.assertStartsWith(rows["pass@1, before"][0], "29.0 %")
    self.assertEqual(rows["pass@1, after"][1], "–")

  def test_names_are_distinct(self):
    paths = [epath.Path(p) for p in ("/x/a/run", "/x/b/run", "/x/b/other")]
    self.assertEqual(compare.names(paths), ["a/run", "b/run", "b/other"])
    self.assertEqual(compare.names(paths[1:]), ["run", "other"])

  def test_too_many_runs_are_refused(self):
    for i in range(compare.MAX_RUNS + 1):
      (self.folder / f"r{i}").mkdir()
      (self.folder / f"r{i}" / "config.json").write_text("{}")
    with self.assertRaisesRegex(ValueError, "up to 16 runs, found 17"):
      compare.find_runs([self.folder])
    with self.assertRaisesRegex(ValueError, "no run directory at"):
      compare.find_runs([self.folder / "none"])

  def test_text_of_run_is_escaped(self):
    paths = [self.make("a"), self.make("b")]
    clean = page_lib.Page(compare.write_comparison(paths))
    config = {"config": {page_lib.HOSTILE: page_lib.HOSTILE}}
    (paths[0] / "config.json").write_text(json.dumps(config))
    record = {"step": 99, "time": fake_run.START, page_lib.HOSTILE: 1.0}
    with (paths[0] / "metrics.jsonl").open("a") as f:
      f.write(json.dumps(record) + "\n")
    page = page_lib.Page(compare.write_comparison(paths))
    self.assertNotIn("img", page.tags)
    self.assertEqual(page.tags.count("script"), clean.tags.count("script"))
    source = page.source
    self.assertIn("default-src 'none'", source)
    self.assertNotIn("\x1b", source)
    self.assertNotIn("\u202e", source)
