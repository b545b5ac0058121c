# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Any process dies at any moment: the run goes on, and nothing counts twice."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

from absl.testing import absltest

from tests.multi_process import run_program

# Long enough to be shot at, with a model that learns nothing in particular.
_OVERRIDES = {
    "init": "scratch",
    "train.num_steps": 400,
    "checkpoint.every_steps": 20,
    "evaluate.every_steps": 0,
    "replay.recent_fraction": 0.75,
    "search.lease_s": 5.0,
    "store.probe_timeout_s": 2.0,
}
_ROLES = ("searcher", "kvservice", "trainer")


class RunFaultsTest(absltest.TestCase):

  def start(self, name, **more):
    folder = tempfile.mkdtemp(prefix=f"tba_jax_{name}_")
    run = run_program.Run(folder, {**_OVERRIDES, **more})
    self.addCleanup(run.close)
    return run

  def assert_finished_well(self, run, num_steps=400):
    self.assertEqual(run.wait(400), 0, run.text())
    summary = run.read("summary.json")
    if num_steps is None:
      num_steps = summary["steps"]
    self.assertEqual(summary["steps"], num_steps)
    self.assertTrue(summary["ledger_closed"])
    ledger = run.read("ledger.json")
    for unit in ("prompts", "completions", "tokens"):
      accounted = sum(
          ledger[term][unit]
          for term in (
              "trained_first_time",
              "in_buffer_untrained",
              "evicted_untrained",
              "queued",
          )
      ) + sum(
          amount[unit]
          for term in ("rejected", "lost")
          for amount in ledger[term].values()
      )
      self.assertEqual(ledger["generated"][unit], accounted)
      self.assertEqual(ledger["queued"][unit], 0)
    # Surviving history: each step once, and no completion as new twice.
    fresh = sum(
        round(r["replay/fresh_share"] * 8 * 4)
        for r in _surviving(run.steps(), num_steps)
    )
    trained = ledger["trained_first_time"]["completions"]
    self.assertEqual(fresh, trained)
    self.assertEmpty(run_program.leftovers(run.workdir))
    return summary

  def test_each_role_killed_three_times_at_random(self):
    rng = random.Random(7)
    # A limit in time, not in steps: on any machine the third shots still hit
    # something. It counts from the trainer's last start.
    run = self.start(
        "kills",
        **{"train.num_steps": 100_000, "train.wall_clock_limit_s": 75.0},
    )
    run.wait_for_step(3)
    shots = [role for role in _ROLES for _ in range(3)]
    rng.shuffle(shots)
    last = {}
    for role in shots:
      # A role that dies three times within a minute ends the run.
      earlier = last.setdefault(role, [])
      if len(earlier) >= 2:
        time.sleep(max(0.0, earlier[-2] + 61.0 - time.monotonic()))
      time.sleep(rng.uniform(0.0, 2.0))
      if run.process.poll() is not None:
        break
      run.kill(role)
      earlier.append(time.monotonic())
      # Its successor must be up, or the next shot would hit nothing.
      time.sleep(1.0)
    self.assertLen(shots, sum(map(len, last.values())))
    summary = self.assert_finished_well(run, None)
    self.assertEqual(summary["stopped_by"], "wall_clock_limit_s")
    self.assertEqual(
        summary["restarts"], {"trainer": 3, "searcher": 3, "store": 3}
    )

  def test_the_store_host_is_killed(self):
    run = self.start("host")
    run.wait_for_step(10)
    run.kill("store")
    summary = self.assert_finished_well(run)
    self.assertGreaterEqual(summary["restarts"]["store"], 1)

  def test_a_store_that_hangs_is_replaced(self):
    run = self.start("hang")
    run.wait_for_step(10)
    pid = run.kill("kvservice", signal.SIGSTOP)
    time.sleep(15.0)
    with self.assertRaises(ProcessLookupError):
      # It was replaced meanwhile, so there is nothing to continue.
      while True:
        time.sleep(0.1)
        os.kill(pid, 0)
    self.assert_finished_well(run)

  def test_a_stopped_store_host_delays_nobody(self):
    # Long enough to be still under way when the host goes on.
    num_steps = 2500
    run = self.start("stopped", **{"train.num_steps": num_steps})
    run.wait_for_step(10)
    pid = run.kill("store", signal.SIGSTOP)
    time.sleep(15.0)
    os.kill(pid, signal.SIGCONT)
    self.assert_finished_well(run, num_steps)

  def test_a_role_that_always_dies_ends_the_run_with_its_last_words(self):
    run = self.start("doomed")
    run.wait_for_step(1)
    shot = set()
    while run.process.poll() is None and len(shot) < 3:
      for pid in set(run.pids("searcher")) - shot:
        os.kill(pid, signal.SIGKILL)
        shot.add(pid)
      time.sleep(0.02)
    self.assertEqual(run.wait(60), 1)
    self.assertIn("searcher-0 died three times within a minute", run.text())
    self.assertEmpty(run_program.leftovers(run.workdir))
    self.assertTrue((run.workdir / "report.html").exists())

  def test_two_runs_in_one_directory_are_refused(self):
    run = self.start("twice")
    run.wait_for_step(1)
    second = run_program.Run(run.workdir, _OVERRIDES)
    self.assertEqual(second.wait(60), 2)
    self.assertIn(f"process {run.process.pid}", second.text())
    self.assertIsNone(run.process.poll())

  def test_a_finished_run_says_so_and_another_config_is_refused(self):
    more = {"train.num_steps": 4}
    run = self.start("finished", **more)
    self.assert_finished_well(run, 4)
    again = run_program.Run(run.workdir, {**_OVERRIDES, **more})
    self.assertEqual(again.wait(60), 0)
    self.assertIn("This run is finished", again.text())
    other = run_program.Run(
        run.workdir, {**_OVERRIDES, **more, "loss.beta": 0.5}
    )
    self.assertEqual(other.wait(60), 2)
    self.assertIn("config.loss.beta", other.text())


class WrongConfigTest(absltest.TestCase):

  def test_it_ends_with_status_2_and_touches_nothing(self):
    with tempfile.TemporaryDirectory() as folder:
      workdir = pathlib.Path(folder) / "run"
      for override, words in (
          ("--config.loss.bta=1", "loss.bta"),
          ("--config.loss.beta=-1", "config.loss.beta"),
          ("--config.train.num_steps=many", "many"),
          ("--config.train.completions_per_prompt=1", "completions_per_prompt"),
          ("--config.replay.recent_fraction=1.5", "recent_fraction"),
      ):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "tba_jax.main",
                "--program=train",
                f"--config={run_program.CONFIG}",
                f"--workdir={workdir}",
                override,
            ],
            cwd=run_program.ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn(words, done.stderr)
        self.assertNotIn("Traceback", done.stderr)
        self.assertFalse(workdir.exists())


def _surviving(records, num_steps):
  """The last record of each step; the metrics of an undone history go."""
  by_step = {}
  for record in records:
    for step in [s for s in by_step if s >= record["step"]]:
      if by_step[step]["epoch"] < record["epoch"]:
        del by_step[step]
    by_step[record["step"]] = record
  return [by_step[step] for step in range(num_steps)]


if __name__ == "__main__":
  absltest.main()
