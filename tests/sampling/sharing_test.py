# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of how many rows share a prompt."""

from absl.testing import parameterized

from tba_jax.sampling import sharing


class SharingTest(parameterized.TestCase):

  @parameterized.parameters(
      (64, 8, 8, 8),
      (72, 3, 24, 24),
      (64, 4, 12, 4),
      (63, 8, 8, 1),  # One completion would wait.
  )
  def test_most_rows_follows_the_samples(
      self, num_rows, num_prompts, samples, expected
  ):
    found = sharing.most_rows(num_rows, num_prompts, samples)
    self.assertEqual(found, expected)

  @parameterized.parameters(
      (512, 512, 8), (512, 53, 8), (512, 513, 1), (128, 1024, 1)
  )
  def test_rows_of_a_stream_share_long_prompts_alone(
      self, prompt_tokens, completion_tokens, expected
  ):
    found = sharing.most_rows_of_stream(64, 8, prompt_tokens, completion_tokens)
    self.assertEqual(found, expected)

  @parameterized.parameters(("tpu", 32, 8), ("gpu", 12, 4), ("cpu", 32, 1))
  def test_rows_per_prompt_follows_the_platform(
      self, platform, device_rows, expected
  ):
    found = sharing.rows_per_prompt(8, device_rows, platform)
    self.assertEqual(found, expected)
