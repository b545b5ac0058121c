# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The comparer of settings, and all who compare settings by it."""

import ast
import pathlib

from absl.testing import absltest

from tba_jax.config import differences
from tba_jax.config import settings

_PACKAGE = pathlib.Path(differences.__file__).parents[1]


class BetweenTest(absltest.TestCase):

  def test_yields_differences_among_several_configs(self):
    sides = ({"loss.beta": 0.1}, {"loss.beta": 0.2}, {"loss.beta": 0.1})
    self.assertEqual(
        list(differences.between(*sides)), [("loss.beta", [0.1, 0.2, 0.1])]
    )
    self.assertEqual(list(differences.between(*sides[::2])), [])

  def test_missing_key_has_default(self):
    default = settings.SETTINGS["loss.beta"].default
    self.assertEqual(list(differences.between({"loss.beta": default}, {})), [])
    self.assertEqual(
        list(differences.between({"loss.beta": 9.0}, {})),
        [("loss.beta", [9.0, default])],
    )

  def test_fields_match_each_side_s_task(self):
    sides = {"task.name": "gsm8k", "task.data": ""}, {"task.name": "gsm8k"}
    self.assertEqual(list(differences.between(*sides)), [])
    one, other = sides[0], {"task.name": "arithmetic"}
    self.assertEqual(
        dict(differences.between(one, other)),
        {
            "task.name": ["gsm8k", "arithmetic"],
            "task.data": ["", differences.MISSING],
        },
    )

  def test_strangers_task_is_not_imported(self):
    side = {"task.name": "no_such_module:Task", "task.x": 1}
    changed = dict(differences.between(side, {}, imports=False))
    self.assertEqual(changed["task.x"], [1, differences.MISSING])
    # A damaged file may have anything.
    list(differences.between({"task.name": ["x"]}, {}))

  def test_lines_name_key_and_both_values(self):
    self.assertEqual(
        differences.lines(
            differences.changed({"train.num_steps": 6}, {"train.num_steps": 7})
        ),
        ["config.train.num_steps = 7, was 6"],
    )

  def test_moved_files_do_not_differ(self):
    paths = [{"reward_model.train": f"/gone/{n}/pairs.jsonl"} for n in "ab"]
    self.assertEmpty(differences.changed(*paths))
    self.assertLen(list(differences.between(*paths)), 1)


class UsersTest(absltest.TestCase):

  def test_every_settings_comparison_uses_differences(self):
    users = {
        str(path.relative_to(_PACKAGE))
        for path in _PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "differences"
        and node.attr in ("between", "changed")
    }
    self.assertEqual(
        users,
        {
            "config/stages.py",
            "report/compare.py",
            "programs/roles.py",
            "tools/bisection.py",
            "tools/sweep.py",
        },
    )
