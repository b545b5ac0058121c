# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the replay buffer: inserts, eviction, draws, uses, saved state."""

import copy
import dataclasses
import json

from absl.testing import absltest
from absl.testing import parameterized
import chex
import numpy as np

from tba_jax.learning import host_state
from tba_jax.replay import buffer as buffer_lib
from tba_jax.replay import ledger
from tests.replay import invariants
from tests.transport.groups import fake_groups

Amount = ledger.Amount
make_group = fake_groups.make_group
distinct = fake_groups.distinct
make_buffer = fake_groups.make_buffer
first_tokens = fake_groups.first_tokens


class InsertTest(parameterized.TestCase):

  def test_completion_without_reward_is_not_stored(self):
    """Draws are those of a buffer that never got it."""
    nan, tokens = np.nan, [[5], [6], [7, 8], [5]]
    with_it, without = (
        make_buffer(skip_equal_rewards=True, columns={"turn_rewards": ()})
        for _ in range(2)
    )
    turns = np.full((4, 4), 0.5, np.float32)
    turns[3] = nan
    # A copy of the first completion could not be judged.
    group = make_group(1, tokens, rewards=[1, 0, 1, nan], turn_rewards=turns)
    self.assertEqual(with_it.insert(group, 0), (0, 1, 1))
    group = make_group(1, tokens[:3], rewards=[1, 0, 1], turn_rewards=turns[:3])
    self.assertEqual(without.insert(group, 0), (0, 0, 0))
    for buffer in (with_it, without):
      group = make_group(2, [[1], [2]], rewards=[1, 0], turn_rewards=turns[:2])
      buffer.insert(group, 0)
      invariants.check_buffer(buffer)
    for step in range(4):
      result, expected = (b.sample(2, 4, step) for b in (with_it, without))
      chex.assert_trees_all_equal(vars(result), vars(expected))
      self.assertTrue(np.isfinite(result.rewards).all())
      # All three, and one of them twice.
      (row,) = result.ids[result.prompt_ids == 1]
      self.assertLen(set(row.tolist()), 3)

  def test_group_without_reward_leaves_no_trace(self):
    buffer = make_buffer()
    before = buffer.get_state()
    group = make_group(1, [[5], [6, 7]], rewards=[np.nan] * 2)
    self.assertEqual(buffer.insert(group, 0), (1, 2, 3))
    chex.assert_trees_all_equal(buffer.get_state(), before)

  def test_fallback_is_stored_in_place_of_missing_reward(self):
    buffer = make_buffer(fallback=-2.0, columns={"turn_rewards": ()})
    turns = np.array([[1, 0, 0, 0], [0, 0, 0, np.nan]], np.float32)
    group = make_group(
        1, [[5], [6] * 4], rewards=[1, np.nan], turn_rewards=turns
    )
    buffer.insert(group, 0)
    draw = buffer.sample(1, 2, 0)
    self.assertEqual(draw.rewards.tolist(), [[1, -2]])
    self.assertEqual(
        draw.turn_rewards.tolist(), [[[1, 0, 0, 0], [0, 0, 0, -2]]]
    )
    # The group keeps the fact.
    self.assertTrue(np.isnan(group.rewards[1]))

  @parameterized.parameters(
      # Equal or not: the group as it came decides, not what is stored of it.
      ([[5], [6]], [1, 1], {}, True),
      ([[5], [6]], [1, 0], {}, False),
      ([[5], [5]], [0, 1], {}, False),  # One text, judged twice.
      ([[7], [5]], [0, 1], {"duplicates": "oldest"}, False),
      ([[5], [6], [8]], [1, 1, np.nan], {}, True),
      ([[5], [6]], [1, np.nan], {}, True),
  )
  def test_groups_of_equal_rewards_are_skipped(
      self, tokens, rewards, changes, skipped
  ):
    buffer = make_buffer(skip_equal_rewards=True, **changes)
    buffer.insert(make_group(1, [[7], [9]], rewards=[0, 1]), 0)
    buffer.insert(make_group(2, [[7], [9]], rewards=[0, 1]), 9)
    buffer.insert(make_group(1, tokens, rewards=rewards), 9)
    self.assertEqual(buffer.stats()["skipped_groups"], int(skipped))
    again = make_buffer(skip_equal_rewards=True, **changes)
    again.set_state(buffer.get_state())
    for made in (buffer, again):
      drawn = {int(made.sample(1, 1, 9).prompt_ids[0]) for _ in range(20)}
      self.assertEqual(drawn, {2} if skipped else {1, 2})

  def test_draws_from_mixed_group_with_one_stored_completion(self):
    buffer = make_buffer(skip_equal_rewards=True)
    buffer.insert(make_group(1, [[5], [6]], rewards=[1, 1]), 9)
    buffer.insert(make_group(1, [[7], [7]], rewards=[0, 1]), 9)
    for _ in range(20):
      self.assertEqual(first_tokens(buffer.sample(1, 1, 9)), {7})

  def test_reinserted_copy_is_fresh(self):
    buffer = make_buffer()
    buffer.insert(make_group(1, [[5]]), 0)
    old = buffer.sample(1, 1, 0).ids
    self.assertEqual(buffer.mark_drawn(old), (1, 1, 1))
    buffer.set_ref_logprobs(old, np.full((1, 1, 4), -1.0, np.float32), 0)
    result = buffer.insert(make_group(1, [[5]]), 1)
    self.assertEqual(result, (0, 0, 0))
    self.assertEqual(buffer.untrained(), (1, 1, 1))
    draw = buffer.sample(1, 1, 1)
    self.assertTrue(draw.fresh.all())
    self.assertEqual(draw.ref_versions.item(), -1)
    self.assertNotEqual(draw.ids.item(), old.item())

  def test_width_and_padding_do_not_matter(self):
    buffer = make_buffer()
    buffer.insert(make_group(1, [[5, 6]], width=2), 0)
    buffer.insert(make_group(1, [[5, 6]], width=9), 0)
    self.assertLen(buffer, 1)
    draw = buffer.sample(1, 1, 0)
    np.testing.assert_array_equal(draw.completion_tokens, [[[5, 6, 0, 0]]])
    np.testing.assert_array_equal(draw.behavior_logprobs, [[[-5, -6, 0, 0]]])

  def test_reused_row_keeps_nothing(self):
    buffer = make_buffer(capacity=1)
    buffer.insert(make_group(1, [[5, 6, 7, 8]]), 0)
    buffer.insert(make_group(1, [[9]], width=2), 0)
    invariants.check_buffer(buffer)
    draw = buffer.sample(1, 1, 0)
    np.testing.assert_array_equal(draw.completion_tokens, [[[9, 0, 0, 0]]])
    np.testing.assert_array_equal(draw.behavior_logprobs, [[[-9, 0, 0, 0]]])

  @parameterized.parameters(
      (dict(prompt_tokens=np.array([8, 8], np.int32)), 0, "other tokens"),
      (dict(), -1, "step -1"),
  )
  def test_refusals_change_nothing(self, fields, step, message):
    buffer = make_buffer()
    buffer.insert(make_group(1, [[9]]), 0)
    group = make_group(1, [[1]], **fields)
    before = repr(buffer.get_state())
    with self.assertRaisesRegex(ValueError, message):
      buffer.insert(group, step)
    self.assertEqual(repr(buffer.get_state()), before)
    invariants.check_buffer(buffer)


