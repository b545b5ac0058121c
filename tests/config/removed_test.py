# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings that are gone: what old configs and run directories get."""

import json
import pathlib
import re

from absl.testing import absltest
from absl.testing import parameterized
import ml_collections

from tba_jax.config import load
from tba_jax.config import reference
from tba_jax.config import removed
from tba_jax.config import settings
from tba_jax.config import validate
from tests.support import base_config

_FILE = """
from tba_jax.config import variants

def get_config():
  c = variants.import_config("configs/arithmetic.py").get_config("smoke")
  {line}
  return c
"""


class RemovedTest(parameterized.TestCase):

  def load(self, line, *overrides):
    path = self.create_tempfile("old.py", _FILE.format(line=line)).full_path
    config = load.load_config(path, overrides)
    validate.validate(config)
    return config

  def test_no_setting_is_both_there_and_gone(self):
    self.assertEmpty(removed.REMOVED.keys() & settings.SETTINGS.keys())
    for key in removed.REMOVED:
      section = key.partition(".")[0]
      self.assertNotIn(section, settings.SETTINGS)

  @parameterized.parameters(
      ("c.evaluate.resamples = 500", "evaluate.resamples = 500: .*1000"),
      ("c.log.update(num_samples=3)", "log.num_samples = 3: .*has 8 samples"),
      ("c.cores.trainer = '0'", "these settings are gone; .*taskset"),
      ("c.loss.name = 'copg'", "loss.name = 'copg': .*examples/copg.py"),
  )
  def test_a_config_file_is_told_what_to_write(self, line, message):
    with self.assertRaisesRegex(load.ConfigError, message) as caught:
      self.load(line)
    self.assertLen(str(caught.exception).splitlines(), 1)

  @parameterized.parameters(
      ("cores.trainer=0", "config.cores.trainer = '0': .*taskset"),
      ("guards.learning_rate_factor=0.1", "halves the learning rate"),
  )
  def test_a_command_line_is_told_what_to_write(self, override, message):
    with self.assertRaisesRegex(load.ConfigError, message):
      self.load("pass", override)
    with self.assertRaisesRegex(load.ConfigError, message.partition(": ")[2]):
      reference.help_on(override.partition("=")[0])

  def test_an_old_default_is_accepted(self):
    config = self.load(
        "c.evaluate.resamples = 1000", "cores.store=", "sft.b1=0.9"
    )
    self.assertNotIn("resamples", config.evaluate)
    self.assertNotIn("cores", config)


class ResumeTest(parameterized.TestCase):

  def saved(self, **changes):
    config = json.loads(json.dumps(base_config.make().to_dict()))
    for key, setting in removed.REMOVED.items():
      section, _, name = key.rpartition(".")
      value = changes.get(key.replace(".", "__"), setting.default)
      config.setdefault(section, {})[name] = value
    return config

  def test_a_run_with_old_defaults_goes_on(self):
    validate.check_resume(self.saved(), base_config.make())

  def test_what_a_run_does_not_compute_with_is_dropped(self):
    saved = self.saved(guards__learning_rate_factor=0.1, cores__trainer="0")
    validate.check_resume(saved, base_config.make())
    config = load.complete(ml_collections.ConfigDict(saved))
    validate.validate(config)
    self.assertNotIn("cores", config)

  def test_what_a_run_computes_with_is_told(self):
    wanted = (
        "config.sft.b1 = 0.8: the run was started with it, and this setting is"
        " gone; sft trains with AdamW at b1 = 0.9; give another --workdir"
    )
    with self.assertRaisesRegex(validate.ConfigError, re.escape(wanted)):
      validate.check_resume(self.saved(sft__b1=0.8), base_config.make())


class ChangelogTest(absltest.TestCase):

  def test_names_every_setting(self):
    root = pathlib.Path(__file__).parents[2]
    text = (root / "CHANGELOG.md").read_text("utf-8")
    for key in removed.REMOVED:
      self.assertIn(f"`{key}`", text)


if __name__ == "__main__":
  absltest.main()
