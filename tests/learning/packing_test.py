# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Packed rows: what is in them, how full they are, and how many sizes."""

import dataclasses
import math

from absl.testing import parameterized
import numpy as np

from benchmarks import long_tail
from tba_jax.learning import packing
from tests.support import base_config

B, K, P, T = 12, 8, 90, 180


def make_batch(seed=0, longest=T):
  """Returns a prompt mask, tokens and a mask of random lengths."""
  rng = np.random.default_rng(seed)
  prompt_mask = np.arange(P) >= P - rng.integers(1, P + 1, (B, 1))
  tokens = rng.integers(1, 99, (B, K, T)).astype(np.int32)
  mask = np.arange(T) < rng.integers(0, longest + 1, (B, K, 1))
  return prompt_mask, tokens, mask


def make(**changes):
  config = base_config.make(
      **dict(
          train__prompts_per_batch=B,
          train__micro_batch_prompts=2,
          train__completions_per_prompt=K,
          sampling__max_prompt_tokens=P,
          sampling__max_completion_tokens=T,
      )
      | changes
  )
  return packing.make(config)


def sequences_of(rows, shape=(B, K, P, T)):
  """Yields (micro-batch, row, prompt, prompt's places, [(k, first place)])."""
  B, K, P, T = shape
  R, N, _ = rows.token_indices.shape
  for r, n in np.ndindex(R, N):
    tokens = rows.token_indices[r, n]
    for b in range(B):
      prompt = np.flatnonzero((tokens >= b * P) & (tokens < (b + 1) * P))
      first = B * P + b * K * T
      starts = first + T * np.arange(K)
      places = [np.flatnonzero(tokens == start) for start in starts]
      firsts = [
          (k, int(found[0])) for k, found in enumerate(places) if found.size
      ]
      if firsts:
        yield n, r, b, prompt, firsts


class PackTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("whole", {}),
      ("one_micro_batch", dict(train__micro_batch_prompts=B)),
      ("shards", dict(mesh__data=8)),
      ("split_weights", dict(mesh__data=2, mesh__fsdp=4)),
      ("split_rows", dict(mesh__sequence=4)),
      ("prompts_do_not_divide", dict(train__micro_batch_prompts=5)),
      ("cut", dict(train__micro_batch_completions=3)),
      (
          "cut_over_shards",
          dict(
              train__micro_batch_completions=2,
              train__micro_batch_prompts=1,
              mesh__data=4,
          ),
      ),
  )
  def test_each_counted_token_is_predicted_once_after_its_prompt(self, changes):
    shapes = make(**changes)
    for seed, longest in ((0, T), (1, 30), (2, 2)):
      prompt_mask, tokens, mask = make_batch(seed, longest)
      rows = packing.pack(shapes, prompt_mask, tokens, mask)
      self.assertIn(packing.size_of(rows), shapes.sizes())
      R, N, L = rows.token_indices.shape
      self.assertEqual((R % shapes.shards, L % shapes.sequence), (0, 0))
      flat = np.moveaxis(rows.token_indices, 1, 0).ravel()
      counted = np.arange(B * K * T).reshape(B, K, T)[mask]
      np.testing.assert_array_equal(
          flat[rows.place_indices[mask]], B * P + counted
      )
      self.assertTrue((rows.place_indices[~mask] == R * N * L).all())
      self.assertEqual((flat >= B * P).sum(), mask.sum())
      micro_batches_of = {}
      for n, r, b, prompt, firsts in sequences_of(rows):
        expected = np.flatnonzero(prompt_mask[b])[:-1] + b * P
        np.testing.assert_array_equal(
            rows.token_indices[r, n, prompt], expected
        )
        begin = min(start for _, start in firsts)
        np.testing.assert_array_equal(
            prompt, np.arange(begin - len(expected), begin)
        )
        micro_batches_of.setdefault(b, set()).add(n)
      most = max(map(len, micro_batches_of.values()))
      self.assertTrue(most == 1 or shapes.cuts_groups)

  def test_equal_completions_are_computed_once(self):
    prompt_mask, tokens, mask = make_batch()
    tokens[:, 1:] = tokens[:, :1]
    mask[:, 0, : T // 2] = True  # The longest of copies counts.
    rows = packing.pack(make(), prompt_mask, tokens, mask)
    longest = [T - mask[b].any(0)[::-1].argmax() for b in range(B)]
    self.assertEqual((rows.token_indices >= B * P).sum(), sum(longest))
    for b in range(B):
      n = longest[b]
      for k in range(K):
        np.testing.assert_array_equal(
            rows.place_indices[b, k, :n], rows.place_indices[b, 0, :n]
        )

  def test_completions_of_other_experts_are_no_copies(self):
    prompt_mask, tokens, mask = make_batch()
    tokens[:, 1:] = tokens[:, :1]
    mask[:] = True
    experts = np.zeros((*tokens.shape, 2, 1), np.uint8)
    experts[:, -1, 0] = 1
    rows = packing.pack(make(), prompt_mask, tokens, mask, experts)
    self.assertEqual((rows.token_indices >= B * P).sum(), B * 2 * T)

  def test_empty_batch_has_no_micro_batch(self):
    prompt_mask, tokens, mask = make_batch()
    rows = packing.pack(make(), prompt_mask, tokens, 0 * mask)
    self.assertTrue((rows.token_indices == -1).all())

  def test_batches_of_full_length_fit(self):
    for changes in ({}, dict(train__micro_batch_completions=3)):
      shapes = make(**changes)
      tokens = make_batch()[1]
      rows = packing.pack(
          shapes, np.ones((B, P)), tokens, np.ones((B, K, T), bool)
      )
      self.assertEqual((rows.token_indices >= B * P).sum(), B * K * T)

  @parameterized.parameters(*long_tail.LENGTHS)
  def test_long_tails_leave_little_empty(self, mean, longest):
    B, K, P = 32, 8, 512
    lengths = long_tail.lognormal_lengths(mean, longest, (B, K), 0)
    prompts = np.minimum(long_tail.lognormal_lengths(200, P, (B,), 1), P)
    prompt_mask = np.arange(P) >= P - prompts[:, None]
    mask = np.arange(longest) < lengths[..., None]
    tokens = np.broadcast_to(
        np.arange(B * K, dtype=np.int32).reshape(B, K, 1), mask.shape
    )
    for sequence in (1, 4):
      shapes = packing.Packing((B, K, P, longest), 4, 0, 1, sequence)
      rows = packing.pack(shapes, prompt_mask, tokens, mask)
      num_micro_batches = (rows.token_indices >= 0).any((0, 2)).sum()
      computed = num_micro_batches * rows.token_indices[:, 0].size
      needed = lengths.sum() + prompts.sum()
      self.assertLess(computed, 1.12 * needed)

  @parameterized.parameters(
      (8, 0, 1, 320), (3, 0, 1, 240), (8, 0, 8, 80), (8, 2, 1, 80)
  )
  def test_short_rows_have_room_for_several_groups(
      self, prompts, completions, shards, length
  ):
    shape = 32, 4, 9, 18  # A group of full length has 80 tokens.
    shapes = packing.Packing(shape, prompts, completions, shards)
    self.assertEqual(shapes.length, length)

  def test_few_sizes_share_the_first_one_s_capacity(self):
    for changes in ({}, dict(train__micro_batch_prompts=B), dict(mesh__data=4)):
      sizes = make(**changes).sizes()
      self.assertLessEqual(len(sizes), 4)
      self.assertEqual(sizes, sorted(sizes, key=lambda s: -s.rows))
      for size in sizes:
        self.assertGreaterEqual(
            math.prod(size),
            sizes[0].rows * sizes[0].micro_batches * size.length,
        )

  def test_is_a_function_of_the_batch(self):
    first, again = (packing.pack(make(), *make_batch(seed=3)) for _ in range(2))
    for a, b in zip(*map(dataclasses.astuple, (first, again))):
      np.testing.assert_array_equal(a, b)
