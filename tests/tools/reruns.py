# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A recorded run, and its `rerun` program in this process."""

import contextlib
import io
import pathlib
import tempfile
import threading

from absl.testing import parameterized

from tba_jax.config import load
from tba_jax.programs import one_process
from tba_jax.run import run_directory
from tba_jax.tools import rerun

OVERRIDES = (
    "init=scratch",
    "train.num_steps=12",
    "checkpoint.keep_journal=True",
    "evaluate.every_steps=0",
    "reference.role=trainer",
)


def train(workdir, overrides):
  """Trains or resumes a run; returns the exit status."""
  config = load.load_config(
      "configs/countdown.py:smoke", [*OVERRIDES, *overrides]
  )
  run, _ = run_directory.create(str(workdir), config)
  run_directory.update(str(workdir), config)
  return one_process.train(config, run, (), threading.Event())


def call(workdir, *operands):
  """Returns exit status, output and errors of the program."""
  out, errors = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
    status = rerun.run(None, workdir and str(workdir), operands)
  return status, out.getvalue(), errors.getvalue()


class TestCase(parameterized.TestCase):
  """Tests with a run, which `record` writes once; `folder` is for others."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(
        cls.enterClassContext(tempfile.TemporaryDirectory())
    )
    cls.workdir = cls.folder / "whole"
    status = cls.record(cls.workdir)
    assert status == 0, status

  def rerun(self, *operands):
    return call(self.workdir, *operands)
