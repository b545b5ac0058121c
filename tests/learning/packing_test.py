# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of distinct completions: what is in them, and how many sizes."""

from absl.testing import absltest
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
  return packing.pack(config, np.zeros((len(tokens), P)), tokens)


class PackTest(parameterized.TestCase):

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
        R, N, M = rows.indices.shape
        sizes.add((R, N, M))
        needed = len(np.unique(rows.slots)) * (P + T)
        shares.append(needed / (R * N * (P + M * T)))
      self.assertLessEqual(len(sizes), 6)
      self.assertGreater(np.mean(shares), 0.7)


if __name__ == "__main__":
  absltest.main()
