# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of distinct completions: what is in them, and how many sizes."""

from absl.testing import parameterized
import numpy as np

from tba_jax.learning import packing
from tests.support import base_config

B, K, P, T = 12, 8, 9, 18


def make_tokens(num_different, seed=0, B=B):
  """Returns [B, K, T] tokens with that many completions to draw from."""
  rng = np.random.default_rng(seed)
  pool = rng.integers(1, 99, (B, num_different, T)).astype(np.int32)
  return np.stack([own[rng.integers(0, num_different, K)] for own in pool])


def make_config(**changes):
  return base_config.make(
      **dict(train__prompts_per_batch=B, train__micro_batch_prompts=B) | changes
  )


def pack(config, tokens):
  mask = np.ones(tokens.shape, np.float32)
  return packing.pack(config, np.zeros((len(tokens), P)), tokens, mask)


class PackTest(parameterized.TestCase):

  def test_completions_of_other_experts_are_no_copies(self):
    config = make_config()
    tokens = make_tokens(1)
    mask, prompts = np.ones(tokens.shape), np.zeros((B, P))
    experts = np.zeros((*tokens.shape, 2, 1), np.uint8)
    experts[:, -1, 0] = 1
    rows = packing.pack(config, prompts, tokens, mask, experts)
    found = experts.reshape(-1, T, 2, 1)[
        np.moveaxis(rows.indices, 1, 0).ravel()[rows.slots]
    ]
    np.testing.assert_array_equal(found.reshape(experts.shape), experts)

  @parameterized.named_parameters(
      ("whole", {}),
      ("micro_batches", dict(train__micro_batch_prompts=4)),
      ("shards", dict(mesh__data=8)),
      ("split_weights", dict(mesh__data=2, mesh__fsdp=4)),
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
  def test_each_completion_has_a_place_in_a_row_of_its_prompt(self, changes):
    config = make_config(**changes)
    for num_different in (1, 3, 30):
      tokens = make_tokens(num_different)
      rows = pack(config, tokens)
      if rows is None:  # A row is a prompt with its completions.
        self.assertGreater(num_different, 3)
        continue
      places = np.moveaxis(rows.indices, 1, 0).ravel()
      found = tokens.reshape(-1, T)[places[rows.slots]]
      np.testing.assert_array_equal(found, tokens)
      for b in range(B):
        self.assertEqual(set(places[rows.slots[b]] // K), {b})
      prompts = rows.indices // K
      self.assertTrue((prompts == prompts[..., :1]).all())
      shards = config.mesh.data * config.mesh.fsdp
      self.assertEqual(len(rows.indices) % shards, 0)
      # Nothing is computed twice.
      used = places[np.unique(rows.slots)]
      self.assertLen(np.unique(tokens.reshape(-1, T)[used], axis=0), len(used))

  def test_micro_batches_have_the_rows_of_their_prompts(self):
    config = make_config(train__micro_batch_prompts=4)
    rows = pack(config, make_tokens(3))
    for micro in range(3):
      of_micro = rows.indices[micro::3, 0]
      used = of_micro[of_micro.any(axis=1)]
      self.assertEqual(set((used // K % 3).ravel()), {micro})

  def test_a_part_has_the_size_of_the_config(self):
    rows = pack(
        make_config(
            train__micro_batch_completions=3, train__micro_batch_prompts=4
        ),
        make_tokens(30),
    )
    # 3 rows of each of 12 prompts, 4 at a time.
    self.assertEqual(rows.indices.shape, (4, 9, 3))

  def test_few_copies_change_no_program(self):
    tokens = make_tokens(30)
    tokens[0, 1] = tokens[0, 0]
    self.assertIsNone(pack(make_config(), tokens))
    self.assertIsNone(pack(make_config(train__micro_batch_prompts=4), tokens))

  def test_batches_have_few_sizes_and_little_padding(self):
    for changes in ({}, dict(train__micro_batch_completions=2)):
      config = make_config(
          train__prompts_per_batch=32, train__micro_batch_prompts=32, **changes
      )
      sizes, shares = set(), []
      for seed in range(200):
        tokens = make_tokens(1 + seed % 24, seed, B=32)
        rows = pack(config, tokens)
        if rows is None:
          continue
        R, N, M, C = packing.size_of(rows)
        sizes.add((R, N, M, C))
        needed = len(np.unique(rows.slots)) * (P + T)
        shares.append(needed / (R * N * (P + (C or M * T))))
      self.assertLessEqual(len(sizes), 6)
      self.assertGreater(np.mean(shares), 0.7)

  def test_whole_groups_without_padding_keep_the_counted_tokens(self):
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 99, (B, K, T)).astype(np.int32)
    tokens[:, 2] = tokens[:, 1]
    lengths = rng.integers(0, 3, (B, K))
    lengths[:, 2] = 4  # A copy of the second, of which more is counted.
    mask = (np.arange(T) < lengths[..., None]).astype(np.float32)
    mask[:, 1:3, 0] = 0  # An environment's token before a counted one.
    config = make_config(train__micro_batch_prompts=4)
    rows = packing.pack(config, np.zeros((B, P)), tokens, mask)
    self.assertEqual(packing.size_of(rows), (B, 1, K, 18))
    for row, kept in zip(rows.indices[:, 0], rows.tokens[:, 0]):
      kept = kept[kept < K * T]
      b, found = row[0] // K, np.zeros((K, T), bool)
      found[row[kept // T] % K, kept % T] = True
      expected = np.arange(T) < lengths[b][:, None]
      expected[1], expected[2] = expected[2], False
      np.testing.assert_array_equal(found, expected)
      self.assertLen(np.unique(kept), len(kept))

  def test_whole_groups_without_padding_have_few_sizes(self):
    config = make_config()
    # Two rows of the same width would be one size.
    numbers = [size[3] for size in packing.sizes(config, (B, 4, 64, 256))[1:]]
    self.assertEqual(
        [n for n in numbers if n], [682, 454, 302, 201, 134, 89, 59, 39, 26, 17]
    )
    # Those of short completions are a small part of any batch.
    sizes = packing.sizes(config, (2, K, P, T))
    self.assertFalse(any(size[3] for size in sizes if size))
    # Sequence parallelism needs whole completions.
    config = make_config(mesh__sequence=2)
    sizes = packing.sizes(config, (B, 4, 64, 256))
    self.assertFalse(any(size[3] for size in sizes if size))

  def test_groups_take_the_least_tokens_that_they_fit_in(self):
    rng = np.random.default_rng(0)
    for longest, expected in ((2, 18), (6, 40), (9, 96), (T + 1, None)):
      mask = np.arange(T) < rng.integers(0, longest, (B, K))[..., None]
      rows = packing.without_padding(mask, [96, 40, 18])
      if expected is None:
        self.assertIsNone(rows)
        continue
      kept = rows.tokens[:, 0]
      self.assertEqual(kept.shape, (B, expected))
      for own, mask_KxT in zip(kept, mask):
        np.testing.assert_array_equal(
            own[own < K * T], mask_KxT.ravel().nonzero()[0]
        )
