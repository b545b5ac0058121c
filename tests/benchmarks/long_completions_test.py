# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The least figures of a train step on long completions, without a compiler."""

from absl.testing import parameterized

from benchmarks import long_completions
from tba_jax.config import settings
from tests.support import tiny_model


class IdealTest(parameterized.TestCase):

  @parameterized.parameters(("dots", 0), ("full", 1))
  def test_ideal_of_small_step(self, remat, is_full):
    config = settings.get_config()
    long_completions.set_row(config, 2048, remat, "fsdp=2,sequence=2")
    shape = tiny_model.make_model(
        num_layers=3, width=8, num_heads=4, num_kv_heads=2, head_dim=2,
        mlp_width=16, vocab_size=32,
    ).config  # fmt: skip
    result = long_completions.ideal(shape, config)
    # A prompt of 1,024 tokens with 8 completions of 2,048, on two devices.
    tokens, layer, head = 1024 + 8 * 2048, 24 * 8 + 3 * 8 * 16, 32 * 8
    layers, heads = 3 * layer * tokens, head * 8 * 2048
    pairs = 1024**2 // 2 + 8 * (1024 * 2048 + 2048**2 // 2)
    attention = 2 * 3 * 8 * pairs
    self.assertEqual(result.flops, 3 * (layers + heads + attention))
    again = layers - 3 * 8 * 16 * tokens + attention
    self.assertEqual(
        result.recomputed_flops,
        result.flops + heads + attention / 2 + is_full * again,
    )
    weights = 6 * 3 / 4 * (3 * layer + head)
    swapped = 3 * 3 * 2 * 24 * tokens / 2 / 2
    self.assertEqual(result.received_bytes, weights + swapped)
