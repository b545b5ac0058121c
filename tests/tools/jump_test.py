# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Band of a metric, and search for the items behind a jump."""

import math

from absl.testing import parameterized

from tba_jax.tools import jump


class BandTest(parameterized.TestCase):

  def test_is_widened_range_of_last_finite_values(self):
    values = [90.0] + 19 * [4.0] + [math.nan, 6.0]
    self.assertEqual(jump.band(values), (2.0, 8.0))
    self.assertEqual(jump.band(9 * [-200.0]), (-202.0, -198.0))
    with self.assertRaisesRegex(ValueError, "5 or more recorded steps"):
      jump.band([1.0, 2.0, 3.0, 4.0, math.inf])

  def test_first_jump_needs_ten_varied_values(self):
    varied = dict(enumerate(10 * [1.0, 2.0, 3.0, 4.0, 5.0]))
    self.assertIsNone(jump.first(varied))
    self.assertEqual(jump.first(varied | {30: 9.1, 40: 99.0}), 30)
    self.assertEqual(jump.first(varied | {31: math.nan}), 31)
    self.assertEqual(jump.first(varied | {9: 99.0}), None)
    self.assertIsNone(jump.first(dict(enumerate(30 * [0.0] + [1.0]))))

  @parameterized.parameters(
      (6.9, 27.0, True),
      (8.0, 27.0, True),  # A twentieth of the distance from 7.
      (8.1, 27.0, False),
      (2.0, -17.0, True),
      (1.9, -17.0, False),
      (5.0, math.nan, True),
      (7.1, math.inf, False),
      (math.nan, 27.0, False),
  )
  def test_jump_is_gone_inside_or_close_to_band(self, value, before, expected):
    self.assertEqual(jump.is_gone(value, before, (3.0, 7.0)), expected)


class SmallestTest(parameterized.TestCase):

  def search(self, size, is_gone):
    tests = []

    def test(some):
      tests.append(some)
      return is_gone(set(some))

    return jump.smallest(range(size), test), len(tests)

  @parameterized.parameters(0, 37, 63)
  def test_finds_single_item_by_halving(self, item):
    found, count = self.search(64, lambda some: item in some)
    self.assertEqual(found, [item])
    self.assertLessEqual(count, 12)

  @parameterized.parameters(({3, 40},), ({3, 5, 62},), ({0, 1, 2, 3},))
  def test_finds_set_if_no_single_item_suffices(self, items):
    found, count = self.search(64, lambda some: items <= some)
    self.assertEqual(set(found), items)
    self.assertLessEqual(count, 60)

  def test_finds_nothing_after_three_tests_if_jump_stays(self):
    self.assertEqual(self.search(64, lambda some: False), ([], 3))

  def test_tests_only_item(self):
    self.assertEqual(self.search(1, lambda some: True), ([0], 1))
    self.assertEqual(self.search(1, lambda some: False), ([], 1))
    self.assertEqual(self.search(0, lambda some: True), ([], 0))
