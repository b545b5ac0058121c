# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the buffer's rules, one by one, and of its state."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from tba_jax.replay import buffer as buffer_lib
from tests.replay import fake_groups

make_group = fake_groups.make_group
distinct = fake_groups.distinct
make_buffer = fake_groups.make_buffer
first_tokens = fake_groups.first_tokens


class InsertTest(parameterized.TestCase):

  def test_newest_copy_wins(self):
    buffer = make_buffer()
    buffer.insert(make_group(1, [[5], [6]], rewards=[1, 1], version=3), 0)
    result = buffer.insert(
        make_group(1, [[5], [8]], rewards=[2, 2], version=4), 1
    )
    self.assertLen(buffer, 3)
    self.assertEqual(result.inserted, (1, 2, 2))
    self.assertEqual(result.replaced_untrained, (0, 1, 1))
    draw = buffer.sample(1, 2, 1)
    # Only the copy is recent, with its own reward, version and arrival.
    self.assertEqual(first_tokens(draw), {5, 8})
    self.assertEqual(set(draw.rewards.ravel().tolist()), {2.0})
    self.assertEqual(set(draw.versions.ravel().tolist()), {4})
    buffer.check_valid()

  def test_a_copy_starts_anew(self):
    buffer = make_buffer()
    buffer.insert(make_group(1, [[5]]), 0)
    old = buffer.sample(1, 1, 0).rows
    self.assertEqual(buffer.mark_trained(old), (1, 1, 1))
    buffer.set_ref_logprobs(old, np.full((1, 1, 4), -1.0, np.float32), 0)
    result = buffer.insert(make_group(1, [[5]]), 1)
    self.assertEqual(result.replaced_trained, (0, 1, 1))
    self.assertEqual(result.left_untrained, (0, 0, 0))
    self.assertEqual(buffer.untrained(), (1, 1, 1))
    draw = buffer.sample(1, 1, 1)
    self.assertTrue(draw.fresh.all())
    self.assertEqual(draw.ref_versions.item(), -1)
    self.assertNotEqual(draw.rows.item(), old.item())

  def test_same_tokens_of_another_prompt_or_length_are_no_copy(self):
    buffer = make_buffer()
    buffer.insert(make_group(1, [[5], [5, 5], [5, 5, 7]]), 0)
    buffer.insert(make_group(2, [[5]]), 0)
    self.assertLen(buffer, 4)

  def test_width_and_padding_mean_nothing(self):
    buffer = make_buffer()
    buffer.insert(make_group(1, [[5, 6]], width=2), 0)
    buffer.insert(make_group(1, [[5, 6]], width=9), 0)
    self.assertLen(buffer, 1)
    draw = buffer.sample(1, 1, 0)
    np.testing.assert_array_equal(draw.completion_tokens, [[[5, 6, 0, 0]]])
    np.testing.assert_array_equal(draw.behavior_logprobs, [[[-5, -6, 0, 0]]])

  def test_a_row_that_is_used_again_keeps_nothing(self):
    buffer = make_buffer(capacity=1)
    buffer.insert(make_group(1, [[5, 6, 7, 8]]), 0)
    buffer.insert(make_group(1, [[9]], width=2), 0)
    buffer.check_valid()
    draw = buffer.sample(1, 1, 0)
    np.testing.assert_array_equal(draw.completion_tokens, [[[9, 0, 0, 0]]])
    np.testing.assert_array_equal(draw.behavior_logprobs, [[[-9, 0, 0, 0]]])

  def test_copies_within_a_group(self):
    buffer = make_buffer()
    result = buffer.insert(make_group(1, [[5], [6], [5]], rewards=[1, 2, 3]), 0)
    self.assertLen(buffer, 2)
    self.assertEqual(result.inserted, (1, 3, 3))
    self.assertEqual(result.replaced_untrained, (0, 1, 1))
    draw = buffer.sample(1, 2, 0)
    self.assertEqual(set(draw.rewards.ravel().tolist()), {2.0, 3.0})

  def test_without_dedupe(self):
    buffer = make_buffer(dedupe=False)
    result = buffer.insert(make_group(1, [[5], [5]]), 0)
    self.assertLen(buffer, 2)
    self.assertEqual(result.left_untrained, (0, 0, 0))
    buffer.check_valid()

  def test_oldest_of_the_prompt_goes(self):
    buffer = make_buffer(capacity_per_prompt=3, recent_window_steps=9)
    buffer.insert(make_group(2, distinct(50, 3)), 0)
    buffer.insert(make_group(1, distinct(10, 2)), 0)
    result = buffer.insert(make_group(1, distinct(20, 2)), 1)
    self.assertEqual(result.evicted_untrained, (0, 1, 1))
    result = buffer.insert(make_group(1, distinct(30, 1)), 1)
    # With its second completion the first group is gone as a whole.
    self.assertEqual(result.evicted_untrained, (1, 1, 1))
    self.assertLen(buffer, 6)
    self.assertEqual(
        first_tokens(buffer.sample(2, 3, 1)), {20, 21, 30, 50, 51, 52}
    )

  def test_oldest_of_all_goes_and_empty_prompts_with_it(self):
    buffer = make_buffer(capacity=4, recent_window_steps=9)
    buffer.insert(make_group(1, distinct(10, 2)), 0)
    buffer.insert(make_group(2, distinct(20, 2)), 0)
    buffer.insert(make_group(3, distinct(30, 3)), 0)
    self.assertLen(buffer, 4)
    self.assertEqual(buffer.num_prompts, 2)
    for _ in range(4):
      self.assertEqual(first_tokens(buffer.sample(2, 3, 0)), {21, 30, 31, 32})
    buffer.check_valid()

  def test_trained_and_untrained_evictions(self):
    buffer = make_buffer(capacity=2, recent_window_steps=9)
    buffer.insert(make_group(1, [[1, 2], [3, 4, 5]]), 0)
    draw = buffer.sample(1, 1, 0)
    self.assertEqual(buffer.mark_trained(draw.rows)[:2], (1, 1))
    result = buffer.insert(make_group(2, [[6], [7]]), 0)
    trained, untrained = result.evicted_trained, result.evicted_untrained
    self.assertEqual(trained + untrained, (0, 2, 5))
    self.assertEqual(trained.tokens, int(draw.completion_lengths.item()))

  def test_group_larger_than_the_capacity(self):
    buffer = make_buffer(capacity_per_prompt=2)
    result = buffer.insert(make_group(1, distinct(10, 5)), 0)
    self.assertEqual(result.evicted_untrained, (0, 3, 3))
    self.assertEqual(buffer.untrained(), (1, 2, 2))
    self.assertEqual(first_tokens(buffer.sample(1, 2, 0)), {13, 14})

  @parameterized.parameters(
      (dict(completions=[[1] * 5]), 0, "5 tokens"),
      (dict(completions=[[1]], rewards=[np.nan]), 0, "not finite"),
      (dict(completions=[[1]], prompt_id=6), 0, "other tokens"),
      (dict(completions=[[1]]), -1, "step -1"),
  )
  def test_refusals_change_nothing(self, fields, step, message):
    buffer = make_buffer()
    buffer.insert(make_group(1, [[9]]), 0)
    width = max(len(c) for c in fields["completions"])
    group = make_group(**{"prompt_id": 1, "width": width, **fields})
    if group.prompt_id == 6:
      fields = {**vars(group), "prompt_id": 1}
      fields["prompt_tokens"] = np.array([8, 8], np.int32)
      group = type(group)(**fields)
    before = repr(buffer.get_state())
    with self.assertRaisesRegex(ValueError, message):
      buffer.insert(group, step)
    self.assertEqual(repr(buffer.get_state()), before)
    buffer.check_valid()

  def test_too_long_prompt_and_empty_completion(self):
    buffer = make_buffer(max_prompt_tokens=1)
    with self.assertRaisesRegex(ValueError, "max_prompt_tokens=1"):
      buffer.insert(make_group(1, [[9]]), 0)
    group = make_group(0, [[9]])
    group.completion_lengths[0] = 0
    with self.assertRaisesRegex(ValueError, "without tokens"):
      buffer.insert(group, 0)
    self.assertEmpty(buffer)
    self.assertEqual(buffer.num_prompts, 0)


