# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The report in a headless Chromium.

Screenshots go to TBA_JAX_SCREENSHOTS if it is set.
"""

import json
import os
import pathlib
import tempfile

from absl.testing import absltest

from tba_jax.report import compare
from tba_jax.report import page
from tests.browser import chromium
from tests.report import fake_run
from tests.report import page as page_lib


def _luminance(color: str) -> float:
  """Returns the relative luminance of `rgb(r, g, b)`, as WCAG defines it."""
  channels = color[color.index("(") + 1 : -1].split(",")[:3]
  linear = [
      c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
      for c in (float(c) / 255 for c in channels)
  ]
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(a: str, b: str) -> float:
  high, low = sorted((_luminance(a), _luminance(b)), reverse=True)
  return (high + 0.05) / (low + 0.05)


class ReportBrowserTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = tempfile.TemporaryDirectory()
    cls.addClassCleanup(folder.cleanup)
    cls.folder = pathlib.Path(folder.name)
    cls.driver = chromium.start(cls, cls.folder)
    run = cls.folder / "countdown"
    fake_run.make_run(str(run), num_steps=320, num_samples=120)
    with (run / "samples.jsonl").open("a") as f:
      sample = {
          "step": 400,
          "prompt": page_lib.HOSTILE,
          "completion": page_lib.HOSTILE,
      }
      sample["reason"] = f"wanted {page_lib.HOSTILE}"
      f.write(json.dumps(sample | {"reward": -1.0}) + "\n")
      call = '<tool_call>{"name": "multiply"}</tool_call>'
      episode = {
          "step": 1,
          "prompt": "2*2?",
          "completion": f"{call}44!",
          "tokens": [call, "4", "4", "!"],
          "logprobs": [-0.5, None, -0.25, None],
          "reward": 1.0,
      }
      f.write(json.dumps(episode) + "\n")
    cls.page = page.write_report(run)
    other = cls.folder / "rloo"
    fake_run.make_run(str(other), num_steps=200, finished=False, seed=1)
    config = fake_run.config()
    config["config"]["loss"]["name"] = "rloo"
    (other / "config.json").write_text(json.dumps(config))
    cls.comparison = compare.write_comparison([run, other])

  def setUp(self):
    super().setUp()
    self.driver.get(f"file://{self.page}")

  def tearDown(self):
    entries = self.driver.get_log("browser")
    self.assertEqual([e["message"] for e in entries], [])
    super().tearDown()

  def _all(self, selector):
    return self.driver.find_elements("css selector", selector)

  def _one(self, selector):
    return self.driver.find_element("css selector", selector)

  def _script(self, body, *args):
    return self.driver.execute_script(body, *args)

  def _screenshot(self, name):
    """Returns the whole page as PNG, and saves it if requested."""
    height = self._script("return document.documentElement.scrollHeight")
    self.driver.set_window_size(1320, height + 100)
    png = self.driver.get_screenshot_as_png()
    self.driver.set_window_size(1320, 1000)
    keep = os.environ.get("TBA_JAX_SCREENSHOTS")
    if keep:
      folder = pathlib.Path(keep)
      folder.mkdir(parents=True, exist_ok=True)
      (folder / f"report_{name}.png").write_bytes(png)
    return png

  def test_all_figures_are_drawn(self):
    self.assertEqual(self._script("return document.body.dataset.ready"), "yes")
    titles = [
        c.get_attribute("data-chart") for c in self._all("#charts .chart")
    ]
    for title in ("Reward", "Held-out pass@1", "Entropy", "Staleness"):
      self.assertIn(title, titles)
    for chart in self._all("#charts .chart"):
      self.assertNotEmpty(chart.find_elements("css selector", "svg path"))
    self.assertNotEmpty(self._all("#staleness-figure rect"))
    self.assertNotEmpty(self._all("#uses-figure rect"))
    self.assertLen(self._all("#time-figure .lane"), 4)
    self.assertLen(self._all("#events-table tbody tr"), 4)
    self.assertNotEmpty(self._all("#diversity .chip.right"))
    painted = self._script(
        "const c = document.querySelector('#timeline-figure canvas');"
        "const all = [0, 0, c.width, c.height];"
        "const d = c.getContext('2d').getImageData(...all).data;"
        "return new Set(new Uint32Array(d.buffer)).size"
    )
    self.assertGreater(painted, 5)

  def test_page_makes_no_network_requests(self):
    asked = self._script(
        "return performance.getEntriesByType('resource').map((e) => e.name)"
    )
    self.assertEqual([u for u in asked if not u.startswith("data:")], [])

  def test_page_fits_window(self):
    for width in (1320, 420):
      self.driver.set_window_size(width, 900)
      wider = self._script(
          "return document.documentElement.scrollWidth - innerWidth"
      )
      self.assertLessEqual(wider, 0, width)
    # No table is cut on a phone.
    cut = "return arguments[0].scrollWidth - arguments[0].clientWidth"
    for card in self._all(".card"):
      self.assertLessEqual(self._script(cut, card), 0, card.text[:100])
    self.driver.set_window_size(1320, 1000)

  def test_samples_are_found_by_text_and_reward(self):
    count = self._one("#sample-count")
    self.assertStartsWith(count.text, "122 of 122")
    self._one("#sample-query").send_keys("onerror")
    self.assertStartsWith(count.text, "1 of 122")
    (row,) = self._all("tr.sample")
    self.assertIn("⟦U+202E⟧", row.text)
    self.assertIn("␛[2J", row.text)
    self.assertEmpty(self._all("img"))
    self.assertNotEqual(self.driver.title, "broken")
    self._one("#sample-query").clear()
    self._one("#sample-reward option[value='>0']").click()
    rewards = [float(e.text) for e in self._all("tr.sample td:nth-child(5)")]
    self.assertNotEmpty(rewards)
    self.assertTrue(all(r > 0 for r in rewards))
    self._one("#sample-query").send_keys("no such text")
    self.assertIn("No sample fits", self._one("#samples-table").text)

  def test_reasons_of_wrong_samples(self):
    self._one("#sample-query").send_keys("wanted")
    (row,) = self._all("tr.sample")
    why = row.find_element("css selector", ".why").text
    self.assertStartsWith(why, "wanted ")
    self.assertIn("⟦U+202E⟧", why)
    self._one("#sample-query").clear()
    # One kind, whatever the number is.
    kind = "step #: uses # once too often"
    self._one(f"#sample-reason option[value='{kind}']").click()
    rows = self._all("tr.sample")
    self.assertNotEmpty(rows)
    for row in rows:
      self.assertIn("once too often", row.text)

  def test_tokens_have_their_logprobs(self):
    tokens = self._all("tr.sample .token")
    self.assertNotEmpty(tokens)
    self.assertRegex(tokens[0].get_attribute("title"), r"nats · p [01]\.\d+")
    self._one("#sample-color").click()
    self.assertEmpty(self._all("tr.sample .token"))

  def test_turns_show_speaker_and_text(self):
    self._one("#sample-query").send_keys("multiply")
    said = [
        [
            turn.find_element("css selector", part).text
            for part in (".who", ".text")
        ]
        for turn in self._all("tr.sample .turn")
    ]
    self.assertEqual(
        [who for who, _ in said],
        ["policy", "multiply", "policy", "environment"],
    )
    self.assertEqual([text for _, text in said[1:]], ["4", "4", "!"])
    self.assertLen(self._all("tr.sample .token.given"), 2)

  def test_curves_switch_to_wall_clock(self):
    labels = lambda: self._one("#charts .chart svg").text
    self.assertNotIn("min", labels())
    self._one("[data-axis=time]").click()
    self.assertIn("min", labels())

  def test_curves_against_samples_and_tokens(self):
    for axis, last in (("completions", "150k"), ("tokens", "2M")):
      self._one(f"[data-axis={axis}]").click()
      self.assertIn(last, self._one("#charts .chart svg").text.split())

  def test_staleness_and_uses_over_run(self):
    for name in ("staleness", "uses"):
      self.assertNotEmpty(self._all(f"#{name}-over-time rect"))

  def test_shows_first_and_last_checkpoint_side_by_side(self):
    self.assertLen(self._all("tr.pair"), 6)
    cells, *_ = [
        row.find_elements("css selector", "td") for row in self._all("tr.pair")
    ]
    self.assertLen(cells, 3)
    for cell in cells[1:]:
      self.assertLen(cell.find_elements("css selector", ".one"), 8)
      self.assertNotEmpty(cell.find_elements("css selector", ".token"))
    self._one("#held-out-query").send_keys("3,4,7,2>17")
    self.assertLen(self._all("tr.pair"), 1)
    self._one("#held-out-query").clear()
    self._one("#held-out-choice option[value=worse]").click()
    self.assertLess(len(self._all("tr.pair")), 6)

  def test_runs_side_by_side(self):
    self.driver.get(f"file://{self.comparison}")
    self.assertEqual(self._script("return document.body.dataset.ready"), "yes")
    self.assertIn("loss.name", self._one("#settings").text)
    self.assertIn("no summary", self._one("#figures").text)
    curves = lambda: self._all("[data-chart=Reward] path[stroke-width='2']")
    self.assertLen(curves(), 2)
    self._one("#legend button").click()
    self.assertLen(curves(), 1)
    self._one("[data-axis=tokens]").click()
    self.assertLen(curves(), 1)
    # A share that stays at 0 has no axis down to -100 %.
    flat = self._script("return yRange({}, [{s: {mean: [0, 0]}}])")
    self.assertSequenceAlmostEqual(flat, [-0.06, 1.06])
    self.assertLen(self._all("#time-figure .lane"), 8)
    for theme in ("light", "dark"):
      self._script("setTheme(arguments[0])", theme)
      self.assertGreater(len(self._screenshot(f"compare_{theme}")), 50_000)
    for width in (1320, 420):
      self.driver.set_window_size(width, 900)
      wider = self._script(
          "return document.documentElement.scrollWidth - innerWidth"
      )
      self.assertLessEqual(wider, 0, width)
    self.driver.set_window_size(1320, 1000)

  def test_timeline_zooms_and_moves(self):
    canvas = self._one("#timeline-figure canvas")
    span = lambda: (
        float(canvas.get_attribute("data-from")),
        float(canvas.get_attribute("data-to")),
    )
    first, last = span()
    self._script("arguments[0].focus()", canvas)
    canvas.send_keys("+")
    low, high = span()
    self.assertAlmostEqual(high - low, (last - first) / 2, places=2)
    canvas.send_keys("0")
    self.assertEqual(span(), (first, last))
    self._one("#timeline-bar button:nth-child(4)").click()
    low, high = span()
    self.assertAlmostEqual(high - low, 10.0, places=2)
    self.assertAlmostEqual(high, last, places=2)

  def test_light_and_dark_are_readable(self):
    style = (
        "const s = getComputedStyle(arguments[0]);"
        "return [s.color, getComputedStyle(arguments[1]).backgroundColor]"
    )
    for theme in ("light", "dark"):
      self._script("setTheme(arguments[0])", theme)
      card = self._one("#summary .card")
      for selector, limit in (("#facts b", 7.0), ("#facts .note", 4.5)):
        ink, ground = self._script(style, self._one(selector), card)
        self.assertGreaterEqual(_contrast(ink, ground), limit, theme)
      for pill in self._all(".pill, .verdict, .chip.right"):
        ink, ground = self._script(style, pill, pill)
        self.assertGreaterEqual(_contrast(ink, ground), 4.5, theme)
      self.assertGreater(len(self._screenshot(theme)), 50_000)
