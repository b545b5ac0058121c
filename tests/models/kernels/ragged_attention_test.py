# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Kernels of decode steps over rows of mixed lengths, interpreted."""

import types
from unittest import mock

from absl import logging
from absl.testing import parameterized
import jax
import numpy as np
import pytest

from tba_jax.models.kernels import ragged_attention
from tba_jax.models.net import cache
from tba_jax.models.net import sequence
from tests.support import tiny_model

_R, _G, _M, _DH = 5, 2, 3, 16


def _case(num_parts, lengths, window=0):
  """Returns a layer, updates, inputs, spans and which rows are not idle.

  A prompt and a completion of one token, and rows full to the last column.
  """
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  width = _G // num_parts * _DH
  layer = [
      {name: normal(_R, num_parts, C, width) for name in "kv"} for C in lengths
  ]
  P, T = lengths
  own = np.array([1, T, T // 2 + 1, 5, 64])
  start = np.array([3, 0, P - 1, 7, P - 1])
  is_live = np.array([True, True, True, False, True])
  first = P + own - window if window else np.zeros(_R, int)
  spans = [
      (np.clip(first, start, P), np.full(_R, P)),
      (np.maximum(0, first - P), own),
  ]
  spans = [(a, np.where(is_live, b, a)) for a, b in spans]
  columns = np.full(_R, P), own - 1
  updates = [
      cache.BlockUpdate(
          column, (a[:, None] <= np.arange(C)) & (np.arange(C) < b[:, None])
      )
      for column, (a, b), C in zip(columns, spans, lengths)
  ]
  inputs = normal(_R, _G, _M, _DH), normal(_R, _G, _DH), normal(_R, _G, _DH)
  return layer, updates, inputs, spans, is_live


class RaggedTest(parameterized.TestCase):

  @parameterized.parameters(
      # The kernel, parts of the heads, columns of both blocks, the window, and
      # whether heads have sinks. Blocks that pages do not divide end in a part
      # of one.
      ("pages", 1, (40, 150), 0, True),
      ("pages", 2, (40, 150), 100, False),
      ("splits", 2, (48, 160), 0, True),
  )
  @pytest.mark.slow
  def test_equals_plain(self, kernel, num_parts, lengths, window, has_sinks):
    layer, updates, inputs, _, is_live = _case(num_parts, lengths, window)
    if has_sinks:
      sinks = np.random.default_rng(1).standard_normal((_G, _M))
      inputs = (*inputs, 2 * sinks.astype(np.float32))
    # Columns that no row sees may hold anything.
    unseen = [~update.seen[:, None, :, None] for update in updates]
    dirty = [
        {name: np.where(none, 1e4, x) for name, x in block.items()}
        for block, none in zip(layer, unseen)
    ]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("tensor",))
    fn = sequence.split_tokens(
        lambda layer, *args: ragged_attention.attend(
            kernel, layer, updates, *args
        ),
        *(mesh, (), (), ("tensor",)),
    )

    @jax.jit
    def both(layer, dirty, inputs):
      plain, left = cache.attend(layer, updates, *inputs)
      plain, (written,) = cache.write_columns(plain, [left], [updates])
      return (plain, written), fn(dirty, *inputs)

    (plain, written), (found, own) = both(layer, dirty, inputs)
    np.testing.assert_allclose(
        found[is_live], plain[is_live], rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(found[~is_live], 0.0)
    for one, other in zip(written[1].values(), own[1].values(), strict=True):
      seen = np.broadcast_to(~unseen[1], one.shape)
      np.testing.assert_array_equal(one[seen], other[seen])

  def test_counted_pages_equal_listed_pages(self):
    lengths = 512, 2048
    rng = np.random.default_rng(0)
    spans = [
        (start, start + rng.integers(0, C - start + 1))
        for C in lengths
        for start in [rng.integers(0, C, 20)]
    ]
    sizes = [ragged_attention.page_size(C, 1024) for C in lengths]
    self.assertEqual(sizes, [64, 128])
    counts = [C // size for C, size in zip(lengths, sizes)]
    segments, places, total = jax.tree.map(
        np.asarray,
        jax.jit(lambda s: ragged_attention.list_pages(s, sizes, counts))(spans),
    )
    listed = {(s, places[s % 2][i]) for i, s in enumerate(segments[:total])}
    self.assertLen(listed, total)
    read = sum(sizes[s % 2] for s in segments[:total])
    self.assertEqual(
        read, ragged_attention.num_read("pages", lengths, spans, 1024)
    )
    for s, place in listed:
      row, b = divmod(s, 2)
      page = place - row * counts[b]
      start, end = (edge[row] for edge in spans[b])
      self.assertLess(page * sizes[b], end)
      self.assertGreater((page + 1) * sizes[b], start)

  def test_a_page_fits_in_fast_memory(self):
    self.assertEqual(ragged_attention.page_size(100000, 2048), 256)
    self.assertEqual(ragged_attention.page_size(100000, 2**20), 16)
    self.assertEqual(ragged_attention.page_size(40, 2048), 40)
    self.assertEqual(ragged_attention.split_size(48), 16)

  def _choose(self, platform, lengths=(64, 128), num_rows=8, **changes):
    fields = {"head_dim": 64, "compute_dtype": "bfloat16"} | changes
    capability = fields.pop("capability", "9.0")
    kind = fields.pop("device_kind", "T4")
    device = types.SimpleNamespace(
        platform=platform, device_kind=kind, compute_capability=capability
    )
    config = tiny_model.make_model(**fields).config
    return ragged_attention.choose(config, device, lengths, num_rows, 1)

  def test_only_auto_on_an_accelerator_has_a_kernel(self):
    self.assertEqual(self._choose("tpu"), "pages")
    self.assertEqual(self._choose("gpu"), "splits")
    self.assertEqual(self._choose("cpu"), "plain")
    for attention, platform in (("plain", "gpu"), ("splash", "tpu")):
      self.assertEqual(self._choose(platform, attention=attention), "plain")

  @parameterized.parameters(
      ("gpu", "'splits' needs model.compute_dtype='bfloat16', it is 'float32'",
       dict(compute_dtype="float32")),
      ("gpu", "needs compute capability 8.0, T4 has 7.5",
       dict(capability="7.5")),
      ("gpu", "needs an NVIDIA GPU", dict(capability="gfx90a")),
      ("gpu", "needs a head_dim that is a power of 2 from 16, it is 96",
       dict(head_dim=96)),
      ("gpu", "that divide by 16, they are 64 and 100",
       dict(lengths=(64, 100))),
      ("tpu", "'pages' needs fewer rows: of sampling.num_slots, a device has"
       " 1024, each of 33280 tokens, and may have",
       dict(num_rows=1024, lengths=(512, 32768))),
      ("tpu", "needs a TPU v4 or later, this one is a TPU v3",
       dict(device_kind="TPU v3")),
      ("tpu", "needs keys and values, the cache has latents",
       dict(tiny_model.LATENTS, head_dim=10)),
  )  # fmt: skip
  def test_says_once_why_it_is_plain(self, platform, words, changes):
    ragged_attention.tell_choice.cache_clear()
    with mock.patch.object(logging, "warning") as warn:
      for _ in range(2):
        self.assertEqual(self._choose(platform, **changes), "plain")
    ((message,), _), *others = warn.call_args_list
    self.assertIn(words, message)
    self.assertEmpty(others)
