# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Names of other libraries are answered with ours."""

from unittest import mock

from absl import flags
from absl.testing import parameterized

from tba_jax import main
from tba_jax.config import load
from tba_jax.config import other_names
from tba_jax.config import settings
from tba_jax.config import validate
from tba_jax.system import processes
from tba_jax.tasks import task_table
from tests.support import base_config


class OtherNamesTest(parameterized.TestCase):

  def test_every_alias_maps_to_setting_and_is_no_setting(self):
    config = load.flatten(settings.get_config())
    tasks = {f"task.{name}" for name in task_table.fields("custom")}
    for theirs, (ours, _) in other_names.NAMES.items():
      self.assertIn(ours, {*config, *tasks})
      self.assertNotIn(theirs, config)

  @parameterized.parameters(
      ("num_generations", "search.samples_per_prompt"),
      ("train.num_generations", "search.samples_per_prompt"),
      ("actor_rollout_ref.rollout.n", "search.samples_per_prompt"),
      ("loss.kl_coef", "loss.beta"),
      ("data.train_batch_size", "search.prompts_per_step"),
      ("trainer.optim.lr", "optimizer.learning_rate"),
      ("per_device_train_batch_size", "train.micro_batch_prompts"),
  )
  def test_override_is_answered(self, theirs, ours):
    message = f"there is no such key; it is config.{ours} here"
    with self.assertRaisesRegex(load.ConfigError, message):
      load.apply_overrides(base_config.make(), [f"{theirs}=1"])

  def test_key_of_config_file_is_answered(self):
    config = base_config.make()
    config.train.num_generations = 4
    with self.assertRaisesRegex(
        load.ConfigError, "it is config.search.samples_per_prompt here"
    ):
      validate.validate(config)

  def test_other_keys_are_answered_as_before(self):
    for key in ("num_generation", "rollout", "n", "loss.betta"):
      self.assertEqual(other_names.answer(key), "")

  def test_flag_is_answered(self):
    values = flags.FlagValues()
    with (
        mock.patch.object(processes, "refuse", return_value=2) as refuse,
        mock.patch.object(flags, "FLAGS", values),
        self.assertRaises(SystemExit),
    ):
      main.parse_flags(["main", "--num_generations=4"])
    (error,) = refuse.call_args.args
    self.assertRegex(str(error), "it is config.search.samples_per_prompt here")
