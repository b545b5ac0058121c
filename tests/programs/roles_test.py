# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A role that cannot begin says why, and is not started again for it."""

import contextlib
import io
from unittest import mock

from absl.testing import absltest

from tba_jax.config import load
from tba_jax.monitor import run_directory
from tba_jax.programs import searcher
from tba_jax.programs import trainer
from tba_jax.system import processes


class SearcherTest(absltest.TestCase):

  def refused(self, pattern, *operands):
    config = load.load_config("configs/countdown.py:smoke")
    workdir = self.create_tempdir().full_path
    run_directory.create(workdir, config)
    with mock.patch.object(processes, "start_role", autospec=True):
      with self.assertRaisesRegex(run_directory.NoRunError, pattern):
        searcher.run_searcher(config, workdir, operands)

  def test_an_operand_that_is_no_number(self):
    for operands in (("first",), ("-1",), ("0", "1")):
      self.refused("allowed one whole number", *operands)

  def test_no_model_to_start_from(self):
    self.refused("sft/model", "0")


class TrainerTest(absltest.TestCase):

  def test_another_computation_in_the_same_directory(self):
    config = load.load_config("configs/countdown.py:smoke")
    workdir = self.create_tempdir().full_path
    run_directory.create(workdir, config)
    config.loss.beta = 0.1
    error = io.StringIO()
    with mock.patch.object(processes, "start_role", autospec=True):
      with contextlib.redirect_stderr(error):
        status = trainer.run_trainer(config, workdir, ())
    self.assertEqual(status, processes.EXIT_CONFIG)
    self.assertRegex(
        error.getvalue(),
        r"^error: config.loss.beta = 0.1: the run was started with 0\.",
    )


if __name__ == "__main__":
  absltest.main()
