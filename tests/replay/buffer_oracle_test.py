# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Random operations on the buffer and on its naive model, and odds of draws."""

import collections
from unittest import mock

from absl.testing import parameterized
import numpy as np

from tba_jax.replay import records
from tests.replay import invariants
from tests.replay import naive_buffer
from tests.transport.groups import fake_groups

make_group = fake_groups.make_group
distinct = fake_groups.distinct
make_buffer = fake_groups.make_buffer


class NaiveEquivalenceTest(parameterized.TestCase):

  @parameterized.parameters(
      dict(seed=0),
      dict(seed=1, dedupe=False),
      dict(seed=2, capacity=7),
      dict(seed=3, capacity_per_prompt=3, recent_window_steps=3),
      dict(seed=4, capacity=25, capacity_per_prompt=2, selection="reward"),
      dict(seed=5, capacity=3, capacity_per_prompt=30, recent_fraction=1.0),
  )
  def test_random_operations_agree_with_naive_buffer(self, seed, **changes):
    settings = dict(
        capacity=18,
        capacity_per_prompt=6,
        dedupe=True,
        recent_fraction=0.6,
        recent_window_steps=2,
    )
    settings |= changes
    rng = np.random.default_rng(seed)
    # Pages of one token, of two (a row of 4 has two), or of all.
    tokens = (1, 3, 64)[seed % 3]
    self.enter_context(mock.patch.object(records, "PAGE_TOKENS", tokens))
    buffer = make_buffer(**settings, seed=seed)
    naive = naive_buffer.NaiveBuffer(
        settings["capacity_per_prompt"],
        settings["capacity"],
        settings["dedupe"],
    )
    step, drawn = 0, []
    for _ in range(300):
      choice = rng.random()
      if choice < 0.45:
        group = self._random_group(rng)
        result = buffer.insert(group, step)
        self.assertEqual(result, naive.insert(group, step))
      elif choice < 0.75 and naive.items:
        draw = buffer.sample(3, 2, step)
        self._check_draw(draw, naive, step - settings["recent_window_steps"])
        drawn.append(draw.ids)
      elif choice < 0.9 and drawn:
        # Some of these have been evicted by now.
        rows = drawn.pop(int(rng.integers(len(drawn))))
        self.assertEqual(
            buffer.mark_drawn(rows), naive.mark_drawn(rows.ravel().tolist())
        )
      elif choice < 0.97:
        step += 1
      else:
        state = buffer.get_state()
        buffer = make_buffer(**settings, seed=seed + 1)
        buffer.set_state(state)
      self._check_equal(buffer, naive)

  def _random_group(self, rng: np.random.Generator):
    count = int(rng.integers(1, 6))
    completions = [
        rng.integers(1, 3, rng.integers(1, 5)).tolist() for _ in range(count)
    ]
    # The first token is the policy's.
    inserted = [
        (j, place)
        for j, completion in enumerate(completions)
        for place in range(1, len(completion))
        if rng.random() < 0.3
    ]
    return make_group(
        int(rng.integers(6)),
        completions,
        inserted=inserted,
        rewards=rng.normal(size=count),
        version=int(rng.integers(100)),
    )

  def _check_equal(self, buffer, naive) -> None:
    invariants.check_buffer(buffer)
    self.assertLen(buffer, len(naive.items))
    self.assertEqual(buffer.untrained(), naive.untrained())
    stats = buffer.stats()
    self.assertEqual(stats["prompts"], len({i.prompt_id for i in naive.items}))
    uses = sum(i.uses for i in naive.items)
    self.assertEqual(stats["use_count"], uses / max(len(naive.items), 1))
    rows = buffer.get_state()["rows"]
    self.assertEqual(rows["ids"].tolist(), [i.item_id for i in naive.items])
    self.assertEqual(rows["use_counts"].tolist(), [i.uses for i in naive.items])
    tokens = [t for i in naive.items for t in i.tokens]
    self.assertEqual(rows["completion_tokens"].tolist(), tokens)
    sampled = [t for i in naive.items for t in i.sampled]
    self.assertEqual(rows["sampled_mask"].tolist(), sampled)

  def _check_draw(self, draw, naive, oldest: int) -> None:
    any_recent = any(i.arrival > oldest for i in naive.items)
    self.assertFalse(draw.recent.any() and not any_recent)
    for branch in (draw.recent, ~draw.recent):
      keys = collections.Counter(draw.prompt_ids[branch].tolist())
      recent = bool(draw.recent[branch].any())
      prompts = {
          i.prompt_id for i in naive.items if not recent or i.arrival > oldest
      }
      # Evenly, up to the pool's exhaustion.
      self.assertLessEqual(set(keys), prompts)
      most = -(-sum(keys.values()) // len(prompts)) if prompts else 0
      self.assertLessEqual(max(keys.values(), default=0), most)
    for b, key in enumerate(draw.prompt_ids.tolist()):
      ids = draw.ids[b].tolist()
      items = (
          naive.recent(key, oldest, len(ids))
          if draw.recent[b]
          else naive.of_prompt(key)
      )
      allowed = {i.item_id: i for i in items}
      self.assertLessEqual(set(ids), set(allowed))
      if len(allowed) >= len(ids):
        self.assertLen(set(ids), len(ids))
      for k, item in enumerate(allowed[i] for i in ids):
        length = draw.completion_lengths[b, k]
        tokens = draw.completion_tokens[b, k]
        self.assertEqual(tuple(tokens[:length].tolist()), item.tokens)
        self.assertFalse(tokens[length:].any())
        mask = draw.sampled_mask[b, k]
        self.assertEqual(tuple(mask[:length].tolist()), item.sampled)
        self.assertFalse(mask[length:].any())
        self.assertFalse(draw.behavior_logprobs[b, k][~mask].any())
        self.assertEqual(draw.versions[b, k], item.version)
        self.assertAlmostEqual(float(draw.rewards[b, k]), item.reward, places=5)
        self.assertLessEqual(draw.fresh[b, k], item.uses == 0)


class DistributionTest(parameterized.TestCase):

  def _assert_odds(self, counts, probabilities, critical: float) -> None:
    """Chi-square; `critical` is its value at p = 1e-4."""
    expected = np.sum(counts) * np.asarray(probabilities)
    statistic = ((np.asarray(counts) - expected) ** 2 / expected).sum()
    self.assertLess(statistic, critical)

  @parameterized.parameters(0.25, 0.95)
  def test_coin_of_recent_window_has_its_odds(self, recent_fraction):
    buffer = make_buffer(recent_fraction=recent_fraction)
    for key in range(4):
      buffer.insert(make_group(key, [[1]]), 0)
    recent = [buffer.sample(4, 1, 0).recent for _ in range(1000)]
    count = int(np.sum(recent))
    self._assert_odds(
        [count, 4000 - count], [recent_fraction, 1 - recent_fraction], 15.2
    )

  @parameterized.parameters(0.0, 1.0)
  def test_extreme_recent_fractions_are_deterministic(self, recent_fraction):
    buffer = make_buffer(recent_fraction=recent_fraction)
    buffer.insert(make_group(0, [[1]]), 0)
    draws = [buffer.sample(2, 1, 0).recent for _ in range(50)]
    self.assertEqual(set(np.ravel(draws).tolist()), {recent_fraction == 1})

  def test_rewards_weigh_only_outside_of_recent_window(self):
    rewards = np.array([0.0, 0.5, 1.0])
    weights = np.exp(rewards / 0.5) / np.exp(rewards / 0.5).sum()
    for recent_fraction, odds in ((0.0, weights), (1.0, np.full(3, 1 / 3))):
      buffer = make_buffer(
          recent_fraction=recent_fraction,
          selection="reward",
          reward_temperature=lambda step: 0.5,
      )
      buffer.insert(make_group(0, distinct(0, 3), rewards=rewards), 0)
      rows = [buffer.sample(1, 1, 0).ids for _ in range(3000)]
      self._assert_odds(np.bincount(np.ravel(rows)), odds, 18.4)

  def test_seed_decides_all(self):
    def draws(seed):
      buffer = make_buffer(recent_fraction=0.5, seed=seed)
      for key in range(5):
        buffer.insert(make_group(key, distinct(0, 6)), 0)
      return [buffer.sample(3, 2, 0).ids.tolist() for _ in range(5)]

    self.assertEqual(draws(1), draws(1))
    self.assertNotEqual(draws(1), draws(2))
