# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Environments in the real program: lockstep's bits, killed and resumed."""

import json
import os
import pathlib
import signal
import sys
from unittest import mock

from absl.testing import absltest
import numpy as np

from tba_jax.system import processes
from tba_jax.tools import verify
from tests.support import guess_agent
from tests.support import harness

_STEPS = 12
_AGENT = pathlib.Path(guess_agent.__file__)
_CONFIG = "configs/guess.py:smoke,lockstep"
_OVERRIDES = {
    "init": "scratch",
    "train.num_steps": _STEPS,
    "checkpoint.every_steps": 4,
    "evaluate.every_steps": 0,
    "task.source": f"{_AGENT}:Guess",
    "reward.readable": str(guess_agent.FILE),
}


class EnvironmentsTest(absltest.TestCase):

  def test_killed_and_resumed_run_of_agents_matches_loop_with_class(self):
    # Programs as users compile them, whatever flags tests run with.
    self.enter_context(mock.patch.dict(os.environ, XLA_FLAGS=""))
    folder = pathlib.Path(self.create_tempdir().full_path)
    run = harness.Run(folder / "run", _OVERRIDES, _CONFIG)
    self.addCleanup(run.close)
    run.wait_for_step(2)
    run.kill("searcher")
    run.wait_for_step(6)
    run.process.send_signal(signal.SIGTERM)
    self.assertEqual(run.wait(60), 128 + signal.SIGTERM, run.text())
    run = harness.Run(folder / "run", _OVERRIDES, _CONFIG)
    self.addCleanup(run.close)
    self.assertEqual(run.wait(), 0, run.text())
    for record in run.steps():
      self.assertLess(record["train/logprob_gap"], 1e-5)
    summary = run.read("summary.json")
    self.assertTrue(summary["ledger_closed"])
    self.assertEqual(summary["reward_failures"], {})
    self.assertEqual(verify.run(None, str(run.workdir)), 0)

    config = run.read("config.json")
    config["config"]["task"]["source"] = f"{guess_agent.FILE}:Guess"
    (folder / "config.json").write_text(json.dumps(config))
    out, cores = folder / "loop.npz", processes.available_cores()
    alone = harness.Process(
        [
            *(sys.executable, "-m", "tests.support.single_process", "--loop"),
            str(folder / "config.json"),
            str(folder / "single"),
            str(out),
            str(cores[0]) if len(cores) > 1 else "",
        ],
        folder / "loop.log",
    )
    self.assertEqual(alone.wait(), 0, alone.text())
    leaves, params = np.load(out, allow_pickle=False), harness.params_of(
        run.workdir, _STEPS
    )
    self.assertCountEqual(leaves, params)
    for name, leaf in params.items():
      np.testing.assert_array_equal(leaves[name], leaf, err_msg=name)
