# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of boxes.py: parts of arrays, cut out of other parts."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from tba_jax.transport import carrier_orbax

WHOLE = np.arange(24).reshape(4, 6)
# Together they are all of it, in unequal parts.
PARTS = [[[0, 1], [0, 6]], [[1, 4], [0, 2]], [[1, 4], [2, 6]]]


class BoxesTest(parameterized.TestCase):

  @parameterized.parameters(
      ((), (2, 3), [[0, 2], [0, 3]]),
      ((slice(1, None),), (2, 3), [[1, 2], [0, 3]]),
      ((slice(None), slice(0, 2)), (2, 3), [[0, 2], [0, 2]]),
      ((), (), []),
  )
  def test_of_an_index(self, index, shape, wanted):
    self.assertEqual(carrier_orbax.box_of(index, shape), wanted)

  @parameterized.parameters(
      ([[0, 4], [0, 6]],),
      ([[0, 1], [2, 3]],),
      ([[1, 3], [1, 5]],),
      ([[2, 4], [2, 6]],),
      ([[0, 0], [0, 6]],),
  )
  def test_any_part_is_cut_from_others(self, box):
    pieces = [(part, WHOLE[carrier_orbax.box_slices(part)]) for part in PARTS]
    found = carrier_orbax.cut_box(box, WHOLE.dtype, pieces)
    np.testing.assert_array_equal(found, WHOLE[carrier_orbax.box_slices(box)])

  def test_of_one_piece_it_is_a_view(self):
    found = carrier_orbax.cut_box(
        [[1, 2], [0, 6]], WHOLE.dtype, [([[0, 4], [0, 6]], WHOLE)]
    )
    self.assertTrue(np.shares_memory(found, WHOLE))

  def test_an_array_without_axes_stays_one(self):
    found = carrier_orbax.cut_box(
        [], np.dtype(np.float32), [([], np.asarray(2.0))]
    )
    self.assertIsInstance(found, np.ndarray)
    self.assertEqual(found.shape, ())

  @parameterized.parameters(
      ([[0, 2], [0, 3]], [[1, 3], [2, 4]], True),
      ([[0, 2], [0, 3]], [[2, 3], [0, 3]], False),
      ([[0, 0], [0, 3]], [[0, 2], [0, 3]], False),
      ([], [], True),
  )
  def test_meet(self, box, other, wanted):
    self.assertEqual(carrier_orbax.intersect(box, other), wanted)

  def test_filled(self):
    self.assertEqual(carrier_orbax.filled_from((4, 6), PARTS), 24)
    self.assertEqual(carrier_orbax.filled_from((4, 6), PARTS[1:]), 18)
    self.assertEqual(carrier_orbax.filled_from((3, 6), PARTS), -1)
    self.assertEqual(carrier_orbax.filled_from((4, 6), [[[0, 4]]]), -1)
    self.assertEqual(carrier_orbax.filled_from((), [[]]), 1)


if __name__ == "__main__":
  absltest.main()
