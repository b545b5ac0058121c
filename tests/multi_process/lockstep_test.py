# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Lockstep is exact: one process or several, interrupted or not: same bits."""

import os
import pathlib
import signal
import sys
import tempfile
from unittest import mock

from absl.testing import parameterized
import numpy as np
import pytest

from tba_jax.report import page as report
from tba_jax.system import processes
from tba_jax.tools import verify
from tests.support import harness

_STEPS = 20
_OVERRIDES = {
    "init": "scratch",
    "train.num_steps": _STEPS,
    "search.lockstep": "true",
    "search.lead_steps": 0,
    "replay.recent_fraction": 0.75,
    "checkpoint.every_steps": 4,
    "evaluate.every_steps": 8,
    # A model from scratch has no reward yet, and equal log-probs no gradient.
    "loss.entropy_weight": 0.01,
}


# The first test's time has that of the run which all compare with.
@pytest.mark.timeout(600)
class LockstepTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = tempfile.TemporaryDirectory()
    cls.addClassCleanup(folder.cleanup)
    cls.folder = pathlib.Path(folder.name)
    # Programs as users compile them, whatever flags tests run with.
    cls.enterClassContext(mock.patch.dict(os.environ, XLA_FLAGS=""))
    run = harness.Run(cls.folder / "whole", _OVERRIDES)
    cls.addClassCleanup(run.close)
    if run.wait() != 0:
      raise AssertionError(run.text())
    cls.whole = run
    cls.params = harness.params_of(run.workdir, _STEPS)

  def start(self, workdir, **changes):
    run = harness.Run(workdir, {**_OVERRIDES, **changes})
    self.addCleanup(run.close)
    return run

  def assert_same_params(self, leaves):
    self.assertCountEqual(leaves, self.params)
    for name, leaf in self.params.items():
      np.testing.assert_array_equal(leaves[name], leaf, err_msg=name)

  def test_staleness_is_zero_and_ledger_closes(self):
    for record in self.whole.steps():
      recent = record["replay/staleness_histogram"].get("0", 0)
      self.assertGreater(recent, 0)
    summary = self.whole.read("summary.json")
    self.assertTrue(summary["ledger_closed"])
    self.assertEqual(summary["completions"], _STEPS * 8 * 4)
    gaps = [r["train/logprob_gap"] for r in self.whole.steps()]
    self.assertLess(max(gaps), 1e-5)

  def run_alone(self, run, *options):
    """Returns the params of the same config, trained in one thread."""
    out = self.folder / f"{run.workdir.name}{''.join(options)}.npz"
    cores = processes.available_cores()
    single = harness.Process(
        [
            *(sys.executable, "-m", "tests.support.single_process", *options),
            str(run.workdir / "config.json"),
            str(self.folder / "single"),
            str(out),
            str(cores[0]) if len(cores) > 1 else "",
        ],
        out.with_suffix(".log"),
    )
    self.assertEqual(single.wait(), 0, single.text())
    return dict(np.load(out, allow_pickle=False))

  @parameterized.parameters((), ("--loop",))
  def test_single_process_gives_same_bits(self, *options):
    self.assert_same_params(self.run_alone(self.whole, *options))

  def test_lag_of_three_steps_is_exact_and_gives_same_bits(self):
    run = self.start(self.folder / "lag", **{"search.lead_steps": 3})
    self.assertEqual(run.wait(), 0, run.text())
    for record in run.steps():
      # Replayed data is older.
      self.assertEqual(
          min(map(int, record["replay/staleness_histogram"])),
          min(record["step"], 3),
      )
    params = harness.params_of(run.workdir, _STEPS)
    for options in ((), ("--loop",)):
      alone = self.run_alone(run, *options)
      self.assertCountEqual(alone, params)
      for name, leaf in params.items():
        np.testing.assert_array_equal(alone[name], leaf, err_msg=name)
    # The lag matters.
    same = [np.array_equal(params[name], x) for name, x in self.params.items()]
    self.assertFalse(all(same))
    self.assertTrue(run.read("summary.json")["ledger_closed"])

  def test_interrupted_and_killed_run_gives_same_bits(self):
    workdir = self.folder / "resumed"
    for step, number in ((3, signal.SIGTERM), (7, signal.SIGINT)):
      run = self.start(workdir)
      run.wait_for_step(step)
      run.process.send_signal(number)
      self.assertEqual(run.wait(60), 128 + number, run.text())
      self.assertEmpty(harness.leftovers(workdir))
    # The trainer is killed, and then the supervisor, which leaves nothing.
    run = self.start(workdir)
    run.wait_for_step(11)
    run.kill("trainer")
    run.wait_for(lambda: run.steps()[-1]["epoch"] == 4, "step of a new trainer")
    run.wait_for_step(13)
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    page = report.write_report(str(workdir)).read_text()
    self.assertIn('"train/reward_mean"', page)
    self.assertNotIn("nothing measured yet", page)
    run = self.start(workdir)
    self.assertEqual(run.wait(), 0, run.text())
    self.assert_same_params(harness.params_of(workdir, _STEPS))
    self.assertTrue(run.read("summary.json")["ledger_closed"])

  def test_threads_of_one_process_give_same_bits(self):
    workdir = self.folder / "one_process"
    # On one core, as each of the other runs' processes is.
    cores = processes.available_cores()
    self.addCleanup(processes.pin, cores)
    processes.pin(cores[:1])
    run = self.start(workdir, **{"run.processes": "one"})
    processes.pin(cores)
    run.wait_for_step(4)
    # There is neither a searcher's process nor a store.
    rows = run.read("processes.json")
    self.assertEqual([row["role"] for row in rows], ["trainer"])
    self.assertEmpty(list(workdir.rglob("*.sock")))
    run.kill("trainer")
    run.wait_for(lambda: run.steps()[-1]["epoch"] == 2, "step after the kill")
    run.wait_for_step(10)
    run.process.send_signal(signal.SIGINT)
    self.assertEqual(run.wait(60), 128 + signal.SIGINT, run.text())
    self.assertEmpty(harness.leftovers(workdir))
    self.assertNotEmpty(run.events("interrupted"))
    # Processes of their own go on where the threads were.
    run = self.start(workdir)
    self.assertEqual(run.wait(), 0, run.text())
    self.assert_same_params(harness.params_of(workdir, _STEPS))
    summary = run.read("summary.json")
    self.assertTrue(summary["ledger_closed"])
    self.assertEqual(summary["restarts"]["trainer"], 1)
    parts, _ = verify.audit(workdir)
    self.assertEmpty([one for part in parts for one in part.problems])
