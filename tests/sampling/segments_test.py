# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Segments of the KV cache's columns."""

from absl.testing import parameterized

from tba_jax.sampling import slots as slots_lib


class SegmentsTest(parameterized.TestCase):

  @parameterized.parameters(
      (7, (7,)),
      (32, (32,)),
      (64, (32, 32)),
      (65, (17, 16, 32)),
      (1024, (256, 256, 512)),
      (4096, (1024, 1024, 2048)),
  )
  def test_completion_segments_double_and_sum_to_all(self, most, expected):
    prompt, *completion = slots_lib.segment_lengths(5, most)
    self.assertEqual(prompt, 5)
    self.assertEqual(tuple(completion), expected)
    self.assertEqual(sum(completion), most)

  @parameterized.parameters(
      # After one token, 16 steps write columns 0 to 15.
      (1, 16, (16, 2)),
      # Up to column 31, the last of the first segment, and one further.
      (17, 16, (16, 2)),
      (18, 16, (16, 3)),
      # The end of the cache bounds the columns read, not the steps requested.
      (60, 16, (16, 3)),
      # Without a number: to the end of the segments that the next step needs.
      (1, None, (32, 2)),
      (32, None, (1, 2)),
      (33, None, (32, 3)),
      (64, None, (1, 3)),
  )
  def test_chunk_reads_only_segments_it_fills(self, longest, steps, plan):
    lengths = slots_lib.segment_lengths(5, 64)
    found = slots_lib.plan_chunk(lengths, longest, chunk_steps=steps)
    self.assertEqual(found, plan)

  def test_staged_chunks_reach_the_last_token(self):
    lengths = slots_lib.segment_lengths(5, 1000)
    longest, chunks = 1, 0
    while longest < 1000:
      steps, num_segments = slots_lib.plan_chunk(
          lengths, longest, chunk_steps=None
      )
      longest += steps
      chunks += 1
      self.assertGreaterEqual(sum(lengths[1:num_segments]), longest - 1)
    self.assertEqual(chunks, len(lengths) - 1)
