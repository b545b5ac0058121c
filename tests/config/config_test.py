# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of configs/: the argument parser, and that every config is right."""

import pathlib

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.config import load
from tba_jax.config import settings
from tba_jax.config import validate

_CONFIGS = sorted(
    path
    for path in (pathlib.Path(__file__).parents[2] / "configs").glob("*.py")
    if not path.stem.startswith(("__init__", "common"))
)


class ParseArgTest(parameterized.TestCase):

  def test_types_are_those_of_the_defaults(self):
    arg = settings.parse_arg(
        "quick,seed=3,beta=0.5,name=x=y",
        quick=False, smoke=True, seed=0, beta=1.0, name="", other=7,
    )  # fmt: skip
    self.assertEqual(
        arg.to_dict(),
        dict(quick=True, smoke=True, seed=3, beta=0.5, name="x=y", other=7),
    )

  @parameterized.parameters("", None, ",")
  def test_nothing_given(self, text):
    self.assertEqual(settings.parse_arg(text, seed=4).to_dict(), {"seed": 4})

  @parameterized.parameters(("quick=false", False), ("quick=TRUE", True))
  def test_bool_by_name(self, text, value):
    self.assertIs(settings.parse_arg(text, quick=not value).quick, value)

  @parameterized.parameters(
      ("quik", "'quik'.*\\['quick', 'seed'\\]"),
      ("quick=maybe", "quick='maybe'.*true, false"),
      ("seed=x", "seed='x'.*int"),
      ("seed", "'seed' needs a value"),
  )
  def test_wrong(self, text, message):
    with self.assertRaisesRegex(ValueError, message):
      settings.parse_arg(text, quick=False, seed=0)


_NEED_FILES = (
    "gsm8k",
    "math",
    "no_robots",
    "red_team",
    "tldr",
    "tldr_reward_model",
    "tldr_sft",
)


class ConfigsTest(absltest.TestCase):

  def test_every_config_is_right(self):
    for path in _CONFIGS:
      # These need files; tests of their own hold them right but for those.
      args = () if path.stem in _NEED_FILES else ("",)
      for arg in (*args, ":smoke", ":quick"):
        with self.subTest(f"{path.name}{arg}"):
          validate.validate(load.load_config(f"{path}{arg}"))


if __name__ == "__main__":
  absltest.main()
