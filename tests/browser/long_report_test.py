# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The report of a long run, opened in a headless Chromium.

Prints how long the page took to open: no test asserts a time.
"""

import json
import pathlib
import tempfile

from absl.testing import absltest

from tba_jax.report import page
from tests.browser import chromium
from tests.report import fake_run

NUM = 100_000
LONG = "<b>" + "x" * 100_000 + "\u202e"


def repeat(path: pathlib.Path, count: int) -> None:
  """Makes a file of records as long as asked for, with steps that go on."""
  records = [json.loads(line) for line in path.read_text().splitlines()]
  with path.open("w") as file:
    for i in range(count):
      record = records[i % len(records)]
      record["step"] = i
      if "time" in record:
        record["time"] = fake_run.START + i * fake_run.STEP_S
      file.write(json.dumps(record) + "\n")


class LongReportTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
    cls.driver = chromium.start(cls, folder)
    run = folder / "long"
    fake_run.make_run(str(run), num_steps=5000, num_samples=1000)
    repeat(run / "metrics.jsonl", NUM)
    repeat(run / "samples.jsonl", NUM)
    with (run / "samples.jsonl").open("a") as file:
      for _ in range(50):
        sample = {"step": NUM, "prompt": LONG, "completion": LONG, "reward": 0}
        file.write(json.dumps(sample) + "\n")
    cls.page = page.write_report(run)

  def test_page_has_bounded_size_and_number_of_elements(self):
    size = self.page.stat().length
    self.assertLess(size, 20_000_000)
    script = self.driver.execute_script
    self.driver.get(f"file://{self.page}")
    self.assertEqual(script("return document.body.dataset.ready"), "yes")
    self.assertEqual(self.driver.get_log("browser"), [])
    opened_s = script(
        "return performance.getEntriesByType('navigation')[0].loadEventEnd"
    )
    print(f"{size / 1e6:.1f} MB, opened in {opened_s / 1000:.2f} s")
    # Many elements make a page slow on any machine.
    elements = script("return document.querySelectorAll('*').length")
    self.assertLess(elements, 20_000)
    (count,) = self.driver.find_elements("css selector", "#sample-count")
    self.assertIn("100,050", count.text)

  def test_long_line_fits_page(self):
    self.driver.get(f"file://{self.page}")
    query = self.driver.find_element("css selector", "#sample-query")
    query.send_keys("xxxx")
    row, *_ = self.driver.find_elements("css selector", "tr.sample")
    self.assertIn("<b>xxxx", row.text)
    self.assertIn("more characters", row.text)
    wider = self.driver.execute_script(
        "return document.documentElement.scrollWidth - innerWidth"
    )
    self.assertLessEqual(wider, 0)
