# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Segments of layers of several kinds, and their parts of the stacks."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from tba_jax.models.net import stacks
from tests.support import tiny_model


class StacksTest(parameterized.TestCase):

  @parameterized.parameters(
      ("aaaaaa", [(0, 1, 6)]),
      ("aaabaaabaaab", [(0, 4, 3)]),
      ("aaabaaabaa", [(0, 4, 2), (8, 1, 2)]),
      ("abbbbb", [(0, 1, 1), (1, 1, 5)]),
      ("aaabbbb", [(0, 1, 3), (3, 1, 4)]),
      ("aba", [(0, 1, 1), (1, 1, 1), (2, 1, 1)]),
      ("a", [(0, 1, 1)]),
  )
  def test_segments_cover_the_layers_with_their_repetitions(
      self, kinds, expected
  ):
    found = stacks.segments(kinds)
    self.assertEqual([(s.start, s.period, s.count) for s in found], expected)

  @parameterized.parameters("ddaddadd", "dada", "addd", "aaaa")
  def test_parts_of_a_period_are_those_of_layers(self, kinds):
    config = tiny_model.make_model(
        family="qwen3_5_text",
        num_layers=len(kinds),
        delta_layers=tuple(kind == "d" for kind in kinds),
        delta_key_heads=1,
        delta_value_heads=2,
        delta_key_dim=2,
        delta_value_dim=2,
    ).config
    of_module = lambda name: np.array(config.layers_with(name))
    blocks = {name: of_module(name) for name in ("mlp", "mlp_norm")}
    for name in {name for kind in config.kinds for name in kind}:
      blocks[name] = of_module(name)
    num_picked = 0
    for segment in stacks.segments(config.kinds):
      parts = stacks.cut(config, blocks, segment)
      for n in range(segment.count):
        period = jax.tree.map(lambda x, n=n: x[n], parts)
        for place in range(segment.period):
          layer = segment.start + n * segment.period + place
          mixer = "delta" if kinds[layer] == "d" else "attention"
          expected = dict.fromkeys((mixer, "mlp", "mlp_norm"), layer)
          self.assertEqual(
              stacks.pick(config, period, segment, place), expected
          )
          self.assertEqual(stacks.layer(config, blocks, layer), expected)
          num_picked += 1
    self.assertEqual(num_picked, len(kinds))


if __name__ == "__main__":
  absltest.main()
