# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of validate.check_resume: what may change when a run goes on."""

import json
import re

from absl.testing import absltest

from tba_jax.config import load
from tba_jax.config import settings
from tba_jax.config import validate
from tba_jax.tasks import build
from tests.support import base_config


class ResumeTest(absltest.TestCase):

  def _saved(self, config):
    return json.loads(json.dumps(config.to_dict()))

  def test_same_config_resumes(self):
    config = base_config.make()
    validate.check_resume(self._saved(config), config)

  def test_how_a_run_is_watched_may_change(self):
    old = self._saved(base_config.make())
    new = base_config.make(
        log__every_steps=7,
        search__num_searchers=3,
        guards__action="off",
        mesh__fsdp=2,
        train__wall_clock_limit_s=9.0,
    )
    validate.check_resume(old, new)

  def test_what_a_run_computes_may_not(self):
    old = self._saved(base_config.make())
    new = base_config.make(loss__beta=0.1, replay__capacity=1000)
    with self.assertRaises(validate.ConfigError) as caught:
      validate.check_resume(old, new)
    lines = str(caught.exception).splitlines()
    self.assertLen(lines, 2)
    self.assertStartsWith(
        lines[0], "config.loss.beta = 0.1: the run was started with 0.05"
    )
    self.assertIn("another --workdir", lines[0])

  def test_key_of_another_version_stands_for_its_default(self):
    old = self._saved(base_config.make())
    del old["loss"]["ratio_clip"]
    validate.check_resume(old, base_config.make())
    with self.assertRaisesRegex(ValueError, re.escape("loss.ratio_clip")):
      validate.check_resume(old, base_config.make(loss__ratio_clip=0.2))

  def test_field_of_the_task_that_is_left_out_stands_for_its_default(self):
    old = self._saved(base_config.make())
    old["task"] = {"name": "gsm8k"}
    fields = {**build.fields("gsm8k"), "name": "gsm8k"}
    new = {**old, "task": fields}
    validate.check_resume(old, new)
    fields["train"] = "elsewhere"
    with self.assertRaisesRegex(ValueError, "task.train = 'elsewhere'"):
      validate.check_resume(old, new)

  def test_every_pattern_is_of_a_key(self):
    keys = list(load.flatten(settings.get_config()))
    for pattern in validate.RESUMABLE_KEYS:
      prefix = pattern.removesuffix("*")
      self.assertTrue(any(key.startswith(prefix) for key in keys), pattern)
    self.assertFalse(validate.is_resumable("loss.beta"))


if __name__ == "__main__":
  absltest.main()
