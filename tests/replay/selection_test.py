# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the distributions that draws follow."""

import itertools
import json

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from tba_jax.replay import selection
from tests.replay import invariants

# Critical values of chi-square at p = 1e-4, by degrees of freedom.
_CRITICAL = {
    2: 18.4,
    3: 21.1,
    4: 23.5,
    5: 25.7,
    7: 29.9,
    9: 33.7,
    11: 37.4,
    14: 42.6,
}


def _chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
  expected = counts.sum() * probabilities
  return float(((counts - expected) ** 2 / expected).sum())


class ChooseTest(parameterized.TestCase):

  def _assert_follows(self, outcomes, probabilities) -> None:
    """Each outcome is a key of `probabilities`, with these odds."""
    names = list(probabilities)
    counts = np.array([outcomes.count(name) for name in names])
    self.assertEqual(counts.sum(), len(outcomes))
    statistic = _chi_square(counts, np.array(list(probabilities.values())))
    self.assertLess(statistic, _CRITICAL[len(names) - 1])

  def test_draws_uniformly_without_replacement(self):
    rng = np.random.default_rng(0)
    outcomes = [
        tuple(sorted(selection.choose_uniform(rng, 5, 2).tolist()))
        for _ in range(4000)
    ]
    pairs = list(itertools.combinations(range(5), 2))
    self._assert_follows(outcomes, dict.fromkeys(pairs, 1 / len(pairs)))

  def test_too_few_items_are_all_drawn_equally_often(self):
    rng = np.random.default_rng(1)
    outcomes = [selection.choose_uniform(rng, 3, 7) for _ in range(4000)]
    counts = np.stack([np.bincount(o, minlength=3) for o in outcomes])
    np.testing.assert_array_equal(np.sort(counts), [[2, 2, 3]] * 4000)
    thrice = counts.argmax(axis=1).tolist()
    self._assert_follows(thrice, dict.fromkeys(range(3), 1 / 3))

  def test_takes_all_of_them_when_as_many(self):
    rng = np.random.default_rng(2)
    before = rng.bit_generator.state
    np.testing.assert_array_equal(
        selection.choose_uniform(rng, 3, 3), [0, 1, 2]
    )
    # Nothing is left to chance, so that nothing is drawn.
    self.assertEqual(rng.bit_generator.state, before)

  @parameterized.parameters(0.5, 2.0)
  def test_reward_without_replacement_draws_sequentially(self, temperature):
    rng = np.random.default_rng(3)
    rewards = np.array([0.0, 1.0, 0.5, -1.0], np.float32)
    weights = np.exp(rewards / temperature)
    weights /= weights.sum()
    probabilities = {}
    for i, j in itertools.combinations(range(4), 2):
      p, q = weights[i], weights[j]
      probabilities[i, j] = p * q / (1 - p) + q * p / (1 - q)
    outcomes = []
    for _ in range(6000):
      chosen = selection.choose_by_reward(
          rng, rewards, 2, temperature=temperature
      )
      outcomes.append(tuple(sorted(chosen.tolist())))
    self._assert_follows(outcomes, probabilities)

  @parameterized.parameters(1, 5)
  def test_weights_decay_with_age(self, count):
    """exp(r/τ) exp(-age/τ_a): r = 2 at age 30 weighs as 0 at age 10."""
    rng = np.random.default_rng(6)
    rewards = np.array([2.0, 0.0, 1.0], np.float32)
    weights = np.exp([2.0 - 3.0, -1.0, 1.0 - 2.0 * 0.5])
    weights /= weights.sum()
    chosen = [
        selection.choose_by_reward(
            rng,
            rewards,
            count,
            temperature=1.0,
            ages=np.array([30, 10, 10]),
            age_decay=10.0,
        )
        for _ in range(3000 // count)
    ]
    self._assert_follows(
        np.concatenate(chosen).tolist(), dict(enumerate(weights))
    )

  def test_draws_by_reward_with_replacement_when_too_few(self):
    rng = np.random.default_rng(4)
    rewards = np.array([2.0, 0.0, 1.0], np.float32)
    weights = np.exp(rewards) / np.exp(rewards).sum()
    chosen = [
        selection.choose_by_reward(rng, rewards, 4, temperature=1.0)
        for _ in range(1500)
    ]
    self._assert_follows(
        np.concatenate(chosen).tolist(), dict(enumerate(weights))
    )

  def test_underflowing_reward_weights_still_fill_draw(self):
    """exp(-4000) is 0: such items still fill a draw, and are last."""
    rng = np.random.default_rng(5)
    rewards = np.array([0.0, -4000.0, 4000.0, -4000.0], np.float32)
    for _ in range(20):
      chosen = selection.choose_by_reward(rng, rewards, 3, temperature=1.0)
      self.assertLen(set(chosen.tolist()), 3)
      self.assertLessEqual({0, 2}, set(chosen.tolist()))
    chosen = selection.choose_by_reward(rng, rewards, 9, temperature=1.0)
    self.assertEqual(set(chosen.tolist()), {2})


class PromptPoolTest(absltest.TestCase):

  def _pool(self, count: int) -> selection.PromptPool:
    pool = selection.PromptPool()
    for key in range(count):
      pool.add(key)
    return pool

  def test_draws_each_key_once_then_all_again(self):
    rng = np.random.default_rng(0)
    pool = self._pool(6)
    for _ in range(3):
      first, second = pool.draw(rng, 4), pool.draw(rng, 2)
      self.assertCountEqual(first + second, range(6))

  def test_order_is_uniform(self):
    rng = np.random.default_rng(1)
    pool = self._pool(4)
    outcomes = [tuple(pool.draw(rng, 2)) for _ in range(2000)]
    # The second half of a cycle is the rest of the first.
    pairs = list(itertools.permutations(range(4), 2))
    counts = np.array([outcomes[::2].count(p) for p in pairs])
    self.assertLess(_chi_square(counts, np.full(12, 1 / 12)), _CRITICAL[11])

  def test_refill_within_draw_prefers_undrawn_items(self):
    rng = np.random.default_rng(2)
    for _ in range(50):
      pool = self._pool(5)
      self.assertLen(pool.draw(rng, 3), 3)
      # Two are undrawn; the refill adds two of those drawn before.
      drawn = pool.draw(rng, 4)
      self.assertLen(set(drawn), 4)
      self.assertEqual(pool.num_undrawn, 1)

  def test_more_than_pool_holds(self):
    rng = np.random.default_rng(3)
    drawn = self._pool(3).draw(rng, 8)
    self.assertLen(drawn, 8)
    self.assertCountEqual(drawn[:3], range(3))
    self.assertCountEqual(drawn[3:6], range(3))

  def test_added_keys_are_undrawn_and_removed_keys_never_drawn(self):
    rng = np.random.default_rng(4)
    pool = self._pool(4)
    drawn = pool.draw(rng, 4)
    pool.add(9)
    pool.add(drawn[0])
    self.assertCountEqual(pool.draw(rng, 2), [9, drawn[0]])
    pool.remove(9)
    with self.assertRaises(KeyError):
      pool.remove(9)
    self.assertNotIn(9, pool)
    self.assertNotIn(9, pool.draw(rng, 40))

  def test_refuses_to_draw_from_empty_pool(self):
    rng = np.random.default_rng(5)
    self.assertEqual(self._pool(0).draw(rng, 0), [])
    with self.assertRaisesRegex(ValueError, "empty"):
      self._pool(0).draw(rng, 1)

  def test_random_changes_against_two_sets(self):
    rng = np.random.default_rng(6)
    pool, undrawn, drawn = selection.PromptPool(), set(), set()
    for _ in range(2000):
      key = int(rng.integers(12))
      choice = rng.random()
      if choice < 0.3:
        pool.add(key)
        drawn.discard(key)
        undrawn.add(key)
      elif choice < 0.5 and key in pool:
        pool.remove(key)
        drawn.discard(key)
        undrawn.discard(key)
      elif len(pool):
        if not undrawn:
          undrawn, drawn = drawn, set()
        (key,) = pool.draw(rng, 1)
        undrawn.remove(key)
        drawn.add(key)
      invariants.check_pool(pool)
      self.assertEqual(pool.num_undrawn, len(undrawn))
      self.assertLen(pool, len(undrawn) + len(drawn))

  def test_restores_its_state(self):
    rng = np.random.default_rng(7)
    pool, other = self._pool(9), selection.PromptPool()
    pool.draw(rng, 4)
    pool.remove(3)
    other.set_state(pool.get_state())
    invariants.check_pool(other)
    self.assertEqual(
        pool.draw(np.random.default_rng(8), 20),
        other.draw(np.random.default_rng(8), 20),
    )


class RecentPoolTest(absltest.TestCase):

  def test_expires_items_leaving_window(self):
    pool = selection.RecentPool(2)
    pool.add(1, 10)
    pool.add(3, 10)
    pool.add(2, 11)
    pool.add(1, 11)
    pool.expire(11)
    self.assertLen(pool, 3)
    pool.expire(12)
    # Step 10 is out of the window of step 12; prompt 1 arrived again.
    self.assertNotIn(3, pool)
    self.assertIn(1, pool)
    invariants.check_recent_pool(pool)
    pool.expire(13)
    self.assertEmpty(pool)
    invariants.check_recent_pool(pool)

  def test_new_data_makes_undrawn(self):
    rng = np.random.default_rng(0)
    pool = selection.RecentPool(4)
    for key in range(3):
      pool.add(key, 0)
    pool.draw(rng, 3)
    pool.add(1, 1)
    self.assertEqual(pool.draw(rng, 1), [1])

  def test_returning_prompt_is_not_expired_by_stale_entry(self):
    pool = selection.RecentPool(2)
    pool.add(1, 5)
    pool.remove(1)
    pool.remove(1)
    pool.expire(6)
    self.assertEmpty(pool)
    pool.add(1, 6)
    # The stale entry of step 5 does not expire the arrival at step 6.
    pool.expire(7)
    self.assertIn(1, pool)
    invariants.check_recent_pool(pool)

  def test_restores_its_state(self):
    rng = np.random.default_rng(1)
    pool, other = selection.RecentPool(2), selection.RecentPool(2)
    for key, step in ((1, 0), (2, 0), (3, 1), (1, 1), (4, 2)):
      pool.add(key, step)
    pool.draw(rng, 2)
    state = pool.get_state()
    json.dumps(state["pool"]["num_undrawn"])
    other.set_state(state)
    for step in (2, 3):
      pool.expire(step)
      other.expire(step)
      invariants.check_recent_pool(other)
      self.assertEqual(
          pool.draw(np.random.default_rng(2), 5),
          other.draw(np.random.default_rng(2), 5),
      )