class StalenessTest(absltest.TestCase):

  def test_versions_that_a_restart_gave_up_are_stale(self):
    # Epoch 1 ran to 50, epoch 2 from 30 to 60, epoch 3 from 40.
    starts = [(1, 0), (2, 30), (3, 40)]
    cases = [  # epoch, version, staleness at step 42
        (1, 20, 22),
        (1, 30, 12),  # The params of the checkpoint itself.
        (1, 42, (42 - 30) + (42 - 30)),
        (2, 35, 7),
        (2, 42, (42 - 40) + (42 - 40)),
        (3, 40, 2),
        (3, 42, 0),
    ]
    epochs, versions, expected = np.array(cases).T
    found = buffer_lib.staleness(starts, epochs, versions, 42)
    self.assertEqual(found.tolist(), expected.tolist())

  def test_a_draw_has_the_staleness_of_each_epoch(self):
    buffer = make_buffer(recent_window_steps=9)
    buffer.begin_epoch(1, 0)
    buffer.insert(make_group(0, [[1], [2]], version=4, epoch=1), 4)
    self.assertEqual(buffer.sample(1, 2, 4).staleness_steps.tolist(), [[0, 0]])
    again = make_buffer(recent_window_steps=9)
    again.set_state(buffer.get_state())
    again.begin_epoch(2, 3)
    draw = again.sample(1, 2, 4)
    self.assertEqual(draw.versions.tolist(), [[4, 4]])
    self.assertEqual(draw.epochs.tolist(), [[1, 1]])
    self.assertEqual(draw.staleness_steps.tolist(), [[2, 2]])
    self.assertEqual(draw.stats()["staleness_steps"], 2.0)
    # What the restarted trainer's own params sampled is on-policy.
    again.insert(make_group(0, [[3], [4]], version=4, epoch=2), 4)
    draw = again.sample(1, 4, 4)
    of_epoch = dict(zip(draw.epochs[0].tolist(), draw.staleness_steps[0]))
    self.assertEqual(of_epoch, {1: 2, 2: 0})


class InOrderTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.buffer = make_buffer(dedupe=False)
    self.buffer.insert(make_group(9, distinct(90, 2)), 0)
    for i, size in enumerate((2, 1, 2, 2)):
      self.buffer.insert(make_group(i % 3, distinct(10 * i, size)), 4)

  def draw(self, skip, step=4):
    return self.buffer.sample_in_order(2, 2, step, arrived_from=4, skip=skip)

  def test_whole_groups_of_the_round_in_order(self):
    """Group 1 has one completion; after the last the first comes again."""
    draw = self.draw(0)
    self.assertEqual(
        draw.completion_tokens[..., 0].tolist(), [[0, 1], [20, 21]]
    )
    self.assertEqual(draw.prompt_ids.tolist(), [0, 2])
    self.assertEqual(
        self.draw(2, 5).completion_tokens[..., 0].tolist(), [[30, 31], [0, 1]]
    )
    self.buffer.check_valid()

  def test_refuses_what_is_not_there(self):
    with self.assertRaisesRegex(ValueError, "no whole group since 5"):
      self.buffer.sample_in_order(2, 2, 5, arrived_from=5, skip=0)
    with self.assertRaisesRegex(ValueError, "step 4 after step 5"):
      self.draw(0, 4)


class SampleTest(absltest.TestCase):

  def test_the_temperature_is_that_of_the_draw_s_step(self):
    """Cold, one of two completions is drawn for its reward; hot, either is."""
    buffer = make_buffer(
        recent_fraction=0.0,
        selection="reward",
        reward_temperature=lambda step: 1e9 if step < 5 else 1e-3,
    )
    group = make_group(1, [[1], [2]])
    group.rewards[:] = [0.0, 1.0]
    buffer.insert(group, 0)
    hot = [first_tokens(buffer.sample(1, 1, 4)) for _ in range(40)]
    self.assertIn({1}, hot)
    self.assertIn({2}, hot)
    for _ in range(40):
      self.assertEqual(first_tokens(buffer.sample(1, 1, 5)), {2})

  def test_window_counts_no_copy_twice(self):
    """Two inserts of three at one step with two in common: four are recent.

    The published buffer counts six and takes older items for recent ones.
    """
    buffer = make_buffer()
    buffer.insert(make_group(1, distinct(90, 5)), 0)
    buffer.insert(make_group(1, [[1], [2], [3]]), 1)
    buffer.insert(make_group(1, [[2], [3], [4]]), 1)
    for _ in range(30):
      self.assertEqual(first_tokens(buffer.sample(1, 4, 1)), {1, 2, 3, 4})
      # One more than there are: with replacement, among the recent only.
      self.assertLessEqual(first_tokens(buffer.sample(1, 5, 1)), {1, 2, 3, 4})

  def test_window_never_exceeds_the_capacity(self):
    buffer = make_buffer(capacity_per_prompt=4)
    for first in (10, 20, 30):
      buffer.insert(make_group(1, distinct(first, 3)), 1)
    self.assertEqual(first_tokens(buffer.sample(1, 4, 1)), {22, 30, 31, 32})

  def test_window_is_a_span_of_steps(self):
    buffer = make_buffer(recent_window_steps=2)
    for step in range(4):
      buffer.insert(make_group(1, [[10 + step]]), step)
    self.assertEqual(first_tokens(buffer.sample(1, 2, 3)), {12, 13})
    self.assertEqual(first_tokens(buffer.sample(1, 1, 4)), {13})
    draw = buffer.sample(1, 4, 5)
    self.assertFalse(draw.recent.any())
    self.assertEqual(first_tokens(draw), {10, 11, 12, 13})
    self.assertEqual(buffer.stats()["recent_misses"], 1)

  def test_a_prompt_comes_once_a_branch(self):
    buffer = make_buffer(recent_fraction=0.5)
    for key in range(6):
      buffer.insert(make_group(key, distinct(10 * key, 2)), 0)
    twice = 0
    for _ in range(60):
      draw = buffer.sample(6, 2, 0)
      for branch in (draw.recent, ~draw.recent):
        keys = draw.prompt_ids[branch].tolist()
        self.assertLen(set(keys), len(keys))
      twice += len(set(draw.prompt_ids.tolist())) < 6
    self.assertGreater(twice, 0)

  def test_a_row_of_the_batch_is_one_prompt(self):
    buffer = make_buffer(recent_fraction=0.5)
    for key in range(4):
      buffer.insert(make_group(key, distinct(10 * key, 8)), 0)
    draw = buffer.sample(4, 5, 0)
    keys_BxK = draw.completion_tokens[..., 0] // 10
    np.testing.assert_array_equal(
        keys_BxK, np.repeat(draw.prompt_ids[:, None], 5, axis=1)
    )

  def test_columns(self):
    buffer = make_buffer()
    buffer.insert(make_group(2, [[4, 5, 0]], rewards=[0.5], version=7), 9)
    draw = buffer.sample(1, 1, 9)
    np.testing.assert_array_equal(draw.prompt_tokens, [[0, 0, 1, 2, 3]])
    np.testing.assert_array_equal(draw.prompt_mask, [[0, 0, 1, 1, 1]])
    np.testing.assert_array_equal(draw.completion_tokens, [[[4, 5, 0, 0]]])
    np.testing.assert_array_equal(draw.behavior_logprobs, [[[-4, -5, 0, 0]]])
    np.testing.assert_array_equal(draw.ref_logprobs, np.zeros((1, 1, 4)))
    self.assertEqual(draw.completion_lengths.tolist(), [[3]])
    self.assertEqual(draw.stopped.tolist(), [[True]])
    self.assertEqual(draw.rewards.tolist(), [[0.5]])
    self.assertEqual(draw.versions.tolist(), [[7]])
    self.assertEqual(draw.stats()["staleness_steps"], 2.0)
    for name, dtype in (
        ("prompt_tokens", np.int32),
        ("prompt_mask", np.float32),
        ("completion_tokens", np.int32),
        ("completion_lengths", np.int32),
        ("stopped", np.bool_),
        ("behavior_logprobs", np.float32),
        ("ref_logprobs", np.float32),
        ("ref_versions", np.int32),
        ("rewards", np.float32),
        ("versions", np.int32),
        ("rows", np.int64),
    ):
      self.assertEqual(getattr(draw, name).dtype, dtype, name)

  def test_a_draw_is_a_copy(self):
    buffer = make_buffer(capacity=1)
    buffer.insert(make_group(1, [[5]]), 0)
    draw = buffer.sample(1, 1, 0)
    buffer.insert(make_group(1, [[6]]), 0)
    self.assertEqual(draw.completion_tokens[0, 0, 0], 5)

  def test_empty_and_falling_step(self):
    buffer = make_buffer()
    with self.assertRaisesRegex(ValueError, "empty"):
      buffer.sample(1, 1, 0)
    buffer.insert(make_group(1, [[5]]), 3)
    buffer.sample(1, 1, 3)
    with self.assertRaisesRegex(ValueError, "step 2"):
      buffer.sample(1, 1, 2)


if __name__ == "__main__":
  absltest.main()