class StalenessTest(absltest.TestCase):

  def test_versions_abandoned_by_restart_are_stale(self):
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
    actual = buffer_lib.staleness(starts, epochs, versions, 42)
    self.assertEqual(actual.tolist(), expected.tolist())

  def test_draw_has_staleness_of_each_epoch(self):
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
    # Samples of the restarted trainer's own params are on-policy.
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

  def test_draws_groups_of_round_in_order(self):
    """Group 1 repeats its completion; the first group comes after the last."""
    draw = self.draw(0)
    self.assertEqual(
        draw.completion_tokens[..., 0].tolist(), [[0, 1], [10, 10]]
    )
    self.assertEqual(draw.prompt_ids.tolist(), [0, 1])
    self.assertEqual(
        self.draw(3, 5).completion_tokens[..., 0].tolist(), [[30, 31], [0, 1]]
    )
    invariants.check_buffer(self.buffer)

  def test_each_pass_of_round_draws_its_batches_again(self):
    config = fake_groups.buffer_config(dedupe=False)
    config.rounds.update(mini_batches=2, passes=2)
    rounds = buffer_lib.ReplayBuffer(
        config, reward_temperature=lambda step: 1.0
    )
    for i in range(4):
      rounds.insert(make_group(i, distinct(10 * i, 2)), 4)
    draws = [rounds.draw(2, 2, step).prompt_ids for step in (4, 5, 6, 7)]
    self.assertEqual([d.tolist() for d in draws], 2 * [[0, 1], [2, 3]])

  def test_redraw_takes_next_group_of_round(self):
    config = fake_groups.buffer_config(dedupe=False)
    config.rounds.update(mini_batches=2, passes=2)
    rounds = buffer_lib.ReplayBuffer(
        config, reward_temperature=lambda step: 1.0
    )
    for i in range(4):
      rounds.insert(make_group(i, distinct(10 * i, 2)), 4)

    def redraw(draw, left_out):
      is_left_out = lambda rows: np.isin(
          rounds.table.prompt_ids[rows], left_out
      )
      return rounds.redraw(draw, is_left_out, np.random.default_rng(0))

    for step, left_out, expected in (
        (4, [1], [0, 2]),
        (5, [3], [2, 0]),
        (6, [0, 2], [3, 1]),
        (7, [0, 1, 2], [3, 3]),
    ):
      redrawn = redraw(rounds.draw(2, 2, step), left_out)
      self.assertEqual(redrawn.prompt_ids.tolist(), expected)
    with self.assertRaises(buffer_lib.NothingLeftError):
      redraw(redrawn, [0, 1, 2, 3])

  def test_round_without_rewards_draws_what_is_stored(self):
    draw = self.buffer.sample_in_order(2, 2, 5, arrived_from=5, skip=0)
    self.assertEqual(
        draw.completion_tokens[..., 0].tolist(), [[90, 91], [0, 1]]
    )
    self.assertEqual(self.buffer.stats()["recent_misses"], 2)

  def test_refuses_empty_buffer_and_falling_step(self):
    with self.assertRaisesRegex(ValueError, "no completion received a reward"):
      make_buffer().sample_in_order(2, 2, 5, arrived_from=5, skip=0)
    self.draw(0, 5)
    with self.assertRaisesRegex(ValueError, "step 4 after step 5"):
      self.draw(0, 4)


