# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Configs of the short runs that benchmarks measure."""

from absl.testing import parameterized

from benchmarks import peer_model
from benchmarks import throughput
from benchmarks import trial_run
from tba_jax.config import validate
from tba_jax.config import variants

countdown = variants.import_config("configs/countdown.py")


class TrialRunTest(parameterized.TestCase):

  @parameterized.product(arg=("", "smoke", "quick"), lockstep=(True, False))
  def test_makes_valid_variants(self, arg, lockstep):
    config = trial_run.make_variant(
        countdown.get_config(arg), 30, lockstep=lockstep
    )
    validate.validate(config)
    self.assertEqual(config.search.lockstep, lockstep)
    self.assertEqual(config.train.num_steps, 30)
    # Random params have equal rewards: skipped, they would leave nothing.
    self.assertFalse(config.replay.skip_equal_rewards)

  def test_samples_completions_of_one_length(self):
    config = throughput.make_config(countdown.get_config(), peer_model.SHAPE)
    validate.validate(trial_run.make_variant(config, 9, lockstep=False))
    self.assertEqual(
        config.explore.min_tokens + 1, config.sampling.max_completion_tokens
    )
