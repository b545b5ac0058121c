# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A role that cannot begin says why, and is not started again for it."""

import contextlib
import io
import pathlib
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

  def setUp(self):
    super().setUp()
    self.config = load.load_config("configs/countdown.py:smoke")
    self.workdir = pathlib.Path(self.create_tempdir().full_path)
    self.run_info, _ = run_directory.create(str(self.workdir), self.config)

  def refused(self, pattern):
    error = io.StringIO()
    with mock.patch.object(processes, "start_role", autospec=True):
      with contextlib.redirect_stderr(error):
        status = trainer.run_trainer(self.config, str(self.workdir), ())
    self.assertEqual(status, processes.EXIT_CONFIG)
    self.assertRegex(error.getvalue(), pattern)

  def test_another_computation_in_the_same_directory(self):
    self.config.loss.beta = 0.1
    self.refused(r"^error: config.loss.beta = 0.1: the run was started with 0")

  def test_a_damaged_file_of_the_run_is_named(self):
    for name in ("epoch.json", "eval.json"):
      for text in ("{", "[]", '{"epoch": "1", "before": {"step": null}}'):
        (self.workdir / name).write_text(text)
        self.refused(f"^error: .*{name}: ")
        self.assertEqual((self.workdir / name).read_text(), text)
      (self.workdir / name).unlink()

  def test_a_lost_start_count_is_not_begun_anew(self):
    (self.workdir / "metrics.jsonl").write_text('{"step": 0}\n')
    self.refused("epoch.json is gone")
    self.assertFalse((self.workdir / "epoch.json").exists())

  def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew(self):
    self.config.checkpoint.every_steps = 3
    path = self.workdir / "metrics.jsonl"
    path.write_text('{"step": 4}\n{"step": 5}\n')
    trainer._check_is_new(self.config, self.run_info)
    path.write_text('{"step": 5}\n{"step": 6}\n')
    with self.assertRaisesRegex(ValueError, "checkpoints: .*step 6"):
      trainer._check_is_new(self.config, self.run_info)


if __name__ == "__main__":
  absltest.main()
