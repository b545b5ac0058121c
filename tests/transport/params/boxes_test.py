# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Parts of arrays are cut, joined, and cover the whole."""

from absl.testing import parameterized
import numpy as np

from tba_jax.transport import wire
from tba_jax.transport.params import boxes

WHOLE = np.arange(24).reshape(4, 6)
# They cover it, in unequal parts.
PARTS = [[[0, 1], [0, 6]], [[1, 4], [0, 2]], [[1, 4], [2, 6]]]


class BoxTest(parameterized.TestCase):

  @parameterized.parameters(
      ((), (2, 3), [[0, 2], [0, 3]]),
      ((slice(1, None),), (2, 3), [[1, 2], [0, 3]]),
      ((slice(None), slice(0, 2)), (2, 3), [[0, 2], [0, 2]]),
      ((), (), []),
  )
  def test_cuts_box_of_index(self, index, shape, expected):
    self.assertEqual(boxes.box_of(index, shape), expected)

  @parameterized.parameters(
      ([[0, 4], [0, 6]],),
      ([[0, 1], [2, 3]],),
      ([[1, 3], [1, 5]],),
      ([[2, 4], [2, 6]],),
      ([[0, 0], [0, 6]],),
  )
  def test_box_is_cut_from_pieces(self, box):
    pieces = [(part, WHOLE[boxes.box_slices(part)]) for part in PARTS]
    result = boxes.cut_box(box, WHOLE.dtype, pieces)
    np.testing.assert_array_equal(result, WHOLE[boxes.box_slices(box)])

  def test_box_of_one_piece_is_view(self):
    pieces = [([[0, 4], [0, 6]], WHOLE)]
    result = boxes.cut_box([[1, 2], [0, 6]], WHOLE.dtype, pieces)
    self.assertTrue(np.shares_memory(result, WHOLE))
    scalar = np.asarray(2.0)
    result = boxes.cut_box([], scalar.dtype, [([], scalar)])
    self.assertIsInstance(result, np.ndarray)
    self.assertEqual(result.shape, ())

  @parameterized.parameters(
      ([[0, 2], [0, 3]], [[1, 3], [2, 4]], [[1, 2], [2, 3]]),
      ([[0, 2], [0, 3]], [[2, 3], [0, 3]], None),
      ([[0, 0], [0, 3]], [[0, 2], [0, 3]], None),
      ([], [], []),
  )
  def test_intersects_boxes(self, box, other, expected):
    self.assertEqual(boxes.intersection(box, other), expected)

  @parameterized.parameters(
      ((4, 6), PARTS[1:]), ((3, 6), PARTS), ((4, 6), [[[0, 4]]])
  )
  def test_shards_must_cover_leaf(self, shape, parts):
    boxes.check_cover("a", (4, 6), PARTS)
    boxes.check_cover("a", (), [[]])
    with self.assertRaises(wire.WireError):
      boxes.check_cover("a", shape, parts)
