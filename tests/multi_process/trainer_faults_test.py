# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A trainer of two processes that are killed, preempted, or wrongly started."""

import os
import signal
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.config import variants
from tba_jax.monitor import run_directory
from tba_jax.system import processes
from tests.multi_process import layouts_case
from tests.multi_process import run_program

arithmetic = variants.import_config("configs/arithmetic.py")


class TrainerFaultsTest(layouts_case.LayoutsCase):

  def start_two(self, name, **overrides):
    return self.start(name, **layouts_case.layout(2, 4), **overrides)

  @parameterized.parameters(0, 1)
  def test_any_process_may_be_killed(self, index):
    run = self.start_two(f"killed_{index}")
    run.wait_for_step(2)
    searcher = run.pids("searcher")
    before = run.pids("trainer")
    run.kill("trainer", index=index)
    run.wait_for(
        lambda: run.steps()[-1]["epoch"] == 2, "step of the second epoch"
    )
    self.assertEmpty(set(before) & set(run.pids("trainer")))
    self.assertEqual(run.pids("searcher"), searcher)
    self.assertEqual(run.wait(), 0, run.text())
    self.assert_same_curve(run)
    restarts = run.read("summary.json")["restarts"]
    self.assertEqual(restarts, {"trainer": 1, "searcher": 0, "store": 0})

  def test_one_that_is_preempted_has_all_save_and_leave(self):
    run = self.start_two("preempted")
    run.wait_for_step(1)
    run.kill("trainer", signal.SIGTERM, index=1)
    (event,) = run.wait_for(lambda: run.events("interrupted"), "save")
    self.assertIn("saved at step", event["message"])
    # On this machine the supervisor starts them again.
    self.assertEqual(run.wait(), 0, run.text())
    # No step was made twice: none was lost.
    self.assertLen(run.steps(), layouts_case.NUM_STEPS)
    self.assert_same_curve(run)

  def test_searchers_join_and_are_killed_without_anyone_else(self):
    # Half a step's prompts each, so that two find work.
    run = self.start_two(
        "elastic", **{"train.num_steps": 150, "search.prompts_per_round": 4}
    )
    run.wait_for_step(10)
    command = [
        *(sys.executable, "-m", "tba_jax.main", "--program=searcher"),
        *(f"--workdir={run.workdir}", "7"),
    ]
    with open(run.workdir / "logs" / "joined.log", "wb") as log:
      joined = subprocess.Popen(
          command, cwd=run_program.ROOT, stdout=log, stderr=log
      )
    self.addCleanup(joined.wait)
    self.addCleanup(joined.kill)

    def has_sampled():
      found = (run.read("status.json") or {}).get("searchers", {})
      return any(s["index"] == 7 and s.get("busy_s") for s in found.values())

    run.wait_for(has_sampled, "work of the one that joined")
    at = run.steps()[-1]["step"]
    run.wait_for_step(at + 10)
    joined.kill()
    run.wait_for_step(at + 20)
    self.assertEqual(run.wait(), 0, run.text())
    gone = [e["message"] for e in run.events("searcher_gone")]
    self.assertTrue(any(m.startswith("s007-") for m in gone), gone)
    self.assertEmpty(run.events("died"))
    summary = run.read("summary.json")
    self.assertTrue(summary["ledger_closed"])
    self.assertEqual(set(summary["restarts"].values()), {0})


class WrongStartTest(parameterized.TestCase):

  @parameterized.parameters(
      (["2", "ADDRESS"], "operand '2': allowed the number of a process"),
      (["0"], "config.trainer.coordinator = ''"),
      (["0", "ADDRESS"], "not all of config.trainer.num_processes = 2 came"),
  )
  def test_a_wrong_number_of_processes_is_one_clear_error(
      self, operands, words
  ):
    config = arithmetic.get_config("smoke,lockstep")
    config.init = "scratch"
    config.mesh.data = 8
    config.trainer.num_processes = 2
    config.trainer.start_deadline_s = 3.0
    workdir = self.create_tempdir().full_path
    run_directory.create(workdir, config)
    address = f"127.0.0.1:{processes.free_port()}"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tba_jax.main", "--program=trainer"),
            f"--workdir={workdir}",
            *(operand.replace("ADDRESS", address) for operand in operands),
        ],
        cwd=run_program.ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    self.assertEqual(done.returncode, 2, done.stderr)
    errors = [s for s in done.stderr.splitlines() if s.startswith("error: ")]
    self.assertLen(errors, 1, done.stderr)
    self.assertIn(words, errors[0])


if __name__ == "__main__":
  absltest.main()
