# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the benchmark of kills: what it runs, and whom it kills when."""

import json
import pathlib
import signal
from unittest import mock

from absl.testing import absltest

from benchmarks import kills
from tba_jax.config import variants

countdown = variants.import_config("configs/countdown.py")


class KillsTest(absltest.TestCase):

  def test_three_runs_of_a_seed_and_six_kills_in_one(self):
    """A run of seven steps: one kill after each but the last."""
    runs, killed = {}, []

    def train(config, workdir, operands):
      del operands
      runs[pathlib.Path(workdir).name] = config.copy_and_resolve_references()
      folder = pathlib.Path(workdir)
      folder.mkdir()
      roles = ["trainer", "searcher", "kvservice"]
      table = [{"role": r, "pid": i} for i, r in enumerate(roles)]
      (folder / "processes.json").write_text(json.dumps(table))
      values = ("pass_at_1", "pass_at_1_stderr", "pass_at_k", "mean_reward")
      sides = dict.fromkeys(values, folder.name)
      summary = {"before": sides, "after": sides, "restarts": {}, "steps": 7}
      (folder / "summary.json").write_text(json.dumps(summary))
      step = 0
      while folder.name == "killed" and step < 7:
        # Killed at this step at the latest, and only once.
        (folder / "status.json").write_text(json.dumps({"step": step}))
        if len(killed) == step:
          step += 1
      return 0

    config = countdown.get_config("smoke")
    config.train.num_steps = 7
    with (
        mock.patch.object(kills, "_POLL_S", 0.001),
        mock.patch.object(kills.train, "run", train),
        mock.patch.object(kills.os, "kill", lambda *args: killed.append(args)),
    ):
      found = kills.run(config, ["3"])
    self.assertEqual(killed, [(pid, signal.SIGKILL) for pid in (1, 2, 0) * 2])
    self.assertEqual(
        found["seeds"][3]["killed"]["after"]["pass_at_1"], "killed"
    )
    self.assertEqual({c.seed for c in runs.values()}, {3})
    changes = {n: (c.init == "sft", c.search.lockstep) for n, c in runs.items()}
    self.assertEqual(
        changes,
        {
            "undisturbed": (True, False),
            "killed": (False, False),
            "lockstep": (False, True),
        },
    )


if __name__ == "__main__":
  absltest.main()
