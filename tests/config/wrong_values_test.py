# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Wrong values of every setting are refused with its key, without a device."""

from collections.abc import Iterator
import functools
import math
import pathlib
import re
import subprocess
import sys
from typing import Any

from absl.testing import absltest
import ml_collections

from tba_jax.config import settings
from tba_jax.config import validate
from tba_jax.system import rules
from tba_jax.tasks import task_table
from tests.support import base_config

_ROOT = pathlib.Path(__file__).parents[2]
_PROGRAMS = ("plan", "train", "sft", "reward_model", "searcher")
_OF_ANOTHER_TYPE = {
    bool: (1, "True", None),
    int: (1.5, True, "1", None),
    float: (True, "1.0", None),
    str: (1, True, None),
    type(None): (True, "1.0"),
}
_NOT_FINITE = (math.nan, math.inf, -math.inf, 1e39, 1e-50)
_NO_TEXT = ("a\0b", "\udcff")
# Values beyond a range, by its wording.
_BEYOND = (
    (r"(\d+) or more", lambda low: (int(low) - 1,)),
    (r"a number above 0", lambda: (0.0, -1.0)),
    (r"a number from 0 on", lambda: (-1e-6,)),
    (r"a number up to 0", lambda: (1e-6,)),
    (r"from 0 to 1", lambda: (-1e-6, 1.001)),
    (r"from 0 to below 1", lambda: (-1e-6, 1.0)),
    (r"above 0 and up to 1", lambda: (0.0, 1.001)),
    (r"above 0 and below 1", lambda: (0.0, 1.0)),
    (r"above 0, up to 10\*\*6 seconds", lambda: (0.0, 1e6 + 1)),
    (r"1 or more, up to 10\*\*6 seconds", lambda: (0.5, 1e6 + 1)),
    (r"from 0 to 2\*\*32 - 1", lambda: (-1, 2**32)),
    (r"0 to 65535", lambda: (-1, 2**16)),
    (r"0 or 1", lambda: (-1, 2)),
    (r"an even number from 2 on", lambda: (0, 3)),
    (r"a name", lambda: ("",)),
)
_WITHOUT_RANGE = (rules.NUMBER, rules.NUMBER_OR_NONE, rules.FLAG, rules.TEXT)


def _beyond(setting: rules.Setting) -> Iterator[Any]:
  """Yields values of the setting's type that its range leaves out."""
  text, kind = setting.allowed.text, type(setting.default)
  if setting.allowed.is_over_steps:
    yield from (
        "1:2",
        "1:2:0",
        "1:2:3:4",
        "1:2:x",
        "1:nan:3",
        "-1:1:3",
        "1:-1:3",
    )
    text = text.partition(", or START")[0]
  for pattern, values in _BEYOND:
    if match := re.fullmatch(pattern, text):
      yield from values(*match.groups())
  if setting.allowed not in (*_WITHOUT_RANGE, rules.NAME) and kind is str:
    yield "no such value"
    if setting.allowed.names and "" not in setting.allowed.names:
      yield ""
  if kind is int and text != "from 0 to 2**32 - 1":
    yield 2**31


def _wrong(default: Any) -> Iterator[Any]:
  """Yields values that no setting with this default can have."""
  yield from _OF_ANOTHER_TYPE[type(default)]
  if default is None or isinstance(default, float):
    yield from _NOT_FINITE
  if isinstance(default, str):
    yield from _NO_TEXT


def _wrong_values() -> dict[str, list[Any]]:
  """Returns wrong values by key."""
  return {
      key: [*_wrong(setting.default), *_beyond(setting)]
      for key, setting in settings.SETTINGS.items()
  }


def _refused(changes: dict[str, Any], program: str) -> set[str]:
  tree = base_config.make().to_dict()
  for key, value in changes.items():
    *sections, name = key.split(".")
    functools.reduce(dict.__getitem__, sections, tree)[name] = value
  config = ml_collections.ConfigDict(tree)
  try:
    validate.validate(config, program=program)
  except validate.ConfigError as error:
    return set(re.findall(r"^config\.([\w.]+) = ", str(error), re.M))
  return set()


def accepted(program: str) -> list[tuple[str, Any]]:
  """Returns the wrong values that `validate` accepts."""
  result, wrong = [], _wrong_values()
  # An error has a line for each key: one call takes a value of each.
  for i in range(max(map(len, wrong.values()))):
    changes = {k: values[i] for k, values in wrong.items() if i < len(values)}
    refused = _refused(changes, program)
    result += [item for item in changes.items() if item[0] not in refused]
  return result


class WrongValuesTest(absltest.TestCase):

  def test_wrong_values_are_refused_with_their_key(self):
    for program in _PROGRAMS:
      with self.subTest(program):
        self.assertEqual(accepted(program), [])

  def test_refuses_only_wrong_value(self):
    one_of_each = {k.partition(".")[0]: k for k in settings.SETTINGS}
    for key in one_of_each.values():
      self.assertIn(key, _refused({key: _wrong_values()[key][-1]}, "plan"))

  def test_every_range_excludes_some_value(self):
    for key, setting in settings.SETTINGS.items():
      has_range = setting.allowed not in _WITHOUT_RANGE
      self.assertEqual(
          any(v != 2**31 for v in _beyond(setting)), has_range, key
      )

  def test_wrong_fields_of_tasks_are_refused_with_their_key(self):
    for name in task_table.TASKS:
      fields = task_table.fields(name)
      for i in range(max(len([*_wrong(v)]) for v in fields.values())):
        changes = {
            f"task.{field}": [*_wrong(default)][i]
            for field, default in fields.items()
            if i < len([*_wrong(default)])
        }
        refused = _refused({"task.name": name, **changes}, "plan")
        self.assertContainsSubset(set(changes), refused)

  def test_no_device_is_touched(self):
    code = (
        "import sys\n"
        "from tests.config import wrong_values_test\n"
        "assert not wrong_values_test.accepted('plan')\n"
        "if 'jax' in sys.modules: sys.exit('jax is loaded')\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    self.assertEqual(process.returncode, 0, process.stderr)
