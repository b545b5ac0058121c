# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a mesh splits is told as the shardings have it."""

import math

from absl.testing import absltest
import jax

from tba_jax.config import settings
from tba_jax.training import shard_report
from tba_jax.training import sharding
from tests.support import tiny_model

_LEAVES = {
    "a": ((4, 6, 8), ("layers", "width", "mlp")),
    "b": ((8,), ("x",)),
    "c": ((3,), ("x",)),
}
_RULES = {"layers": "", "width": "fsdp", "mlp": "tensor,fsdp", "x": ""}
_MESH = {"data": 1, "fsdp": 2, "tensor": 4}


class ShardReportTest(absltest.TestCase):

  def test_a_leaf_is_shared_out_as_the_mesh_does(self):
    a, b, _ = shard_report.of_leaves(_LEAVES, _RULES, _MESH)
    # fsdp is taken by width, so that mlp is split by tensor alone.
    self.assertEqual(a.parts, (1, 2, 4))
    self.assertEqual(a.device_size, 4 * 3 * 2)
    spec = sharding._spec(_RULES, a.axes)
    self.assertEqual(tuple(spec), (None, "fsdp", "tensor"))
    self.assertTrue(b.is_whole)
    self.assertEqual(b.device_size, 8)

  def test_is_what_the_shardings_say(self):
    model = tiny_model.make_model()
    rules = settings.get_config().sharding
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    found = shard_report.of_leaves(
        shard_report.model_leaves(model.config), rules, mesh
    )
    is_axes = lambda node: isinstance(node, tuple)
    axes, _ = jax.tree_util.tree_flatten_with_path(
        model.logical_axes, is_leaf=is_axes
    )
    self.assertLen(found, len(axes))
    specs = {
        jax.tree_util.keystr(path, simple=True, separator="."): sharding._spec(
            rules, names
        )
        for path, names in axes
    }
    for leaf in found:
      sizes = [
          math.prod(mesh[a] for a in ([p] if isinstance(p, str) else p or ()))
          for p in specs[leaf.name]
      ]
      self.assertEqual(leaf.parts, tuple(sizes), leaf.name)

  def test_tells_the_rule_that_would_split_a_whole_leaf(self):
    _, b, c = shard_report.of_leaves(_LEAVES, _RULES, _MESH)
    self.assertEqual(b.could, "x=tensor")
    self.assertEqual(c.could, "")
    text = shard_report.text([b, c], 4)
    self.assertIn("2 of 2 leaves", text)
    self.assertIn("config.sharding.x=tensor would split it", text)
    self.assertIn("no axis of it divides by the mesh", text)
    self.assertNotIn("NO", text)

  def test_what_does_not_divide_is_told(self):
    leaves = {"a": ((4, 7, 8), _LEAVES["a"][1])}
    (a,) = shard_report.of_leaves(leaves, _RULES, _MESH)
    self.assertIn("NO: a: width of 7 does not divide by 2",
                  shard_report.text([a], 4))  # fmt: skip

  def test_small_leaves_are_counted_not_listed(self):
    leaves = {f"n{i:02d}": ((8,), ("x",)) for i in range(20)}
    found = shard_report.of_leaves(leaves, _RULES, _MESH)
    lines = shard_report.text(found, 4).splitlines()
    self.assertLen(lines, 15)
    self.assertIn("and 8 smaller ones", lines[-1])


if __name__ == "__main__":
  absltest.main()
