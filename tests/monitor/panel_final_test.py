# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests for panel_final."""

import io

from absl.testing import absltest
import rich.console

from tba_jax.monitor import panel
from tests.monitor.report import fake_run


def _shown(renderable):
  console = rich.console.Console(file=io.StringIO(), width=110)
  console.print(renderable)
  return console.file.getvalue()


class PanelFinalTest(absltest.TestCase):

  def test_final_table(self):
    before = {"pass_at_1": 0.29, "pass_at_k": 0.9, "distinct_correct": 2.0}
    after = {"pass_at_1": 0.68, "pass_at_k": 0.9, "distinct_correct": 1.8}
    summary = fake_run.summary(before, after)
    shown = _shown(panel.final_table(summary))
    for words in ("29.0 %", "68.0 %", "+39.0 points", "164,576", "closed"):
      self.assertIn(words, shown)
    shown = _shown(panel.final_table({"ledger_closed": False}))
    self.assertIn("OPEN", shown)
    table = panel.final_table({"steps": 2, "stopped_by": "guard kl"})
    self.assertIn("2 (stopped by guard kl)", _shown(table))
    table = panel.final_table({"reward_failures": {"exit": 2, "nan": 1}})
    self.assertIn("3 (2 exit, 1 nan)", _shown(table))

  def test_advice_is_a_list(self):
    shown = _shown(panel.advice_list(["a [b]", "c"]))
    self.assertEqual(
        [x.rstrip() for x in shown.splitlines()], ["• a [b]", "• c"]
    )


if __name__ == "__main__":
  absltest.main()
