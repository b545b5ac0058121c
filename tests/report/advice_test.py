# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests for report.advice."""

import types

from absl.testing import absltest

from tba_jax import report
from tba_jax.report import advice
from tests.report import fake_run


def _row(role, index, seconds, elapsed=10.0, lane=""):
  return {
      "role": role,
      "index": index,
      "lane": lane,
      "elapsed_s": elapsed,
      "seconds": seconds,
  }


def _run(*records):
  return types.SimpleNamespace(records=list(records))


class AdviceTest(absltest.TestCase):

  def test_a_waiting_trainer_wants_searchers(self):
    rows = [
        _row("trainer", 0, {"step": 4.0, "wait_fresh": 6.0}),
        _row("trainer", 0, {"wait_x": 10.0}, lane="side"),
        _row("searcher", 0, {"decode": 10.0}),
    ]
    (line,) = advice.advice(_run(), rows)
    self.assertIn("trainer waited 60% of its time", line)
    self.assertIn("sampling bounds the run", line)
    self.assertIn("3 searchers instead of 1", line)

  def test_waiting_searchers_are_too_many(self):
    searcher = {"decode": 4.0, "wait_credit": 6.0}
    rows = [
        _row("trainer", 0, {"step": 10.0}),
        _row("searcher", 0, searcher),
        _row("searcher", 1, searcher),
    ]
    (line,) = advice.advice(_run(), rows)
    self.assertIn("searchers 60% of theirs: the trainer bounds the run", line)
    self.assertIn("1 searchers instead of 2", line)

  def test_balance(self):
    rows = [
        _row("trainer", 0, {"step": 9.5, "wait_fresh": 0.5}),
        _row("searcher", 0, {"decode": 9.8, "wait_credit": 0.2}),
    ]
    self.assertIn("in balance", advice.advice(_run(), rows)[0])

  def test_equal_groups_and_age(self):
    equal, age = "train/equal_reward_groups", "replay/staleness_steps"
    run = _run({equal: 0.5, age: 1.0}, {equal: 0.9, age: 2.0}, {equal: None})
    lines = advice.advice(run, [])
    self.assertStartsWith(lines[0], "70% of the groups")
    self.assertIn("search.samples_per_prompt", lines[0])
    self.assertIn("1.5 steps old", lines[1])
    (few,) = advice.advice(_run({equal: 0.2}), [])
    self.assertNotIn("search.samples_per_prompt", few)

  def test_the_page_shows_it(self):
    folder = self.create_tempdir().full_path
    fake_run.make_run(folder, num_steps=20, num_samples=2)
    with open(report.write_report(folder)) as f:
      page = f.read()
    self.assertIn("What the numbers say", page)
    self.assertRegex(page, r"The trainer waited \d+% of its time")

  def test_a_run_of_which_nothing_is_known(self):
    self.assertEqual(advice.advice(_run(), []), [])


if __name__ == "__main__":
  absltest.main()
