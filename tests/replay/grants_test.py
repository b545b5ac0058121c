# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of grants: blocks up to the admission, to who holds least."""

from absl.testing import absltest

from tba_jax.replay import prompt_order
from tba_jax.replay import scheduler


def _positions(blocks):
  return [[p for p, _, _ in prompts] for _, _, prompts in blocks]


class GrantsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.order = prompt_order.PromptOrder(100, seed=0)
    self.grants = scheduler.Grants(
        self.order, prompts_per_round=4, version_of=lambda p: p // 8
    )

  def test_nothing_before_it_is_admitted(self):
    self.assertEmpty(self.grants.assign(["a"]))

  def test_two_blocks_ahead_and_no_more(self):
    self.grants.admit(100)
    work = self.grants.assign(["a"])
    self.assertEqual(_positions(work["a"]), [[0, 1, 2, 3], [4, 5, 6, 7]])
    self.assertEmpty(self.grants.assign(["a"]))
    self.grants.deliver("a", [0, 1, 2, 3])
    work = self.grants.assign(["a"])
    self.assertEqual(_positions(work["a"]), [[4, 5, 6, 7], [8, 9, 10, 11]])
    versions = [version for _, version, _ in work["a"]]
    self.assertEqual(versions, [0, 1])

  def test_admission_bounds_what_is_out(self):
    self.grants.admit(8)
    work = self.grants.assign(["a", "b"])
    # One each: a step of two blocks is sampled by two searchers.
    self.assertEqual(_positions(work["a"]), [[0, 1, 2, 3]])
    self.assertEqual(_positions(work["b"]), [[4, 5, 6, 7]])
    self.grants.admit(4)  # It never shrinks.
    self.assertEmpty(self.grants.assign(["a", "b"]))
    self.assertEqual(self.order.cursor, 8)

  def test_who_holds_least_is_served_first(self):
    self.grants.admit(4)
    self.grants.assign(["a"])
    self.grants.admit(8)
    work = self.grants.assign(["a", "b"])
    self.assertEqual(_positions(work["b"]), [[4, 5, 6, 7]])

  def test_a_part_of_a_block_waits_while_others_are_under_way(self):
    self.grants.admit(6)
    work = self.grants.assign(["a"])
    self.assertEqual(_positions(work["a"]), [[0, 1, 2, 3]])
    self.grants.deliver("a", [0, 1, 2, 3])
    # Nobody holds anything now: without the rest the run would stand still.
    work = self.grants.assign(["a"])
    self.assertEqual(_positions(work["a"]), [[4, 5]])

  def test_what_a_dead_searcher_held_goes_to_another(self):
    self.grants.admit(4)
    self.grants.assign(["a"])
    self.grants.forget("a")
    work = self.grants.assign(["b"])
    self.assertEqual(_positions(work["b"]), [[0, 1, 2, 3]])

  def test_a_new_store_is_told_everything_again(self):
    self.grants.admit(4)
    before = self.grants.assign(["a"])
    self.assertEmpty(self.grants.assign(["a"]))
    self.grants.announce_again()
    # Who is not there is told when it is.
    self.assertEmpty(self.grants.assign(["b"]))
    self.assertEqual(self.grants.assign(["a"]), before)

  def test_who_asks_is_told_whatever_it_holds(self):
    self.grants.admit(4)
    held = self.grants.assign(["a"])
    self.assertEqual(self.grants.assign(["a"], ["a"]), held)
    self.assertEqual(self.grants.assign([], ["b"]), {"b": []})

  def test_of_thousands_each_is_granted_its_blocks(self):
    names = [f"s{i:04d}" for i in range(2000)]
    order = prompt_order.PromptOrder(100_000, seed=0)
    grants = scheduler.Grants(
        order, prompts_per_round=4, version_of=lambda p: -1
    )
    grants.admit(4 * 3000)
    work = grants.assign(names)
    # One each, and a second one in the order of their names.
    self.assertEqual(
        [len(work[name]) for name in names], [2] * 1000 + [1] * 1000
    )


if __name__ == "__main__":
  absltest.main()
