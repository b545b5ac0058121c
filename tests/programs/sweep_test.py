# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The sweep program: it ends with table and plot, and goes on after a stop.

Without training; `tests/multi_process/sweep_test.py` makes real runs.
"""

import contextlib
import io
import pathlib
import threading
from unittest import mock

from absl.testing import absltest

from tba_jax.config import load as load_lib
from tba_jax.config import validate
from tba_jax.config import variants
from tba_jax.monitor import run_directory
from tba_jax.programs import sft
from tba_jax.programs import stale_loop
from tba_jax.programs import sweep
from tba_jax.system import processes

staleness = variants.import_config("configs/staleness.py")

_FILE = str(pathlib.Path(staleness.__file__))


def expand(config):
  return sweep.expand_runs(config, validate.validate)


def load(*overrides):
  return load_lib.load_config(f"{_FILE}:smoke", overrides)


class FakeBench:
  """Stands in for `stale_loop.Bench`: the lag is the reward."""

  made: list[str] = []
  on_run = staticmethod(lambda: None)

  def __init__(self, config, workdir):
    del config, workdir

  def run(self, run, *, should_stop):
    if should_stop():
      raise stale_loop.Interrupted(run.name)
    type(self).made.append(run.name)
    values = {"kl": 1.0, "ref_perplexity": 2.0}
    self.on_run()
    return {
        "curve": [
            {"reward": 0.0, **values},
            {"reward": float(run.lag.staleness_steps), **values},
        ],
        "diverged_step": None,
        "wall_s": 1.0,
    }


class SweepTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = self.create_tempdir().full_path
    self.stop = threading.Event()
    self.enter_context(mock.patch.object(stale_loop, "Bench", FakeBench))
    self.fine_tune = self.enter_context(
        mock.patch.object(
            sft, "run", autospec=True, return_value={"interrupted": False}
        )
    )
    FakeBench.made.clear()
    for name in ("enable_compilation_cache", "stop_on_signals"):
      self.enter_context(
          mock.patch.object(processes, name, return_value=self.stop)
      )

  def run_sweep(self, config, *operands):
    """Returns the exit status, what was printed and the errors."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
      status = sweep.run(config, self.workdir, operands)
    # The lock is of the process; the next call is in the same one.
    (pathlib.Path(self.workdir) / ".lock").unlink(missing_ok=True)
    return status, out.getvalue(), errors.getvalue()

  def test_two_runs_with_a_stop_between_them(self):
    config = load(
        "sweep.objectives=tb: loss.name=tb", "sweep.staleness_steps=0,2"
    )
    names = [run.name for run in expand(config)]
    with mock.patch.object(FakeBench, "on_run", self.stop.set):
      status, out, _ = self.run_sweep(config)
    self.assertEqual(status, processes.EXIT_INTERRUPTED)
    self.assertIn("1/2 runs", out)
    self.assertIn("the same command continues", out)
    folder = pathlib.Path(self.workdir)
    # What is there can be read already.
    self.assertIn("| tb | s=2 | – |", (folder / "sweep.md").read_text())

    self.stop.clear()
    status, out, _ = self.run_sweep(config)
    self.assertEqual(status, processes.EXIT_OK)
    self.assertEqual(FakeBench.made, names)
    self.assertIn("2/2 runs", out)
    table = (folder / "sweep.md").read_text()
    self.assertIn("| before training |  | 0.000 | 1.00 | 2.00 |  |", table)
    for lag in (0, 2):
      self.assertIn(f"| tb | s={lag} | {lag}.000 | 1.00 | 2.00 | 1 |", table)
    png = (folder / "sweep.png").read_bytes()
    self.assertEqual(png[:8], b"\x89PNG\r\n\x1a\n")
    self.assertLess(len(png), 200_000)

    # Other settings would not be the runs that are there.
    status, _, errors = self.run_sweep(
        load("sweep.objectives=tb: loss.name=tb loss.ratio_clip=0.2")
    )
    self.assertEqual(status, processes.EXIT_CONFIG)
    self.assertIn("config.loss.ratio_clip = 0.2, was 0.0", errors)

  def test_fine_tunes_only_where_runs_start_from_that(self):
    self.run_sweep(load())
    self.fine_tune.assert_called_once()
    self.run_sweep(load("init=scratch"))
    self.fine_tune.assert_called_once()

  def test_fine_tuning_has_lines_without_a_terminal(self):
    def fine_tune(config, workdir, *, stop, on_progress):
      del config, workdir, stop
      on_progress(3, 20, {"loss": 1.0})
      return {"interrupted": False}

    self.fine_tune.side_effect = fine_tune
    _, out, _ = self.run_sweep(load())
    self.assertIn("fine-tuning: step 3 of 20\n", out)

  def test_makes_no_run_of_an_unfinished_model(self):
    self.fine_tune.return_value = {"interrupted": True}
    status, out, _ = self.run_sweep(load())
    self.assertEqual(status, processes.EXIT_INTERRUPTED)
    self.assertIn("the same command continues", out)
    self.assertEmpty(FakeBench.made)

  def test_a_run_that_another_process_has_is_left_to_it(self):
    runs = expand(load())
    with sweep._claim(self.workdir, runs[0]) as first:
      with sweep._claim(self.workdir, runs[0]) as second:
        with sweep._claim(self.workdir, runs[1]) as third:
          self.assertEqual((first, second, third), (True, False, True))
    with sweep._claim(self.workdir, runs[0]) as again:
      self.assertTrue(again)

  def test_refuses_before_anything_is_made(self):
    status, _, errors = self.run_sweep(load("sweep.objectives="))
    self.assertEqual(status, processes.EXIT_CONFIG)
    self.assertIn("error: config.sweep.objectives = ''", errors)
    status, _, errors = self.run_sweep(load(), "now")
    self.assertEqual(status, processes.EXIT_CONFIG)
    self.assertIn("takes no operands", errors)
    self.assertEmpty(list(pathlib.Path(self.workdir).iterdir()))

  def test_leaves_the_run_of_another_program_alone(self):
    other = load("sweep.objectives=")
    run_directory.create(self.workdir, other)
    status, _, errors = self.run_sweep(load())
    self.assertEqual(status, processes.EXIT_CONFIG)
    self.assertIn("a run of another program is there", errors)
    self.assertEqual(
        run_directory.load_config(self.workdir).sweep.objectives, ""
    )

  def test_one_sweep_at_a_time(self):
    with mock.patch.object(
        run_directory, "lock", side_effect=ValueError("already runs")
    ):
      status, _, errors = self.run_sweep(load())
    self.assertEqual(status, processes.EXIT_CONFIG)
    self.assertIn("already runs", errors)


if __name__ == "__main__":
  absltest.main()
