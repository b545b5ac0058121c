# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Lockstep is exact: one process or several, interrupted or not: same bits."""

import os
import signal
import subprocess
import sys
import tempfile

from absl.testing import absltest
import numpy as np

from tba_jax.monitor.report import build as report
from tba_jax.system import processes
from tests.multi_process import run_program

_STEPS = 20
_OVERRIDES = {
    "init": "scratch",
    "train.num_steps": _STEPS,
    "search.lockstep": "true",
    "search.lead_steps": 0,
    "replay.recent_fraction": 0.75,
    "checkpoint.every_steps": 4,
    "evaluate.every_steps": 8,
}


class LockstepTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = cls.enter_context_class(tempfile.TemporaryDirectory())
    run = run_program.Run(f"{cls.folder}/whole", _OVERRIDES)
    if run.wait() != 0:
      raise AssertionError(run.text())
    cls.whole = run
    cls.params = run_program.params_of(run.workdir, _STEPS)

  @classmethod
  def enter_context_class(cls, manager):
    value = manager.__enter__()
    cls.addClassCleanup(manager.__exit__, None, None, None)
    return value

  def assert_same_params(self, leaves):
    self.assertCountEqual(leaves, self.params)
    for name, leaf in self.params.items():
      np.testing.assert_array_equal(leaves[name], leaf, err_msg=name)

  def test_staleness_is_zero_and_the_ledger_closes(self):
    for record in self.whole.steps():
      recent = record["replay/staleness_histogram"].get("0", 0)
      self.assertGreater(recent, 0)
    summary = self.whole.read("summary.json")
    self.assertTrue(summary["ledger_closed"])
    self.assertEqual(summary["completions"], _STEPS * 8 * 4)
    gaps = [r["train/logprob_gap"] for r in self.whole.steps()]
    self.assertLess(max(gaps), 1e-5)

  def test_a_single_process_gives_the_same_bits(self):
    out = f"{self.folder}/single.npz"
    cores = processes.available_cores()
    subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.support.single_process",
            f"{self.whole.workdir}/config.json",
            f"{self.folder}/single",
            out,
            str(cores[0]) if len(cores) > 1 else "",
        ],
        cwd=run_program.ROOT,
        check=True,
        timeout=300,
    )
    self.assert_same_params(dict(np.load(out)))

  def test_interrupted_and_resumed_gives_the_same_bits(self):
    workdir = f"{self.folder}/resumed"
    for step, number in ((3, signal.SIGTERM), (9, signal.SIGINT)):
      run = run_program.Run(workdir, _OVERRIDES)
      self.addCleanup(run.close)
      run.wait_for_step(step)
      run.process.send_signal(number)
      self.assertEqual(run.wait(60), 128 + number, run.text())
      self.assertEmpty(run_program.leftovers(workdir))
    run = run_program.Run(workdir, _OVERRIDES)
    self.addCleanup(run.close)
    self.assertEqual(run.wait(), 0, run.text())
    self.assert_same_params(run_program.params_of(workdir, _STEPS))
    self.assertTrue(run.read("summary.json")["ledger_closed"])

  def test_a_killed_trainer_gives_the_same_bits(self):
    workdir = f"{self.folder}/killed"
    run = run_program.Run(workdir, _OVERRIDES)
    self.addCleanup(run.close)
    run.wait_for_step(10)
    run.kill("trainer")
    self.assertEqual(run.wait(), 0, run.text())
    self.assertEqual(run.read("summary.json")["restarts"]["trainer"], 1)
    self.assert_same_params(run_program.params_of(workdir, _STEPS))

  def test_a_killed_supervisor_leaves_nothing_and_can_be_resumed(self):
    workdir = f"{self.folder}/headless"
    run = run_program.Run(workdir, _OVERRIDES)
    self.addCleanup(run.close)
    run.wait_for_step(6)
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    page = report.write_report(workdir).read_text()
    self.assertIn('"train/reward_mean"', page)
    self.assertNotIn("nothing measured yet", page)
    again = run_program.Run(workdir, _OVERRIDES)
    self.addCleanup(again.close)
    self.assertEqual(again.wait(), 0, again.text())
    self.assert_same_params(run_program.params_of(workdir, _STEPS))


if __name__ == "__main__":
  absltest.main()
