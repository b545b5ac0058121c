# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings of losses that a pass may change, and those of a server."""

import pathlib

from absl.testing import absltest

from tba_jax.losses import objective_table
from tba_jax.serving import pass_settings
from tests.support import serving_case


def _loss_config(name, changes):
  """Returns the config of a pass with an objective of groups."""
  config = serving_case.make_config()
  return pass_settings.objective_config(config, name, changes)


class PassSettingsTest(absltest.TestCase):

  def test_serves_every_objective_without_loss_params(self):
    for name, row in objective_table.OBJECTIVES.items():
      if row.has_values or row.learns_log_z or row.has_teacher:
        with self.assertRaisesRegex(ValueError, f"loss_fn = '{name}': must be"):
          _loss_config(name, {})
        continue
      changes = {"beta": 0.1}
      if row.needs_ratio_clip:
        with self.assertRaisesRegex(ValueError, "needs ratio_clip above 0"):
          _loss_config(name, changes)
        changes["ratio_clip"] = 0.2
      if row.baseline == "file":
        with self.assertRaisesRegex(ValueError, "baseline 'file'"):
          _loss_config(name, changes)
      else:
        self.assertEqual(_loss_config(name, changes).loss.name, name)

  def test_refuses_fixed_loss_settings(self):
    module = pathlib.Path(self.create_tempdir().full_path) / "own.py"
    module.write_text("raise SystemExit('imported')\n")
    for changes, message in (
        (
            {"name": f"{module}:loss"},
            "loss_fn_config.name: must be one of scale, beta",
        ),
        (
            {"baseline_file": "x"},
            "loss_fn_config.baseline_file: must be one of",
        ),
        (
            {"reward_weight": 2.0},
            "loss_fn_config.reward_weight: must be one of",
        ),
        ({"correction": "cispo"}, "correction 'cispo': needs ratio_clip"),
        ({"ties": "first"}, "loss_fn='tb' does not read it"),
        ({"moment_cap": 1.0}, "correction 'none' does not read it"),
        ({"ema_decay": 0.5}, "nothing reads it; must come with anchor = ema"),
        (
            {"behavior_logprobs": "recomputed"},
            "behavior_logprobs: must be one of",
        ),
    ):
      with self.assertRaisesRegex(ValueError, message):
        _loss_config("tb", changes)

  def test_pass_has_no_settings_of_another_objective(self):
    config = serving_case.make_config()
    with config.unlocked():
      config.loss.baseline_shift = -0.1
    made = lambda name: pass_settings.objective_config(
        config, name, {"beta": 0.1}
    )
    self.assertEqual(made("tb").loss.baseline_shift, -0.1)
    self.assertEqual(made("gvpo").loss.baseline_shift, 0.0)

  def test_refuses_config_with_unsupported_settings(self):
    for section, key, value in (
        ("loss", "reward_weight", 2.0),
        ("loss", "missing_stop", "add"),
        ("loss", "behavior_logprobs", "recomputed"),
        ("sampling", "min_p", 0.1),
        ("sampling", "stop_strings", '["x"]'),
    ):
      config = serving_case.make_config()
      with config.unlocked():
        config[section][key] = value
      with self.assertRaisesRegex(ValueError, f"config.{section}.{key}"):
        pass_settings.check_config(config)
