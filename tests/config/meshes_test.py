# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the sizes of meshes."""

from absl.testing import absltest
from absl.testing import parameterized

from tba_jax.config import meshes


class MeshesTest(parameterized.TestCase):

  @parameterized.parameters(
      # data, fsdp, sequence, tensor; devices; data, fsdp, tensor of them.
      ((8, 1, 1, 1), 4, (4, 1, 1)),
      ((1, 16, 1, 1), 4, (1, 4, 1)),
      ((1, 4, 1, 4), 4, (1, 1, 4)),
      ((2, 4, 1, 2), 4, (1, 2, 2)),
      # Axes that divide by six do not divide by four.
      ((1, 6, 1, 1), 4, (2, 2, 1)),
      ((1, 1, 4, 1), 2, (2, 1, 1)),
      ((1, 8, 1, 1), 1, (1, 1, 1)),
  )
  def test_cut_rows(self, sizes, num_devices, expected):
    axes = ("data", "fsdp", "sequence", "tensor")
    found = meshes.cut_rows(dict(zip(axes, sizes)), num_devices)
    self.assertEqual(tuple(found), axes)
    self.assertEqual(found.pop("sequence"), 1)
    self.assertEqual(tuple(found.values()), expected)


if __name__ == "__main__":
  absltest.main()