class SampleTest(absltest.TestCase):

  def test_reward_temperature_is_of_step(self):
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

  def test_age_decays_a_stale_reward(self):
    """At step 9, a reward of 1 weighs e^(10 - 18) of a fresh 0."""
    for decay, expected in ((0.5, {2}), (0.0, {1})):
      buffer = make_buffer(
          recent_fraction=0.0,
          selection="reward",
          age_decay_steps=decay,
          reward_temperature=lambda step: 0.1,
      )
      for version, reward in ((0, 1.0), (9, 0.0)):
        group = make_group(1, [[1 + version // 9]], version=version)
        group.rewards[:] = reward
        buffer.insert(group, 9)
      draws = [tuple(first_tokens(buffer.sample(1, 1, 9))) for _ in range(40)]
      most = max(set(draws), key=draws.count)
      self.assertEqual(set(most), expected)

  def test_redraw_changes_only_slots_of_left_out_completions(self):
    buffer = make_buffer(dedupe=False)
    for prompt_id in range(6):
      buffer.insert(make_group(prompt_id, distinct(10 * prompt_id, 2)), 0)
    draw = buffer.sample(4, 2, 0)
    state = buffer.get_state()
    left_out = draw.prompt_ids[[1, 3]]
    redrawn = buffer.redraw(
        draw, self.of_prompts(buffer, left_out), np.random.default_rng(0)
    )
    chex.assert_trees_all_equal(buffer.get_state(), state)
    np.testing.assert_array_equal(redrawn.ids[[0, 2]], draw.ids[[0, 2]])
    # Prompts that were not drawn come first.
    undrawn = {*range(6)} - {*draw.prompt_ids.tolist()}
    self.assertEqual({*redrawn.prompt_ids[[1, 3]].tolist()}, undrawn)
    self.assertTrue(redrawn.recent.all())
    # Then prompts in the batch.
    left_out = [*left_out, *undrawn]
    redrawn = buffer.redraw(
        draw, self.of_prompts(buffer, left_out), np.random.default_rng(0)
    )
    self.assertContainsSubset(
        redrawn.prompt_ids.tolist(), draw.prompt_ids[[0, 2]].tolist()
    )
    with self.assertRaises(buffer_lib.NothingLeftError):
      buffer.redraw(
          draw, self.of_prompts(buffer, range(6)), np.random.default_rng(0)
      )

  def of_prompts(self, buffer, prompt_ids):
    return lambda rows: np.isin(buffer.table.prompt_ids[rows], [*prompt_ids])

  def test_redraw_keeps_prompt_with_other_completions(self):
    buffer = make_buffer(dedupe=False)
    buffer.insert(make_group(1, distinct(10, 2)), 0)
    buffer.insert(make_group(2, distinct(20, 2)), 0)
    buffer.insert(make_group(1, distinct(30, 2)), 1)
    buffer.insert(make_group(1, distinct(40, 2)), 1)
    draw = buffer.sample(1, 2, 1)
    is_left_out = lambda rows: np.isin(
        buffer.table.tokens("completion_tokens", rows)[:, 0], gone
    )
    gone = draw.completion_tokens[0, :1, 0]
    redrawn = buffer.redraw(draw, is_left_out, np.random.default_rng(0))
    self.assertEqual(redrawn.prompt_ids.tolist(), [1])
    self.assertContainsSubset(first_tokens(redrawn), {30, 31, 40, 41})
    # Without recent completions, the slot is a replay.
    gone = np.array([30, 31, 40, 41])
    prompts = set()
    for seed in range(20):
      redrawn = buffer.redraw(draw, is_left_out, np.random.default_rng(seed))
      self.assertFalse(redrawn.recent.any())
      prompts.update(redrawn.prompt_ids.tolist())
    self.assertEqual(prompts, {1, 2})

  def test_redraw_leaves_skipped_groups_out_of_recent_slots(self):
    buffer = make_buffer(dedupe=False, skip_equal_rewards=True)
    buffer.insert(make_group(1, distinct(10, 2), rewards=[0, 1]), 0)
    buffer.insert(make_group(1, distinct(20, 2), rewards=[1, 1]), 0)
    buffer.insert(make_group(2, distinct(30, 2), rewards=[0, 1]), 0)
    draw = buffer.sample(2, 2, 0)
    (slot,) = (draw.prompt_ids == 1).nonzero()[0]
    is_left_out = lambda rows: np.isin(
        buffer.table.tokens("completion_tokens", rows)[:, 0], [10, 11]
    )
    redrawn = buffer.redraw(draw, is_left_out, np.random.default_rng(0))
    self.assertEqual(redrawn.prompt_ids[slot], 2)

  def test_window_is_span_of_steps(self):
    buffer = make_buffer(recent_window_steps=2)
    for step in range(4):
      buffer.insert(make_group(1, [[10 + step]]), step)
    self.assertEqual(first_tokens(buffer.sample(1, 2, 3)), {12, 13})
    self.assertEqual(first_tokens(buffer.sample(1, 1, 4)), {13})
    draw = buffer.sample(1, 4, 5)
    self.assertFalse(draw.recent.any())
    self.assertEqual(first_tokens(draw), {10, 11, 12, 13})
    self.assertEqual(buffer.stats()["recent_misses"], 1)

  def test_groups_of_equal_rewards_are_not_recent_if_skipped(self):
    buffer = make_buffer(skip_equal_rewards=True)
    buffer.insert(make_group(1, [[1], [2]], rewards=[1, 1]), 0)
    draw = buffer.sample(1, 2, 0)  # There is nothing else.
    self.assertFalse(draw.recent.any())
    self.assertEqual(first_tokens(draw), {1, 2})
    buffer.insert(make_group(2, [[3], [4]], rewards=[0, 1]), 0)
    for _ in range(20):
      draw = buffer.sample(2, 2, 0)
      self.assertTrue(draw.recent.all())
      self.assertEqual(draw.prompt_ids.tolist(), [2, 2])
    self.assertEqual(buffer.stats()["skipped_groups"], 1)
    again = make_buffer(skip_equal_rewards=True)
    again.set_state(buffer.get_state())
    self.assertEqual(again.stats()["skipped_groups"], 1)
    # A prompt is recent by its later group.
    buffer.insert(make_group(1, [[5], [6]], rewards=[0, 1]), 1)
    self.assertIn(1, buffer.sample(2, 2, 1).prompt_ids)

  def test_groups_without_reference_logprobs_are_not_stored(self):
    buffer = make_buffer(skip_equal_rewards=True, columns={"ref_logprobs": ()})
    tokens = [[1], [2]]
    missing = np.full((2, 4), np.nan, np.float32)
    group = make_group(1, tokens, rewards=[1, 1], ref_logprobs=missing)
    gone = buffer.insert(group, 0)
    self.assertEqual((gone.prompts, gone.completions), (1, 2))
    self.assertEmpty(buffer)
    self.assertEqual(buffer.num_prompts, 0)
    self.assertEqual(buffer.stats()["skipped_groups"], 1)
    # If all are equal, they come with reference log-probs, and are drawn.
    whole = np.full((2, 4), -1, np.float32)
    buffer.insert(make_group(2, tokens, rewards=[1, 1], ref_logprobs=whole), 0)
    self.assertEqual(buffer.sample(1, 2, 0).prompt_ids.tolist(), [2])

  def test_groups_of_equal_rewards_are_left_out_of_their_prompt_s_draws(self):
    buffer = make_buffer(skip_equal_rewards=True)
    buffer.insert(make_group(1, [[1], [2]], rewards=[0, 1]), 0)
    buffer.insert(make_group(1, [[3], [4]], rewards=[1, 1]), 0)
    for _ in range(20):
      draw = buffer.sample(1, 2, 0)
      self.assertTrue(draw.recent.all())
      self.assertEqual(first_tokens(draw), {1, 2})
    # Fewer than a group has are filled up.
    self.assertEqual(first_tokens(buffer.sample(1, 4, 0)), {1, 2, 3, 4})

  def test_columns_have_their_values_and_dtypes(self):
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
        ("sampled_mask", np.bool_),
        ("stopped", np.bool_),
        ("behavior_logprobs", np.float32),
        ("ref_logprobs", np.float32),
        ("ref_versions", np.int32),
        ("rewards", np.float32),
        ("versions", np.int32),
        ("ids", np.int64),
    ):
      self.assertEqual(getattr(draw, name).dtype, dtype, name)

  def test_draw_is_copy(self):
    buffer = make_buffer(capacity=1)
    buffer.insert(make_group(1, [[5]]), 0)
    draw = buffer.sample(1, 1, 0)
    buffer.insert(make_group(1, [[6]]), 0)
    self.assertEqual(draw.completion_tokens[0, 0, 0], 5)

  def test_refuses_empty_buffer_and_falling_step(self):
    buffer = make_buffer()
    with self.assertRaisesRegex(ValueError, "nothing to train on"):
      buffer.sample(1, 1, 0)
    buffer.insert(make_group(1, [[5]]), 3)
    buffer.sample(1, 1, 3)
    with self.assertRaisesRegex(ValueError, "step 2"):
      buffer.sample(1, 1, 2)


def _embed(completions):
  # Completions whose first tokens share a ten are similar.
  return np.eye(10, dtype=np.float32)[[c[0] // 10 for c in completions]]


_EDIT = {"similarity": "edit", "similarity_limit": 0.3}
_COSINE = {"similarity": "cosine", "similarity_limit": 0.9, "embed": _embed}


def _buffer(**changes):
  return make_buffer(**{"recent_fraction": 0.0, **changes})


def _stored(buffer):
  """Returns {first token: reward} of all that is stored, after a check."""
  invariants.check_buffer(buffer)
  table = buffer.table
  rows = table.live_rows()
  return dict(
      zip(
          table.tokens("completion_tokens", rows)[:, 0].tolist(),
          table.rewards[rows].tolist(),
      )
  )


class DuplicatesTest(absltest.TestCase):

  def test_group_of_duplicates_is_not_stored(self):
    buffer = _buffer(duplicates="oldest", recent_fraction=1.0)
    buffer.insert(make_group(0, [[5], [6]]), 0)
    result = buffer.insert(make_group(0, [[5], [6]]), 3)
    self.assertEqual(result, Amount(1, 2, 2))
    self.assertEqual(buffer.untrained(), Amount(1, 2, 2))
    invariants.check_buffer(buffer)
    # Nothing of it is recent, so the draw is from all.
    self.assertFalse(buffer.sample(1, 2, 3).recent.any())


class SimilarityTest(parameterized.TestCase):

  @parameterized.named_parameters(("edit", _EDIT), ("cosine", _COSINE))
  def test_higher_reward_stays(self, settings):
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
    self.assertEqual(result, Amount(0, 2, 8))

  def test_one_may_replace_several(self):
    buffer = _buffer(**_EDIT)
    old = make_group(0, [[1, 2, 3, 4], [1, 7, 8, 9]], rewards=[1.0, 2.0])
    buffer.insert(old, 0)
    self.assertLen(buffer, 2)
    buffer.insert(make_group(0, [[1, 2, 8, 4]], rewards=[3.0]), 1)
    self.assertEqual(_stored(buffer), {1: 3.0})

  def test_log_reward_comparison_includes_reference(self):
    """log R is -8 + 1 / 0.1 of the first, -10 + 1.1 / 0.1 of the second."""
    likely = np.full((1, 4), -2.0, np.float32)
    for by, stays in (("reward", 2), ("log_reward", 1)):
      buffer = _buffer(
          similarity="edit", similarity_limit=0.3, similarity_by=by, beta=0.1
      )
      for token, reward, ref_logprobs in (
          (1, 1.0, likely),
          (2, 1.1, likely - 0.5),
      ):
        group = make_group(0, [[token, 3, 4, 5]], rewards=[reward], width=4)
        group = dataclasses.replace(group, ref_logprobs=ref_logprobs)
        buffer.insert(group, 0)
      self.assertEqual(list(_stored(buffer)), [stays])

  def test_stop_tokens_are_not_compared(self):
    buffer = _buffer(similarity="edit", similarity_limit=0.2)
    # Without the stop token 0 the two are equal; with it they are not similar.
    buffer.insert(make_group(0, [[5, 0]], rewards=[1.0]), 0)
    buffer.insert(make_group(0, [[5]], rewards=[2.0]), 0)
    self.assertEqual(_stored(buffer), {5: 2.0})
    self.assertLen(buffer, 1)

  @parameterized.named_parameters(("edit", _EDIT), ("cosine", _COSINE))
  def test_inserted_tokens_are_not_compared(self, settings):
    buffer = _buffer(**settings)
    make = lambda tokens, reward: make_group(
        0, [tokens], rewards=[reward], inserted=[(0, 0), (0, 2)]
    )
    # The policy sampled 11 and 12 in both.
    buffer.insert(make([31, 11, 32, 12], 1.0), 0)
    again = _buffer(**settings)
    again.set_state(buffer.get_state())
    for filled in (buffer, again):
      filled.insert(make([51, 11, 52, 12], 2.0), 1)
      self.assertEqual(_stored(filled), {51: 2.0})
      # What it sampled is not alike, though all else is.
      filled.insert(make([51, 61, 52, 62], 1.0), 2)
      self.assertLen(filled, 2)

  def test_last_token_after_stop_string_is_compared(self):
    buffer = _buffer(similarity="edit", similarity_limit=0.2)
    # One of two tokens differs: the completions are not similar.
    for step, last in enumerate((31, 51)):
      group = make_group(0, [[11, last]], stopped=np.ones(1, np.bool_))
      buffer.insert(group, step)
    self.assertLen(buffer, 2)

  def test_prompts_are_apart(self):
    buffer = _buffer(**_COSINE)
    buffer.insert(make_group(0, [[11]], rewards=[1.0]), 0)
    buffer.insert(make_group(1, [[12]], rewards=[0.0]), 0)
    self.assertLen(buffer, 2)

  @parameterized.named_parameters(("edit", _EDIT), ("cosine", _COSINE))
  def test_restored_buffer_compares_as_before(self, settings):
    buffer = _buffer(**settings)
    buffer.insert(make_group(0, [[11, 1, 2, 3], [21, 4, 5, 6]]), 0)
    again = _buffer(**settings)
    again.set_state(buffer.get_state())
    again.insert(make_group(0, [[12, 1, 2, 3]], rewards=[-1.0]), 1)
    self.assertEqual(_stored(again), _stored(buffer))
    again.insert(make_group(0, [[12, 1, 2, 3]], rewards=[5.0]), 2)
    self.assertEqual(_stored(again), {12: 5.0, 21: 1.0})


class EvictionTest(absltest.TestCase):

  def test_evicts_lowest_rewards_including_new(self):
    buffer = _buffer(capacity_per_prompt=3, evict="lowest_reward")
    group = make_group(0, [[1], [2], [3]], rewards=[5.0, 1.0, 3.0])
    buffer.insert(group, 0)
    result = buffer.insert(make_group(0, [[4], [5]], rewards=[4.0, 0.0]), 1)
    self.assertEqual(_stored(buffer), {1: 5.0, 3: 3.0, 4: 4.0})
    self.assertEqual(result, Amount(0, 2, 2))

  def test_evicts_from_all_prompts(self):
    buffer = _buffer(capacity=3, evict="lowest_reward")
    buffer.insert(make_group(0, [[1]], rewards=[0.0]), 0)
    buffer.insert(make_group(1, [[2], [3]], rewards=[2.0, 3.0]), 0)
    buffer.insert(make_group(2, [[4]], rewards=[1.0]), 1)
    self.assertEqual(_stored(buffer), {2: 2.0, 3: 3.0, 4: 1.0})
    self.assertEqual(buffer.num_prompts, 2)
    # Refused: the whole group leaves, and its prompt is not stored.
    result = buffer.insert(make_group(3, [[5]], rewards=[-1.0]), 2)
    self.assertEqual(result, Amount(1, 1, 1))
    self.assertEqual(buffer.num_prompts, 2)
    invariants.check_buffer(buffer)
    self.assertEqual(first_tokens(buffer.sample(2, 1, 2)) & {5},
                     set())  # fmt: skip

  def test_equal_rewards_go_oldest_first(self):
    buffer = _buffer(capacity_per_prompt=2, evict="lowest_reward")
    for token in range(4):
      buffer.insert(make_group(0, [[token + 1]], rewards=[1.0]), token)
    self.assertEqual(set(_stored(buffer)), {3, 4})

  def test_frozen_buffer_does_not_grow(self):
    buffer = _buffer(capacity_per_prompt=40, freeze_step=2)
    for step in range(5):
      group = make_group(0, distinct(2 * step + 1, 2))
      buffer.insert(group, step)
    self.assertEqual(set(_stored(buffer)), {7, 8, 9, 10})
    again = _buffer(capacity_per_prompt=40, freeze_step=2)
    again.set_state(buffer.get_state())
    again.insert(make_group(0, distinct(20, 2)), 6)
    self.assertEqual(set(_stored(again)), {9, 10, 20, 21})

  def test_random_groups_agree_with_plain_list(self):
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
      # Copies of stored completions are refused first.
      known = {first for _, first in plain.values()}
      for first, reward in zip(firsts.tolist(), rewards.tolist()):
        if first not in known and reward > plain.get(first // 10, (-1.0, 0))[0]:
          plain[first // 10] = (reward, first)
      self.assertEqual(_stored(buffer), {f: r for r, f in plain.values()})
      self.assertEqual(buffer.untrained(), before + (1, 4, 4) - result)
      draw = buffer.sample(2, 3, step)
      buffer.mark_drawn(draw.ids)


class UseTest(absltest.TestCase):

  def test_first_uses_and_counts(self):
    buffer = make_buffer(recent_window_steps=9)
    buffer.insert(make_group(1, [[1], [2, 2]]), 0)
    draw = buffer.sample(1, 6, 0)
    self.assertEqual(int(draw.fresh.sum()), len(np.unique(draw.ids)))
    self.assertEqual(draw.stats()["unique_share"], len(np.unique(draw.ids)) / 6)
    everything = buffer.sample(1, 2, 0).ids
    self.assertEqual(buffer.mark_drawn(everything), (1, 2, 3))
    self.assertEqual(buffer.mark_drawn(everything), (0, 0, 0))
    buffer.mark_drawn(np.repeat(everything.ravel()[:1], 3))
    self.assertFalse(buffer.sample(1, 2, 0).fresh.any())
    stats = buffer.stats()
    self.assertEqual(stats["use_count"], 3.5)
    self.assertEqual(stats["use_count_histogram"]["5"], 1)
    self.assertEqual(stats["use_count_histogram"]["2"], 1)
    invariants.check_buffer(buffer)

  def test_counts_statistics_of_draw(self):
    buffer = make_buffer(dedupe=False, recent_window_steps=9)
    buffer.insert(make_group(1, [[1], [2, 2], [1], [1, 0]]), 0)
    stats = buffer.sample(1, 4, 0).stats()
    self.assertEqual(stats["unique_completions"], 3)
    self.assertEqual(stats["completion_tokens"], 1.5)
    self.assertEqual(stats["stop_rate"], 0.25)

  def test_caches_reference_logprobs(self):
    buffer = make_buffer()
    buffer.insert(make_group(1, [[1, 2], [3]]), 0)
    draw = buffer.sample(1, 2, 0)
    values = -draw.completion_tokens.astype(np.float32) - 0.5
    self.assertEqual(buffer.set_ref_logprobs(draw.ids, values, 6), 2)
    again = buffer.sample(1, 2, 0)
    np.testing.assert_array_equal(again.ref_versions, [[6, 6]])
    past = np.arange(4) >= again.completion_lengths[..., None]
    expected = np.where(past, 0, -again.completion_tokens - 0.5)
    np.testing.assert_array_equal(again.ref_logprobs, expected)

  def test_stores_reference_logprobs_of_group(self):
    buffer = make_buffer()
    values = np.array([[-1, -2, 9, 9], [-3, 9, 9, 9]], np.float32)
    buffer.insert(make_group(1, [[1, 2], [3]], ref_logprobs=values), 0)
    buffer.insert(make_group(2, [[4], [5]]), 0)
    draws = [buffer.sample(1, 2, 0) for _ in range(2)]
    of_prompt = {int(draw.prompt_ids[0]): draw for draw in draws}
    result = dict(
        zip(
            of_prompt[1].completion_lengths[0].tolist(),
            of_prompt[1].ref_logprobs[0].tolist(),
        )
    )
    self.assertEqual(result, {2: [-1, -2, 0, 0], 1: [-3, 0, 0, 0]})
    self.assertEqual(of_prompt[1].ref_versions.tolist(), [[0, 0]])
    self.assertEqual(of_prompt[2].ref_versions.tolist(), [[-1, -1]])


class RoutesTest(absltest.TestCase):

  COLUMNS = {"routes": (2, 3), "prompt_routes": (2, 3)}

  def group(self, visit, completions):
    """A group whose routes are numbers of its visit and of its tokens."""
    group = make_group(1, completions)
    tokens = group.completion_tokens[..., None, None]
    P = len(group.prompt_tokens)
    return dataclasses.replace(
        group,
        visit=visit,
        routes=np.broadcast_to(tokens, (*tokens.shape[:2], 2, 3)).astype("u1"),
        prompt_routes=np.full((P, 2, 3), visit, np.uint8),
    )

  def test_draw_has_routes_and_those_of_newest_prompt(self):
    buffer = make_buffer(columns=self.COLUMNS)
    buffer.insert(self.group(5, [[1, 2], [3]]), 0)
    buffer.insert(self.group(6, [[4, 4, 0]]), 0)
    again = make_buffer(columns=self.COLUMNS)
    again.set_state(buffer.get_state())
    for filled in (buffer, again):
      draw = filled.sample(1, 3, 0)
      tokens = draw.completion_tokens[..., None, None]
      np.testing.assert_array_equal(
          draw.routes,
          np.broadcast_to(tokens, (1, 3, 4, 2, 3)).astype(np.uint8),
          strict=True,
      )
      expected = np.where(draw.prompt_mask > 0, 6, 0)[..., None, None]
      np.testing.assert_array_equal(
          draw.prompt_routes,
          np.broadcast_to(expected, (*expected.shape[:2], 2, 3)).astype("u1"),
          strict=True,
      )

  def test_draw_without_routes_has_none(self):
    buffer = make_buffer()
    buffer.insert(make_group(1, [[1]]), 0)
    self.assertIsNone(buffer.sample(1, 1, 0).routes)


class TemperatureTest(absltest.TestCase):

  def test_cached_reference_logprobs_are_of_one_temperature(self):
    config = fake_groups.buffer_config()
    buffer = make_buffer()
    buffer.insert(make_group(1, [[1, 2], [3]]), 0)
    ids = buffer.sample(1, 2, 0).ids
    values = np.full((1, 2, config.sampling.max_completion_tokens), -1.0)
    buffer.set_ref_logprobs(ids, values, 0)
    for temperature, version in ((config.sampling.temperature, 0), (0.5, -1)):
      config.sampling.temperature = temperature
      again = buffer_lib.ReplayBuffer(
          config, reward_temperature=lambda step: 1.0
      )
      again.set_state(buffer.get_state())
      draw = again.sample(1, 2, 0)
      self.assertEqual(set(draw.ref_versions.ravel().tolist()), {version})
      self.assertEqual(draw.ref_logprobs.any(), version == 0)


class TurnRewardsTest(absltest.TestCase):

  def test_draw_has_values_of_its_completions(self):
    buffer = make_buffer(columns={"turn_rewards": ()})
    group = make_group(1, [[1, 2], [3], [4, 4, 0]])
    values = group.completion_tokens / np.float32(8)
    buffer.insert(dataclasses.replace(group, turn_rewards=values), 0)
    again = make_buffer(columns={"turn_rewards": ()})
    again.set_state(buffer.get_state())
    for filled in (buffer, again):
      draw = filled.sample(1, 3, 0)
      expected = (draw.completion_tokens / 8).astype(np.float32)
      np.testing.assert_array_equal(draw.turn_rewards, expected, strict=True)
    self.assertIsNone(make_buffer().table.get_state().get("turn_rewards"))


class StateTest(parameterized.TestCase):

  def _filled(self, **changes) -> buffer_lib.ReplayBuffer:
    buffer = make_buffer(recent_fraction=0.5, capacity=12, **changes)
    for step in range(8):
      key = step * 3 % 5
      buffer.insert(make_group(key, distinct(step * 2, 3)), step)
      draw = buffer.sample(3, 2, step)
      buffer.mark_drawn(draw.ids)
      if step % 2:
        values = np.full((3, 2, 4), -step, np.float32)
        buffer.set_ref_logprobs(draw.ids, values, step)
    return buffer

  def test_state_stays_while_buffer_changes(self):
    # It is written to a checkpoint in the background.
    buffer = self._filled()
    state = buffer.get_state()
    before = copy.deepcopy(state)
    for step in range(8, 20):
      buffer.insert(make_group(step % 6, distinct(step, 4)), step)
      buffer.mark_drawn(buffer.sample(4, 3, step).ids)
    chex.assert_trees_all_equal(state, before)

  @parameterized.parameters("uniform", "reward")
  def test_continues_draw_for_draw(self, selection):
    buffer = self._filled(selection=selection)
    other = make_buffer(
        recent_fraction=0.5, capacity=12, selection=selection, seed=99
    )
    state = buffer.get_state()
    # Numbers outside of arrays survive JSON, whatever their size.
    packed = host_state.pack(state)
    json.loads(packed.structure)
    other.set_state(state)
    invariants.check_buffer(other)
    for step in range(8, 20):
      group = make_group(step % 6, distinct(step, 4))
      self.assertEqual(buffer.insert(group, step), other.insert(group, step))
      a, b = buffer.sample(4, 3, step), other.sample(4, 3, step)
      for name, value in vars(a).items():
        np.testing.assert_array_equal(value, getattr(b, name), err_msg=name)
      self.assertEqual(buffer.mark_drawn(a.ids), other.mark_drawn(b.ids))
      self.assertEqual(buffer.stats(), other.stats())
      invariants.check_buffer(other)

  def test_state_is_compact(self):
    buffer = make_buffer(capacity=40_000, capacity_per_prompt=40_000)
    for step in range(3):
      buffer.insert(make_group(1, distinct(10 * step, 5)), step)
    rows = buffer.get_state()["rows"]
    self.assertLen(rows["completion_tokens"], 15)
    self.assertLen(rows["ids"], 15)
    self.assertEmpty(rows["ref_logprobs"])

  def test_counts_and_steps(self):
    buffer, other = make_buffer(), make_buffer()
    buffer.insert(make_group(1, [[1]]), 4)
    buffer.sample(2, 1, 9)
    other.set_state(buffer.get_state())
    self.assertEqual(other.stats()["recent_misses"], 2)
    with self.assertRaisesRegex(ValueError, "step 3 after step 4"):
      other.insert(make_group(1, [[2]]), 3)
    with self.assertRaisesRegex(ValueError, "step 8 after step 9"):
      other.sample(1, 1, 8)

  def test_dedupe_turned_on_after_restart(self):
    buffer = make_buffer(dedupe=False, recent_window_steps=9)
    other = make_buffer(capacity=3, recent_window_steps=9)
    buffer.insert(make_group(1, [[1], [2], [1]]), 0)
    other.set_state(buffer.get_state())
    invariants.check_buffer(other)
    # The older of the two copies is evicted, the newer replaced.
    other.insert(make_group(1, [[3]]), 0)
    invariants.check_buffer(other)
    other.insert(make_group(1, [[1]]), 0)
    invariants.check_buffer(other)
    self.assertEqual(first_tokens(other.sample(1, 3, 0)), {1, 2, 3})

  def test_restores_empty_buffer(self):
    other = make_buffer()
    other.insert(make_group(1, [[1]]), 0)
    other.set_state(make_buffer().get_state())
    invariants.check_buffer(other)
    self.assertEmpty(other)

  def test_smaller_capacity_is_reached_with_next_insert(self):
    buffer = self._filled()
    other = make_buffer(capacity=4)
    untrained = buffer.untrained()
    other.set_state(buffer.get_state())
    result = other.insert(make_group(9, [[1]]), 8)
    self.assertLen(other, 4)
    self.assertEqual(untrained + (1, 1, 1) - result, other.untrained())
    invariants.check_buffer(other)

  def test_refuses_state_of_other_limits(self):
    state = self._filled().get_state()
    with self.assertRaisesRegex(ValueError, "max_prompt_tokens=1"):
      make_buffer(max_prompt_tokens=1).set_state(state)
    longer = make_buffer()
    longer.insert(make_group(1, [[1, 2, 3]]), 0)
    with self.assertRaisesRegex(ValueError, "max_completion_tokens=2"):
      make_buffer(max_completion_tokens=2).set_state(longer.get_state())
