# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Who the buffer takes in and gives up: duplicates, similarity, eviction."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from tba_jax.replay import ledger
from tests.replay import fake_groups

Amount = ledger.Amount
make_group = fake_groups.make_group


def _embed(completions):
  # Completions whose first tokens share a ten are similar.
  return np.eye(10, dtype=np.float32)[[c[0] // 10 for c in completions]]


_EDIT = {"similarity": "edit", "similarity_limit": 0.3}
_COSINE = {"similarity": "cosine", "similarity_limit": 0.9, "embed": _embed}


def _buffer(**changes):
  return fake_groups.make_buffer(**{"recent_fraction": 0.0, **changes})


def _stored(buffer):
  """Returns {first token: reward} of all that is stored, after a check."""
  buffer.check_valid()
  table = buffer._store.table
  rows = table.live_rows()
  return dict(zip(table.tokens[rows, 0].tolist(), table.rewards[rows].tolist()))


class DuplicatesTest(absltest.TestCase):

  def test_the_oldest_stays(self):
    buffer = _buffer(duplicates="oldest")
    buffer.insert(make_group(0, [[5], [6]], rewards=[1.0, 2.0]), 0)
    result = buffer.insert(make_group(0, [[6], [7]], rewards=[9.0, 3.0]), 1)
    self.assertEqual(_stored(buffer), {5: 1.0, 6: 2.0, 7: 3.0})
    self.assertEqual(result.replaced_untrained, Amount(0, 1, 1))
    self.assertEqual(buffer.untrained(), Amount(2, 3, 3))

  def test_a_group_of_duplicates_alone_leaves_whole(self):
    buffer = _buffer(duplicates="oldest", recent_fraction=1.0)
    buffer.insert(make_group(0, [[5], [6]]), 0)
    result = buffer.insert(make_group(0, [[5], [6]]), 3)
    self.assertEqual(result.left_untrained, Amount(1, 2, 2))
    self.assertEqual(buffer.untrained(), Amount(1, 2, 2))
    buffer.check_valid()
    # Nothing of it is recent, so the draw is from all.
    self.assertFalse(buffer.sample(1, 2, 3).recent.any())


class SimilarityTest(parameterized.TestCase):

  @parameterized.named_parameters(("edit", _EDIT), ("cosine", _COSINE))
  def test_the_higher_reward_stays(self, settings):
    buffer = _buffer(**settings)
    first = make_group(0, [[11, 1, 2, 3], [21, 4, 5, 6]], rewards=[1.0, 2.0])
    buffer.insert(first, 0)
    # Like the first and better; like the second and no better; like none.
    second = make_group(
        0,
        [[12, 1, 2, 3], [22, 4, 5, 6], [31, 7, 8, 9]],
        rewards=[1.5, 2.0, 0.0],
    )
    result = buffer.insert(second, 1)
    self.assertEqual(_stored(buffer), {12: 1.5, 21: 2.0, 31: 0.0})
    self.assertEqual(result.replaced_untrained, Amount(0, 2, 8))

  def test_within_a_group_too(self):
    buffer = _buffer(**_COSINE)
    group = make_group(0, [[11], [12], [13], [21]], rewards=[1.0, 3.0, 2.0, 0])
    buffer.insert(group, 0)
    self.assertEqual(_stored(buffer), {12: 3.0, 21: 0.0})

  def test_one_may_replace_several(self):
    buffer = _buffer(**_EDIT)
    old = make_group(0, [[1, 2, 3, 4], [1, 7, 8, 9]], rewards=[1.0, 2.0])
    buffer.insert(old, 0)
    self.assertLen(buffer, 2)
    buffer.insert(make_group(0, [[1, 2, 8, 4]], rewards=[3.0]), 1)
    self.assertEqual(_stored(buffer), {1: 3.0})

  def test_prompts_are_apart(self):
    buffer = _buffer(**_COSINE)
    buffer.insert(make_group(0, [[11]], rewards=[1.0]), 0)
    buffer.insert(make_group(1, [[12]], rewards=[0.0]), 0)
    self.assertLen(buffer, 2)

  @parameterized.named_parameters(("edit", _EDIT), ("cosine", _COSINE))
  def test_a_restored_buffer_compares_as_before(self, settings):
    buffer = _buffer(**settings)
    buffer.insert(make_group(0, [[11, 1, 2, 3], [21, 4, 5, 6]]), 0)
    again = _buffer(**settings)
    again.set_state(buffer.get_state())
    again.insert(make_group(0, [[12, 1, 2, 3]], rewards=[-1.0]), 1)
    self.assertEqual(_stored(again), _stored(buffer))
    again.insert(make_group(0, [[12, 1, 2, 3]], rewards=[5.0]), 2)
    self.assertEqual(_stored(again), {12: 5.0, 21: 1.0})


class EvictionTest(absltest.TestCase):

  def test_the_lowest_rewards_go_new_ones_too(self):
    buffer = _buffer(capacity_per_prompt=3, evict="lowest_reward")
    group = make_group(0, [[1], [2], [3]], rewards=[5.0, 1.0, 3.0])
    buffer.insert(group, 0)
    result = buffer.insert(make_group(0, [[4], [5]], rewards=[4.0, 0.0]), 1)
    self.assertEqual(_stored(buffer), {1: 5.0, 3: 3.0, 4: 4.0})
    self.assertEqual(result.evicted_untrained, Amount(0, 2, 2))

  def test_of_all_prompts(self):
    buffer = _buffer(capacity=3, evict="lowest_reward")
    buffer.insert(make_group(0, [[1]], rewards=[0.0]), 0)
    buffer.insert(make_group(1, [[2], [3]], rewards=[2.0, 3.0]), 0)
    buffer.insert(make_group(2, [[4]], rewards=[1.0]), 1)
    self.assertEqual(_stored(buffer), {2: 2.0, 3: 3.0, 4: 1.0})
    self.assertEqual(buffer.num_prompts, 2)
    # Too bad to come in: the group leaves whole, and the prompt is not known.
    result = buffer.insert(make_group(3, [[5]], rewards=[-1.0]), 2)
    self.assertEqual(result.left_untrained, Amount(1, 1, 1))
    self.assertEqual(buffer.num_prompts, 2)
    buffer.check_valid()
    self.assertEqual(fake_groups.first_tokens(buffer.sample(2, 1, 2)) & {5},
                     set())  # fmt: skip

  def test_equal_rewards_go_oldest_first(self):
    buffer = _buffer(capacity_per_prompt=2, evict="lowest_reward")
    for token in range(4):
      buffer.insert(make_group(0, [[token + 1]], rewards=[1.0]), token)
    self.assertEqual(set(_stored(buffer)), {3, 4})

  def test_a_frozen_buffer_does_not_grow(self):
    buffer = _buffer(capacity_per_prompt=40, freeze_step=2)
    for step in range(5):
      group = make_group(0, fake_groups.distinct(2 * step + 1, 2))
      buffer.insert(group, step)
    self.assertEqual(set(_stored(buffer)), {7, 8, 9, 10})
    again = _buffer(capacity_per_prompt=40, freeze_step=2)
    again.set_state(buffer.get_state())
    again.insert(make_group(0, fake_groups.distinct(20, 2)), 6)
    self.assertEqual(set(_stored(again)), {9, 10, 20, 21})

  def test_random_groups_against_a_plain_list(self):
    rng = np.random.default_rng(0)
    buffer = _buffer(
        capacity=12,
        capacity_per_prompt=12,
        recent_fraction=0.5,
        duplicates="oldest",
        evict="lowest_reward",
        **_COSINE,
    )
    plain: dict[int, tuple[float, int]] = {}  # ten -> (reward, first token)
    for step in range(60):
      firsts = rng.choice(np.arange(1, 90), 4, replace=False)
      rewards = rng.choice(1000, 4, replace=False).astype(float)
      group = make_group(0, [[f] for f in firsts], rewards=rewards)
      before = buffer.untrained()
      result = buffer.insert(group, step)
      # Copies of what was there before are refused first of all.
      known = {first for _, first in plain.values()}
      for first, reward in zip(firsts.tolist(), rewards.tolist()):
        if first not in known and reward > plain.get(first // 10, (-1.0, 0))[0]:
          plain[first // 10] = (reward, first)
      self.assertEqual(_stored(buffer), {f: r for r, f in plain.values()})
      after = before + result.inserted - result.left_untrained
      self.assertEqual(buffer.untrained(), after)
      draw = buffer.sample(2, 3, step)
      buffer.mark_trained(draw.rows)


if __name__ == "__main__":
  absltest.main()
