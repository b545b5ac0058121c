# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""How `sft` and `reward_model` begin and end as programs."""

import contextlib
import io
import os
import threading
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import ml_collections

from tba_jax.system import processes
from tba_jax.training import offline

_DONE = {"interrupted": False, "step": 3, "model": "a/model"}


class RunProgramTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.stop = threading.Event()
    self.die = self.patch("die_with_parent")
    self.patch("enable_compilation_cache")
    self.patch("stop_on_signals", return_value=self.stop)

  def patch(self, name, **arguments):
    return self.enter_context(
        mock.patch.object(processes, name, autospec=True, **arguments)
    )

  # No virtual devices: those of the tests' process stay as they are.
  trainer = ml_collections.ConfigDict({"cpu_devices": 0, "num_processes": 1})

  def run_program(self, work, **arguments):
    """Returns the exit status, and what was printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      status = offline.run_program("sft", self.trainer, work, **arguments)
    return status, out.getvalue(), err.getvalue()

  def test_it_outlives_the_shell_that_started_it(self):
    work = lambda **_: _DONE
    with mock.patch.dict(os.environ):
      os.environ.pop(processes.SUPERVISED, None)
      self.run_program(work)
      self.die.assert_not_called()
      os.environ[processes.SUPERVISED] = str(os.getppid())
      self.run_program(work)
    self.die.assert_called_once_with()

  def test_it_has_the_virtual_devices_of_all_processes(self):
    self.trainer = ml_collections.ConfigDict(
        {"cpu_devices": 2, "num_processes": 4}
    )
    with mock.patch.object(jax.config, "update") as update:
      self.run_program(lambda **_: _DONE)
    update.assert_any_call("jax_num_cpu_devices", 8)

  def test_it_tells_progress_and_ends(self):
    ended = []

    def work(*, stop, on_progress):
      self.assertIs(stop, self.stop)
      on_progress(2, 3, {"train/loss": 0.25})
      return _DONE

    status, out, err = self.run_program(work, on_end=ended.append)
    self.assertEqual((status, ended, err), (0, [_DONE], ""))
    self.assertEqual(out, "sft 2/3  train/loss 0.25\nmodel: a/model\n")

  def test_an_interrupted_one_has_no_end(self):
    status, out, _ = self.run_program(
        lambda **_: {**_DONE, "interrupted": True}, on_end=self.fail
    )
    self.assertEqual(status, processes.EXIT_INTERRUPTED)
    self.assertIn("saved at step 3; the same command continues", out)

  @parameterized.parameters(
      (ValueError("a setting"), processes.EXIT_CONFIG),
      (FileNotFoundError("a file"), processes.EXIT_CONFIG),
      (FloatingPointError("a loss"), processes.EXIT_FATAL),
  )
  def test_an_error_is_a_line_and_a_status(self, error, wanted):
    status, _, err = self.run_program(mock.Mock(side_effect=error))
    self.assertEqual((status, err), (wanted, f"error: {error}\n"))


if __name__ == "__main__":
  absltest.main()
