# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the study of rounds."""

from absl.testing import absltest

from studies.rounds import rounds


class RoundsTest(absltest.TestCase):

  def test_settings_sample_as_many_completions(self):
    for name, setting in rounds.SETTINGS.items():
      with self.subTest(name):
        own = rounds.make_run_config(rounds.make_config(setting.size), setting)
        a_step = own.train.prompts_per_batch * own.train.completions_per_prompt
        sampled = a_step * own.train.num_steps // setting.passes
        self.assertEqual(sampled, 64 * 320)
        self.assertEqual((own.model.width, own.model.num_layers), setting.size)
        self.assertEqual(
            own.model.num_heads * own.model.head_dim, own.model.width
        )
        # Whole rounds, and evaluations at their ends.
        longest = max(rounds.MINI_BATCHES) * setting.passes
        self.assertEqual(own.train.num_steps % longest, 0)
