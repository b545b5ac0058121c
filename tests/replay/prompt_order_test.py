# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the prompt order: a position is granted until it is received."""

import copy
import random

from absl.testing import absltest
import numpy as np

from tba_jax.replay import prompt_order


def _drawn(order, count):
  return [order.prompt(p) for p in range(count)]


class PromptOrderTest(absltest.TestCase):

  def test_an_epoch_is_a_permutation_and_visits_count(self):
    order = prompt_order.PromptOrder(7, seed=3)
    first, second = _drawn(order, 14)[:7], _drawn(order, 14)[7:]
    self.assertCountEqual([p for p, _ in first], range(7))
    self.assertCountEqual([p for p, _ in second], range(7))
    self.assertEqual({v for _, v in first}, {0})
    self.assertEqual({v for _, v in second}, {1})
    self.assertNotEqual([p for p, _ in first], [p for p, _ in second])

  def test_the_order_depends_on_the_seed_alone(self):
    one, same = (prompt_order.PromptOrder(50, seed=1) for _ in range(2))
    other = prompt_order.PromptOrder(50, seed=2)
    self.assertEqual(_drawn(one, 120), _drawn(same, 120))
    self.assertNotEqual(_drawn(one, 50), _drawn(other, 50))
    # A position far ahead or behind is the same whenever it is asked for.
    far = one.prompt(1000)
    one.prompt(0)
    self.assertEqual(one.prompt(1000), far)

  def test_grants_stay_below_the_limit_and_never_overlap(self):
    order = prompt_order.PromptOrder(10, seed=0)
    first = order.grant(4, limit=6)
    second = order.grant(4, limit=6)
    self.assertEqual(first, [0, 1, 2, 3])
    self.assertEqual(second, [4, 5])
    self.assertEqual(order.grant(4, limit=6), [])
    self.assertEqual(order.available(6), 0)
    self.assertEqual(order.available(9), 3)

  def test_a_position_counts_once(self):
    order = prompt_order.PromptOrder(10, seed=0)
    order.grant(3, limit=10)
    self.assertTrue(order.receive(1))
    self.assertFalse(order.receive(1))
    self.assertTrue(order.receive(0))
    self.assertFalse(order.receive(0))
    self.assertEqual(order.num_received, 2)

  def test_released_positions_are_granted_first(self):
    order = prompt_order.PromptOrder(10, seed=0)
    order.grant(4, limit=10)
    order.receive(2)
    order.release([0, 1, 3])
    self.assertEqual(order.grant(5, limit=10), [0, 1, 3, 4, 5])

  def test_a_delivered_position_is_not_granted_again(self):
    order = prompt_order.PromptOrder(10, seed=0)
    order.grant(4, limit=10)
    order.deliver([1, 2])
    order.release([0, 1, 2, 3])
    self.assertEqual(order.num_taken(), 2)
    self.assertEqual(order.available(4), 2)
    self.assertEqual(order.grant(9, limit=4), [0, 3])

  def test_a_position_granted_before_a_crash_is_skipped(self):
    order = prompt_order.PromptOrder(10, seed=0)
    order.deliver([1])
    order.receive(2)
    self.assertEqual(order.available(4), 2)
    self.assertEqual(order.num_taken(2), 1)
    self.assertEqual(order.grant(9, limit=4), [0, 3])

  def test_available_counts_what_can_be_granted(self):
    rng = random.Random(0)
    order, held = prompt_order.PromptOrder(7, seed=0), []
    for _ in range(300):
      limit = order.cursor + rng.randrange(-3, 9)
      copy_of = copy.deepcopy(order)
      granted = copy_of.grant(1000, limit)
      self.assertEqual(order.available(limit), len(granted))
      held += order.grant(rng.randrange(4), limit)
      if rng.random() < 0.2:
        order.release(held)
        held = []
      # Some were granted after the checkpoint, before a crash.
      for _ in range(rng.randrange(4)):
        position = max(0, order.cursor + rng.randrange(-9, 4))
        if rng.random() < 0.5:
          order.deliver({position})
        else:
          order.receive(position)

  def test_nothing_is_available_if_all_came_before_a_crash(self):
    order = prompt_order.PromptOrder(10, seed=0)
    order.deliver(range(4))
    for position in range(4):
      self.assertTrue(order.receive(position))
    self.assertEqual(order.available(4), 0)
    self.assertEqual(order.available(6), 2)
    self.assertEqual(order.grant(9, limit=6), [4, 5])

  def test_outstanding_positions_are_granted_again_after_a_restart(self):
    order = prompt_order.PromptOrder(10, seed=0)
    order.grant(6, limit=10)
    order.receive(0)
    order.receive(4)
    again = prompt_order.PromptOrder(10, seed=0)
    again.set_state(order.get_state())
    self.assertEqual(again.num_received, 2)
    self.assertEqual(again.grant(9, limit=8), [1, 2, 3, 5, 6, 7])

  def test_another_split_is_refused(self):
    order = prompt_order.PromptOrder(10, seed=0)
    with self.assertRaisesRegex(ValueError, "10 prompts"):
      prompt_order.PromptOrder(11, seed=0).set_state(order.get_state())

  def test_random_operations_lose_and_repeat_nothing(self):
    rng = np.random.default_rng(0)
    order = prompt_order.PromptOrder(13, seed=0)
    held: dict[str, list[int]] = {}
    received = set()
    for _ in range(2000):
      limit = len(received) + 20
      match rng.integers(4):
        case 0:
          sid = f"s{rng.integers(3)}"
          got = order.grant(int(rng.integers(1, 6)), limit)
          self.assertTrue(all(p < limit for p in got))
          self.assertEmpty(set(got) & received)
          for others in held.values():
            self.assertEmpty(set(got) & set(others))
          held.setdefault(sid, []).extend(got)
        case 1:
          sid = f"s{rng.integers(3)}"
          order.release(held.pop(sid, []))
        case _:
          sid = f"s{rng.integers(3)}"
          if held.get(sid):
            position = held[sid].pop(int(rng.integers(len(held[sid]))))
            order.deliver([position])
            self.assertTrue(order.receive(position))
            received.add(position)
    # In the end all below the highest limit were granted.
    limit = len(received) + 20
    for positions in held.values():
      order.release(positions)
    rest = order.grant(10**6, limit)
    self.assertEqual(
        sorted(received | set(rest)), sorted(set(range(limit)) | received)
    )


if __name__ == "__main__":
  absltest.main()
