# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of judge commands: verdicts and failures."""

import os
import pathlib
import sys
from unittest import mock

from absl.testing import parameterized

from tba_jax.rewards import comparers
from tba_jax.rewards import judges
from tests.support import waiting

# Prefers the longer text; some prompts make it fail.
_SCRIPT = """
import json, os, sys, time
for line in sys.stdin:
  q = json.loads(line)
  what = q["prompt"]
  if what == "hang":
    open(sys.argv[1], "w").write(str(os.getpid()))
    time.sleep(600)
  if what == "crash":
    os._exit(3)
  if what == "deep":
    print("[" * 100000, flush=True)
    continue
  if what == "talk":
    print("I like it", flush=True)
    continue
  a, b = len(q["first"]), len(q["second"])
  winner = "tie" if a == b else "first" if a > b else "second"
  if what == "name":
    winner = "me"
  if what == "environment" and (
      "TBA_JAX_SECRET" in os.environ or "API_KEY" not in os.environ):
    winner = "me"
  if what == "first":
    winner = "first"
  print(json.dumps({"winner": winner}), flush=True)
  if what == "twice":
    time.sleep(0.2)
    print(json.dumps({"winner": winner}), flush=True)
"""


def _comparison(completion, reference, prompt="p"):
  return comparers.Comparison(
      prompt, judges.JudgeRequest("held_out", 0, completion), reference
  )


class CommandComparerTest(parameterized.TestCase):

  def make(self, deadline_s=30.0):
    folder = pathlib.Path(self.create_tempdir().full_path)
    (folder / "judge.py").write_text(_SCRIPT)
    self.pid_file = folder / "pid"
    self.events = []
    comparer = comparers.CommandComparer(
        f"{sys.executable} {folder / 'judge.py'} {self.pid_file}",
        deadline_s=deadline_s,
        on_event=lambda *event: self.events.append(event),
    )
    self.addCleanup(comparer.close)
    return comparer

  def test_judges_alike_in_either_order(self):
    comparer = self.make()
    comparisons = [_comparison("x" * n, "yyy") for n in range(1, 6)]
    comparisons += [_comparison("yyy" * n, "xxxx") for n in range(1, 4)]
    result = comparer.compare(comparisons)
    self.assertEqual([v.win for v in result], [0, 0, 0.5, 1, 1, 0, 1, 1])
    # The verdicts of a judge that always takes the first are balanced.
    blind = [_comparison(f"a{i}", f"b{i}", prompt="first") for i in range(64)]
    wins = [v.win for v in comparer.compare(blind)]
    self.assertBetween(sum(wins), 16, 48)
    self.assertEqual(wins, [v.win for v in comparer.compare(blind)])

  @parameterized.parameters(
      ("crash", "exit"),
      ("talk", "verdict"),
      ("deep", "verdict"),
      ("name", "verdict"),
  )
  def test_fails_only_comparison_without_verdict(self, prompt, cause):
    result = self.make().compare(
        [
            _comparison("xx", "y"),
            _comparison("xx", "y", prompt=prompt),
            _comparison("xx", "y"),
        ]
    )
    self.assertEqual([v.win for v in result], [1.0, None, 1.0])
    self.assertEqual([v.failure for v in result], ["", cause, ""])
    ((kind, message),) = self.events
    self.assertEqual(kind, "judge_failed")
    self.assertIn(f"{cause}, 1 so far", message)

  def test_takes_no_second_line_for_next_verdict(self):
    comparer = self.make()
    self.assertEqual(
        comparer.compare([_comparison("xx", "y", prompt="twice")])[0].win, 1.0
    )
    self.assertTrue(comparer._child.pipes.has_input(30.0))
    result = comparer.compare([_comparison("x", "yy"), _comparison("x", "yy")])
    self.assertEqual([v.failure for v in result], ["verdict", ""])
    self.assertEqual(result[1].win, 0.0)

  def test_kills_hanging_judge(self):
    comparer = self.make(deadline_s=3.0)
    result = comparer.compare([_comparison("xx", "y", prompt="hang")])
    self.assertEqual(result[0].failure, "deadline")
    pid = int(self.pid_file.read_text())
    waiting.wait_until(lambda: not waiting.is_running(pid), "its end")

  def test_passes_users_environment_without_secret(self):
    self.enter_context(
        mock.patch.dict(os.environ, TBA_JAX_SECRET="5e", API_KEY="mine")
    )
    (result,) = self.make().compare(
        [_comparison("x", "yy", prompt="environment")]
    )
    # It names the longer text only if it has the key alone.
    self.assertEqual(result.win, 0.0)

  def test_names_missing_command(self):
    comparer = comparers.CommandComparer("/nowhere/judge", deadline_s=30.0)
    result = comparer.compare([_comparison("xx", "y")])
    self.assertIsNone(result[0].win)
    self.assertEqual(result[0].failure, "exit")

  @parameterized.parameters("", "judge 'open")
  def test_refuses_non_command(self, command):
    with self.assertRaisesRegex(ValueError, "evaluate.judge_command="):
      comparers.CommandComparer(command, deadline_s=1.0)
