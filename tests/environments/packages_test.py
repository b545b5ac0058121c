# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Names of other packages' environments; tests/peers runs them."""

import importlib.util
from unittest import mock

from absl.testing import parameterized

from tba_jax.environments import packages
from tba_jax.tasks import task_table


class EnvironmentPackagesTest(parameterized.TestCase):

  @parameterized.parameters(
      ("textarena:Nim-v0", "pip install textarena"),
      ("gem:game:Sudoku-v0-easy", "pip install gem-llm"),
  )
  def test_missing_package_is_reported(self, source, message):
    with mock.patch.object(importlib.util, "find_spec", return_value=None):
      with self.assertRaisesRegex(ValueError, f"{source}'.*{message}"):
        packages.load(source, "")

  @parameterized.parameters(
      "def make():\n  pass",
      "class make:\n  pass",
      "import functools\nmake = functools.partial(dict, most=3)",
  )
  def test_processes_compare_file_of_environment(self, text):
    file = self.create_tempfile("own.py", content=text)
    task = task_table.make_task(
        {"name": "environment", "source": f"{file.full_path}:make"}
    )
    self.assertEqual(task.identity(), [text])

  def test_only_games_have_opponents(self):
    with self.assertRaisesRegex(ValueError, "opponent='a:b': must be ''"):
      packages.load("examples/guess.py:Guess", "a:b")
