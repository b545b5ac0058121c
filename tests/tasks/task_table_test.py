# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of building a task from `config.task`."""

import subprocess
import sys
from unittest import mock

from absl.testing import absltest
import ml_collections

from tba_jax.tasks import arithmetic
from tba_jax.tasks import base
from tba_jax.tasks import task_table


class Mine(arithmetic.Arithmetic):
  """A task outside of the package."""

  FIELDS = {**arithmetic.Arithmetic.FIELDS, "max_number": 3}


class MakeTaskTest(absltest.TestCase):

  def test_makes_each_task_with_its_own_fields(self):
    # These tasks need files, and have tests of their own.
    with_files = {"chat", "environment", "gsm8k", "math", "custom", "tldr"}
    with_files |= {"ifbench", "reasoning_gym"}  # And packages.
    for name in set(task_table.TASKS) - with_files:
      task = task_table.make_task(ml_collections.ConfigDict({"name": name}))
      self.assertIsInstance(task, base.Task)
      self.assertEqual(task.name, name)
      for split in base.SPLITS:
        self.assertGreater(task.num_prompts(split), 0)

  def test_fields_reach_task(self):
    task = task_table.make_task(
        ml_collections.ConfigDict({"name": "arithmetic", "max_number": 3})
    )
    count = sum(task.num_prompts(split) for split in base.SPLITS)
    self.assertEqual(count, 16 + 10 + 16)

  def test_group_is_judged_one_by_one_unless_task_can_do_more(self):
    task = Mine(**Mine.FIELDS)
    failure = base.RewardError("error", "broken")
    with mock.patch.object(task, "judge", side_effect=[1, failure, 3]) as judge:
      judged = task.judge_group("train", 5, ["a", "b", "c"])
    self.assertEqual(judged, [1, failure, 3])
    judge.assert_called_with("train", 5, "c")

  def test_refuses_unknown_name(self):
    for fields in ({"name": "chess"}, {}):
      with self.assertRaisesRegex(
          ValueError, r"config\.task\.name=.*arithmetic.*countdown"
      ):
        task_table.make_task(ml_collections.ConfigDict(fields))

  def test_makes_class_from_outside(self):
    self.enter_context(mock.patch.dict(sys.modules, mine=sys.modules[__name__]))
    task = task_table.make_task(
        ml_collections.ConfigDict({"name": "mine:Mine"})
    )
    self.assertIsInstance(task, Mine)
    self.assertEqual(task_table.fields("mine:Mine")["max_number"], 3)
    self.assertIsNone(task_table.fields("mine:Yours"))

  def test_gives_reason_class_from_outside_is_none(self):
    folder = self.create_tempdir()
    folder.create_file("broken_task.py", "1 / 0")
    self.enter_context(mock.patch.object(sys, "path", [folder.full_path]))
    for name, why in (
        ("no_such_module:Mine", "ModuleNotFoundError: No module named"),
        ("broken_task:Mine", "ZeroDivisionError: division by zero"),
        (f"{base.__name__}:Yours", "AttributeError: .*Yours"),
        (f"{base.__name__}:check_split", "must be a subclass of"),
        (":Mine", "ValueError: Empty module name"),
    ):
      with self.assertRaisesRegex(ValueError, f"task.name='{name}': .*{why}"):
        task_table.find(name)

  def test_refuses_field_of_another_task(self):
    config = ml_collections.ConfigDict({"name": "arithmetic", "numbers": 4})
    with self.assertRaisesRegex(ValueError, r"config\.task\.numbers=4"):
      task_table.make_task(config)

  def test_seed_is_integer_from_0(self):
    for name, seed in (("arithmetic", -1), ("math", 1.5), ("countdown", True)):
      config = ml_collections.ConfigDict({"name": name, "split_seed": seed})
      with self.assertRaisesRegex(ValueError, r"config\.task\.split_seed="):
        task_table.make_task(config)

  def test_tasks_do_not_import_jax(self):
    # Every role builds the task, and some must start before jax is imported.
    code = (
        "import sys; from tba_jax.tasks import task_table;"
        "sys.exit('jax' in sys.modules)"
    )
    self.assertEqual(subprocess.run([sys.executable, "-c", code]).returncode, 0)
