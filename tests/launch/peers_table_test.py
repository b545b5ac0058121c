# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The table of `tests/run.sh --peers`."""

import pathlib

from absl.testing import absltest

from tests.peers import table

_REPORT = """<testsuites><testsuite>
<testcase classname="a.ATest" name="test_a" time="1"/>
<testcase classname="a.ATest" name="test_b"><failure message="x"/></testcase>
<testcase classname="a.ATest" name="test_c"><skipped message="no
 model"/></testcase>
<testcase classname="a.ATest" name="test_d"><skipped message="no
 model"/></testcase>
</testsuite></testsuites>"""


class TableTest(absltest.TestCase):

  def row(self, text="", reason=""):
    report = pathlib.Path(self.create_tempdir().full_path) / "report.xml"
    if text:
      report.write_text(text)
    return table.make_row("gem", "gem-llm 0.1.0", report, "7", reason)

  def test_counts_and_lists_failures(self):
    self.assertEqual(
        self.row(_REPORT, "exit 1"),
        ["gem", "gem-llm 0.1.0", "1", "1", "2", "7",
         "failed: test_b; skipped: no model"],
    )  # fmt: skip

  def test_unfinished_check_counts_as_failed(self):
    for report in ("", _REPORT.replace("failure", "x")):
      row = self.row(report, "ended at its limit of 9 s")
      self.assertEqual(row[3], "1")
      self.assertStartsWith(row[-1], "failed: ended at its limit of 9 s")

  def test_numbers_stand_below_each_other(self):
    rows = [self.row(_REPORT), ["vllm", "", "12", "0", "0", "100", ""]]
    self.assertEqual(
        table.layout(rows).splitlines(),
        [
            "      packages       passed  failed  skipped    s",
            "gem   gem-llm 0.1.0       1       1        2    7"
            "  failed: test_b; skipped: no model",
            "vllm                     12       0        0  100",
        ],
    )
