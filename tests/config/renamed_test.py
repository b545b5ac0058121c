# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""An old key, program or config is refused with its new name."""

import pathlib
from unittest import mock

from absl import flags
from absl.testing import absltest

from tba_jax import main
from tba_jax.config import load
from tba_jax.config import renamed
from tba_jax.config import settings
from tba_jax.config import validate
from tba_jax.system import processes
from tests.support import base_config


class RenamedTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    keys = {"old_section": "replay", "replay.size": "replay.capacity"}
    for table, names in (
        (renamed.KEYS, keys),
        (renamed.PROGRAMS, {"watch": "status"}),
    ):
      self.enter_context(mock.patch.dict(table, names, clear=True))

  def test_on_command_line(self):
    for old, new in (
        ("replay.size", "config.replay.capacity"),
        ("old_section.capacity", "config.replay.capacity"),
        ("old_section", "config.replay"),
    ):
      with self.assertRaisesRegex(load.ConfigError, f"is now {new}$"):
        load.apply_overrides(base_config.make(), [f"{old}=1"])

  def test_in_config_file(self):
    path = self.create_tempfile("mine.py").full_path
    for line, new in (
        ("config.replay.size = 3", "config.replay.capacity"),
        ("config.replay.update(size=3)", "config.replay.capacity"),
        ("config.old_section.capacity = 3", "config.replay"),
    ):
      with open(path, "w") as file:
        file.write(
            "from tba_jax.config import settings\n\n\ndef get_config():\n"
            f"  config = settings.get_config()\n  {line}\n  return config\n"
        )
      with self.assertRaisesRegex(load.ConfigError, rf"is now {new}\b"):
        validate.validate(load.load_config(path))

  def test_value(self):
    values = {("search.sampler", "native"): "jax"}
    with (
        mock.patch.dict(renamed.VALUES, values, clear=True),
        self.assertRaisesRegex(load.ConfigError, "'native' is now 'jax'$"),
    ):
      validate.validate(base_config.make(search__sampler="native"))
    self.assertEqual(
        renamed.explain_values("config.task.name='own': must be 'custom'"),
        "config.task.name='own': must be 'custom'; 'own' is now 'custom'",
    )

  def test_program(self):
    with (
        mock.patch.object(processes, "refuse", return_value=2) as refuse,
        self.assertRaises(SystemExit),
        mock.patch.object(flags, "FLAGS", _Refuses()),
    ):
      main.parse_flags(["main", "--program=watch"])
    (error,) = refuse.call_args.args
    self.assertEndsWith(str(error), "--program=watch is now --program=status")

  def test_config_file_is_refused_with_its_method(self):
    for old, new in (
        ("configs/gsm8k.py", "configs/gsm8k/tba.py"),
        ("configs/gsm8k.py:method=tba,quick", "configs/gsm8k/tba.py:quick"),
        (
            "configs/tldr.py:quick,method=ppo",
            "configs/tldr/async_rlhf.py:quick,method=ppo",
        ),
        (
            "/there/configs/tldr_sft.py:smoke",
            "/there/configs/tldr/sft.py:smoke",
        ),
    ):
      with self.assertRaises(load.ConfigError) as caught:
        load.load_config(old)
      self.assertEndsWith(str(caught.exception), f"is now --config={new}")


class _Refuses:
  """Flags that refuse a program, in the words of absl."""

  def __call__(self, argv):
    raise flags.IllegalFlagValueError(
        f"flag {argv[1]}: value should be one of <train|status>"
    )


class TablesTest(absltest.TestCase):

  def test_new_keys_exist_and_old_keys_do_not(self):
    config = settings.get_config()
    keys = set(load.flatten(config)) | set(config)
    for old, new in renamed.KEYS.items():
      if not new.startswith("task."):
        self.assertIn(new, keys)
        self.assertNotIn(old, keys)
    for old, new in renamed.PROGRAMS.items():
      self.assertIn(new, main.PROGRAMS)
      self.assertNotIn(old, main.PROGRAMS)
    root = pathlib.Path(__file__).parents[2]
    for old, files in renamed.CONFIGS.items():
      self.assertFalse((root / old).exists(), old)
      for new in files:
        self.assertTrue((root / new).exists(), new)
