# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the prompt order: a position is granted until it is journaled."""

from concurrent import futures
import copy
import random

from absl.testing import absltest
import numpy as np

from tba_jax.replay import prompt_order


def _drawn(order, count):
  return [order.prompt(p) for p in range(count)]


class PromptOrderTest(absltest.TestCase):

  def test_epoch_is_permutation_and_visits_count(self):
    order = prompt_order.PromptOrder(7, seed=3)
    first, second = _drawn(order, 14)[:7], _drawn(order, 14)[7:]
    self.assertCountEqual([p for p, _ in first], range(7))
    self.assertCountEqual([p for p, _ in second], range(7))
    self.assertEqual({v for _, v in first}, {0})
    self.assertEqual({v for _, v in second}, {1})
    self.assertNotEqual([p for p, _ in first], [p for p, _ in second])

  def test_order_depends_only_on_seed(self):
    one, same = (prompt_order.PromptOrder(50, seed=1) for _ in range(2))
    other = prompt_order.PromptOrder(50, seed=2)
    self.assertEqual(_drawn(one, 120), _drawn(same, 120))
    self.assertNotEqual(_drawn(one, 50), _drawn(other, 50))
    # A position far ahead or behind is the same whenever it is asked for.
    far = one.prompt(1000)
    one.prompt(0)
    self.assertEqual(one.prompt(1000), far)

  def test_threads_may_share_order(self):
    order = prompt_order.PromptOrder(50, seed=1)
    expected = [prompt_order.PromptOrder(50, seed=1).prompt(p)
              for p in range(0, 5000, 50)]  # fmt: skip
    with futures.ThreadPoolExecutor(8) as pool:
      for _ in range(20):
        self.assertEqual(list(pool.map(order.prompt, range(0, 5000, 50))),
                         expected)  # fmt: skip


class MixedOrderTest(absltest.TestCase):

  def test_other_order_takes_its_positions(self):
    logged = prompt_order.PromptOrder(3, seed=1, prompt_ids=[50, 51, 52])
    plain = prompt_order.PromptOrder(50, seed=1)
    mixed = prompt_order.MixedOrder(
        50, seed=1, other=logged, takes_other=lambda position: position % 4 == 0
    )
    for position in range(200):
      order = plain if position % 4 else logged
      self.assertEqual(mixed.prompt(position), order.prompt(position))
    self.assertEqual(mixed.num_prompts, 50)


class PositionsTest(absltest.TestCase):

  def test_position_counts_once(self):
    positions = prompt_order.Positions()
    self.assertTrue(positions.add(1))
    self.assertFalse(positions.add(1))
    self.assertEqual(positions.first_missing, 0)
    self.assertTrue(positions.add(0))
    self.assertFalse(positions.add(0))
    self.assertLen(positions, 2)
    self.assertEqual(positions.first_missing, 2)

  def test_counts_below_limit(self):
    positions = prompt_order.Positions()
    for position in (0, 1, 4, 6):
      positions.add(position)
    self.assertEqual(
        [positions.count(limit) for limit in (0, 1, 3, 5, 9)], [0, 1, 2, 3, 4]
    )

  def test_no_searcher_can_have_been_granted_far_position(self):
    positions = prompt_order.Positions()
    plausible = lambda: [
        positions.is_plausible(p) for p in (-1, 0, (1 << 20) - 1, 1 << 20)
    ]
    self.assertEqual(plausible(), [False, True, True, False])
    positions.add(7)
    self.assertEqual(plausible(), [False, True, True, True])

  def test_saved_state_is_same_set(self):
    order = prompt_order.PromptOrder(10, seed=0)
    positions = prompt_order.Positions()
    for position in (0, 4, 2):
      positions.add(position)
    state = positions.get_state(order)
    again = prompt_order.Positions.from_state(state, order)
    self.assertEqual([p in again for p in range(6)],
                     [True, False, True, False, True, False])  # fmt: skip
    self.assertLen(again, 3)

  def test_another_split_is_refused(self):
    order = prompt_order.PromptOrder(10, seed=0)
    other = prompt_order.PromptOrder(11, seed=0)
    with self.assertRaisesRegex(ValueError, "10 prompts"):
      prompt_order.Positions.from_state(
          prompt_order.Positions().get_state(order), other
      )

  def test_grown_log_is_refused(self):
    before, after = (
        prompt_order.MixedOrder(
            10,
            seed=0,
            other=prompt_order.PromptOrder(n, seed=0),
            takes_other=lambda position: position % 2 == 0,
        )
        for n in (4, 5)
    )
    state = prompt_order.Positions().get_state(before)
    prompt_order.Positions.from_state(state, before)
    with self.assertRaisesRegex(
        ValueError, r"with 14 .* log \(config.offline.path\) have 15"
    ):
      prompt_order.Positions.from_state(state, after)


class UngrantedTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.rest = prompt_order.Ungranted(prompt_order.Positions())

  def test_grants_stay_below_limit_and_never_overlap(self):
    self.assertEqual(self.rest.grant(4, limit=6), [0, 1, 2, 3])
    self.assertEqual(self.rest.grant(4, limit=6), [4, 5])
    self.assertEqual(self.rest.grant(4, limit=6), [])
    self.assertEqual(self.rest.available(6), 0)
    self.assertEqual(self.rest.available(9), 3)

  def test_released_positions_are_granted_first(self):
    self.rest.grant(4, limit=10)
    self.rest.note_journaled([2])
    self.rest.release([0, 1, 3])
    self.assertEqual(self.rest.grant(5, limit=10), [0, 1, 3, 4, 5])

  def test_journaled_position_is_not_granted_again(self):
    self.rest.grant(4, limit=10)
    self.rest.note_journaled([1, 2])
    self.rest.release([0, 1, 2, 3])
    self.assertEqual(self.rest.available(4), 2)
    self.assertEqual(self.rest.grant(9, limit=4), [0, 3])

  def test_position_granted_before_crash_is_skipped(self):
    self.rest.note_journaled([1, 2])
    self.assertEqual(self.rest.available(4), 2)
    self.assertEqual(self.rest.grant(9, limit=4), [0, 3])

  def test_nothing_is_available_if_all_came_before_crash(self):
    self.rest.note_journaled(range(4))
    self.assertEqual(self.rest.available(4), 0)
    self.assertEqual(self.rest.available(6), 2)
    self.assertEqual(self.rest.grant(9, limit=6), [4, 5])

  def test_implausible_position_is_ignored(self):
    self.rest.note_journaled([-1, 1 << 40])
    self.assertEqual(self.rest.grant(2, limit=9), [0, 1])

  def test_outstanding_positions_are_granted_again_after_restart(self):
    journaled = prompt_order.Positions()
    journaled.add(0)
    journaled.add(4)
    rest = prompt_order.Ungranted(journaled)
    self.assertEqual(rest.grant(9, limit=8), [1, 2, 3, 5, 6, 7])

  def test_available_counts_what_can_be_granted(self):
    rng = random.Random(0)
    rest, held = self.rest, []
    for _ in range(300):
      limit = rest.cursor + rng.randrange(-3, 9)
      copy_of = copy.deepcopy(rest)
      granted = copy_of.grant(1000, limit)
      self.assertEqual(rest.available(limit), len(granted))
      held += rest.grant(rng.randrange(4), limit)
      if rng.random() < 0.2:
        rest.release(held)
        held = []
      # Some were granted after the checkpoint, before a crash.
      for _ in range(rng.randrange(4)):
        rest.note_journaled({max(0, rest.cursor + rng.randrange(-9, 4))})

  def test_random_operations_lose_and_repeat_nothing(self):
    rng = np.random.default_rng(0)
    rest, held = self.rest, {}
    journaled = set()
    for _ in range(2000):
      limit = len(journaled) + 20
      match rng.integers(4):
        case 0:
          sid = f"s{rng.integers(3)}"
          got = rest.grant(int(rng.integers(1, 6)), limit)
          self.assertTrue(all(p < limit for p in got))
          self.assertEmpty(set(got) & journaled)
          for others in held.values():
            self.assertEmpty(set(got) & set(others))
          held.setdefault(sid, []).extend(got)
        case 1:
          sid = f"s{rng.integers(3)}"
          rest.release(held.pop(sid, []))
        case _:
          sid = f"s{rng.integers(3)}"
          if held.get(sid):
            position = held[sid].pop(int(rng.integers(len(held[sid]))))
            rest.note_journaled([position])
            journaled.add(position)
    # All positions below the highest limit were granted in the end.
    limit = len(journaled) + 20
    for positions in held.values():
      rest.release(positions)
    left = rest.grant(10**6, limit)
    self.assertEqual(
        sorted(journaled | set(left)), sorted(set(range(limit)) | journaled)
    )
