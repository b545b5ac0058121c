# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The base model of a server: a directory is of one set of settings."""

import pathlib

from absl.testing import absltest

from tba_jax.serving import database
from tba_jax.serving import registry as registry_lib
from tba_jax.serving import served_base
from tests.support import serving_case


class SettingsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    path = pathlib.Path(self.create_tempdir().full_path) / "j.sqlite"
    self.registry = registry_lib.Registry(database.Database(path))

  def check(self, config):
    served_base.check_settings(config, "base", self.registry, "runs/x")

  def test_other_settings_are_refused(self):
    config = serving_case.make_config()
    self.check(config)
    self.check(config)
    config.seed = 3
    with self.assertRaisesRegex(ValueError, "config.seed was 0"):
      self.check(config)

  def test_setting_unknown_at_first_start_must_have_its_default(self):
    config = serving_case.make_config()
    beta = config.loss.beta
    with config.unlocked():
      del config.loss.beta
    self.check(config)
    with config.unlocked():
      config.loss.beta = beta
    self.check(config)
    config.loss.beta *= 2
    with self.assertRaisesRegex(ValueError, "config.loss.beta was"):
      self.check(config)
