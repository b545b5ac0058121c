# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of `tba_jax.train`: checked, then handed to the supervisor."""

from unittest import mock

from absl.testing import absltest
import rich.console

import tba_jax
from tba_jax.config import variants
from tba_jax.programs import train

countdown = variants.import_config("configs/countdown.py")


class TrainTest(absltest.TestCase):

  def test_it_runs_the_train_program_in_the_directory(self):
    config = countdown.get_config("smoke")
    workdir = self.create_tempdir()
    with mock.patch.object(train, "run", autospec=True, return_value=0) as run:
      self.assertEqual(tba_jax.train(config, workdir=workdir), 0)
    run.assert_called_once_with(config, workdir.full_path, [])

  def test_a_notebook_gets_plain_lines(self):
    config = countdown.get_config("smoke")
    with (
        mock.patch.object(rich.console, "_is_jupyter", return_value=True),
        mock.patch.object(train, "_Supervisor", autospec=True) as made,
    ):
      tba_jax.train(config, workdir=self.create_tempdir())
      (_, _, console), _ = made.call_args
      self.assertFalse(console.is_jupyter)
      self.assertFalse(console.is_terminal)

  def test_a_wrong_setting_is_told_before_anything_starts(self):
    config = countdown.get_config("smoke")
    config.loss.beta = -1.0
    with mock.patch.object(train, "run", autospec=True) as run:
      with self.assertRaisesRegex(ValueError, "config.loss.beta"):
        tba_jax.train(config, workdir=self.create_tempdir())
    run.assert_not_called()


if __name__ == "__main__":
  absltest.main()
