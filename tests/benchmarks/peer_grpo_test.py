# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Peers' runs: their interpreter, clock and reward."""

import json
import os
import pathlib
from unittest import mock

from absl.testing import absltest
import numpy as np

from benchmarks import peer_grpo
from tba_jax.config import variants
from tba_jax.tasks import base
from tba_jax.tasks import task_table

instructions = variants.import_config("configs/instructions.py")

# In place of a Python: `-m MODULE FOLDER`.
_INTERPRETER = """#!/bin/sh
echo "$2"
grep -q '"num_steps": 2' "$3/settings.json" || exit 3
echo '{"step_ends": [1.0, 2.0]}' > "$3/result.json"
"""


class PeerGrpoTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def use_interpreters(self, **paths):
    variables = {peer_grpo.variable(peer): p for peer, p in paths.items()}
    self.enter_context(mock.patch.dict(os.environ, variables))

  def test_runs_peer_with_its_interpreter(self):
    path = self.folder / "python"
    path.write_text(_INTERPRETER)
    path.chmod(0o755)
    self.use_interpreters(tunix=str(path), trl="false")
    run = self.folder / "run"
    result = peer_grpo.run("tunix", run, {"num_steps": 2})
    self.assertEqual(result, {"step_ends": [1.0, 2.0]})
    self.assertEqual((run / "log.txt").read_text(), "benchmarks.tunix_grpo\n")
    with self.assertRaisesRegex(RuntimeError, "with 3: benchmarks.tunix_grpo"):
      peer_grpo.run("tunix", self.folder / "failed", {"num_steps": 3})
    path.write_text("#!/bin/sh\necho slow\nexec sleep 60\n")
    with self.assertRaisesRegex(RuntimeError, "nothing after 0 s: slow"):
      peer_grpo.run("tunix", self.folder / "late", {}, deadline_s=0.5)

  def test_stops_clock_for_snapshots(self):
    now = [100.0]

    def take_snapshot():
      now[0] += 7.0
      return now[0]

    settings = {"snapshot_steps": 2, "num_steps": 5}
    clock = peer_grpo.Clock(settings, take_snapshot, lambda: now[0])
    for _ in range(5):
      now[0] += 1.0
      clock.end_step()
    self.assertEqual(clock.step_ends, [101.0, 102.0, 103.0, 104.0, 105.0])
    self.assertEqual(clock.snapshots, {2: 109.0, 4: 118.0, 5: 126.0})
    clock.write(self.folder, ["numpy"])
    result = json.loads((self.folder / "result.json").read_text())
    self.assertEqual(result["step_ends"], clock.step_ends)
    self.assertEqual(result["versions"], {"numpy": np.__version__})

  def test_ends_and_takes_snapshots_by_seconds_of_training(self):
    now = [100.0]

    def take_snapshot():
      now[0] += 50.0
      return len(clock.step_ends)

    settings = {"snapshot_s": 2.0, "limit_s": 5.0, "num_steps": 99}
    clock = peer_grpo.Clock(settings, take_snapshot, lambda: now[0])
    while not clock.is_over:
      now[0] += 1.0
      clock.end_step()
    self.assertEqual(clock.snapshots, {3: 3, 5: 5, 6: 6})
    self.assertEqual(clock.step_ends[-1], 106.0)

  def test_only_terminated_completions_earn_task_reward(self):
    config = instructions.get_config()
    task = task_table.make_task(config.task)
    texts = [base.reference_text(task, "train", index) for index in (3, 5)]
    reward_fn = peer_grpo.make_task_rewards(
        {"task": config.task.to_dict(), "stop_ids": [2]}
    )
    said = [[{"role": "assistant", "content": text}] for text in (*texts, "?")]
    expected = [1.0, 1.0, task.reward("train", 5, "?")]
    ids = [3, 5, 5]
    for last, rewards in ((2, expected), (9, [0.0] * 3)):
      actual = reward_fn(
          completions=said, completion_ids=[[7, last]] * 3, prompt_id=ids
      )
      self.assertEqual(actual, rewards)

  def test_rewards_correct_completions(self):
    prompts = ["7,3,12,4>17"] * 3
    right = "4*3=12,12+12=24,24-7=17"
    completions = [right, "", right[:-1] + "8"]
    self.assertEqual(peer_grpo.rewards(prompts, completions), [1.0, 0.0, 0.0])
