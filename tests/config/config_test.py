# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every config of `configs/` is right, and has what its paper's run has."""

import pathlib

from absl.testing import absltest

from tba_jax.config import load
from tba_jax.config import validate

_CONFIGS = sorted(
    path
    for path in (pathlib.Path(__file__).parents[2] / "configs").glob("*.py")
    if not path.stem.startswith(("__init__", "common"))
)


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
