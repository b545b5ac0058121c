# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A run whose episodes use containers, with killed workers and searcher."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from unittest import mock

from absl.testing import absltest

from tba_jax.system import processes
from tba_jax.tools import verify
from tests.support import harness

_OVERRIDES = {
    "init": "scratch",
    "train.num_steps": 4,
    "checkpoint.every_steps": 2,
    "evaluate.every_steps": 0,
    "evaluate.final_prompts": 8,
    "task.source": f"{harness.ROOT}/examples/repairs.py:Scripted",
    "task.max_turns": 1,
    "reward.num_workers": 4,
    "reward.deadline_s": 60.0,
    "sampling.max_prompt_tokens": 128,
    "sampling.max_completion_tokens": 4,
    "model.max_positions": 132,
}
_REMOVE = "from tba_jax.system import sandbox; sandbox.TemporaryHome().close()"


class ContainersRunTest(absltest.TestCase):

  def test_run_with_killed_workers_solves_tasks_and_leaves_nothing(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    # Short: the run makes sockets there.
    temporary = self.enter_context(tempfile.TemporaryDirectory())
    self.enter_context(mock.patch.dict(os.environ, TMPDIR=temporary))
    run = harness.Run(folder / "run", _OVERRIDES, "configs/guess.py:smoke")
    self.addCleanup(run.close)
    run.wait_for_step(1)
    for part in ("episode_worker", "--new-session"):
      pids = run.wait_for(lambda part=part: self.workers(run, part), part)
      os.kill(pids[0], signal.SIGKILL)
    run.wait_for_step(2)
    run.kill("searcher")
    self.assertEqual(run.wait(), 0, run.text())
    self.assertEqual(verify.run(None, str(run.workdir)), 0)
    for record in run.steps():
      self.assertGreater(record["train/reward_mean"], 0.9)
    records = harness.lines(run.workdir / "metrics.jsonl")
    counts = {r["reward/commands"] for r in records if "reward/commands" in r}
    self.assertEqual(counts, {4.0})
    failures = run.read("summary.json")["reward_failures"]
    self.assertLessEqual(sum(failures.values()), 2, failures)
    left = subprocess.run(["pgrep", "-f", temporary], capture_output=True)
    self.assertEqual(left.stdout, b"")
    subprocess.run([sys.executable, "-c", _REMOVE], check=True)
    self.assertEmpty([*pathlib.Path(temporary).glob("tba_jax-reward-*")])

  def workers(self, run, part):
    """Returns processes of episodes with a part of a command line."""
    searchers = run.pids("searcher")
    return [
        pid
        for searcher in searchers
        for pid in processes.descendants(searcher)
        if part in _command_line(pid)
    ]


def _command_line(pid: int) -> str:
  try:
    data = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
  except OSError:
    return ""  # It has ended.
  return data.decode(errors="replace")


if __name__ == "__main__":
  absltest.main()
