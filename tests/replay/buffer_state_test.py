# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of uses of completions, and of what is saved and restored."""

import json

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from tba_jax.replay import buffer as buffer_lib
from tba_jax.training import checkpoint
from tests.replay import fake_groups

make_group = fake_groups.make_group
distinct = fake_groups.distinct
make_buffer = fake_groups.make_buffer
first_tokens = fake_groups.first_tokens


class UseTest(absltest.TestCase):

  def test_first_uses_and_counts(self):
    buffer = make_buffer(recent_window_steps=9)
    buffer.insert(make_group(1, [[1], [2, 2]]), 0)
    draw = buffer.sample(1, 6, 0)
    self.assertEqual(int(draw.fresh.sum()), len(np.unique(draw.rows)))
    self.assertEqual(
        draw.stats()["unique_share"], len(np.unique(draw.rows)) / 6
    )
    everything = buffer.sample(1, 2, 0).rows
    self.assertEqual(buffer.mark_trained(everything), (1, 2, 3))
    self.assertEqual(buffer.mark_trained(everything), (0, 0, 0))
    buffer.mark_trained(np.repeat(everything.ravel()[:1], 3))
    self.assertFalse(buffer.sample(1, 2, 0).fresh.any())
    stats = buffer.stats()
    self.assertEqual(stats["use_count"], 3.5)
    self.assertEqual(stats["use_count_histogram"]["5"], 1)
    self.assertEqual(stats["use_count_histogram"]["2"], 1)
    buffer.check_valid()

  def test_what_a_draw_tells_of_its_completions(self):
    buffer = make_buffer(dedupe=False, recent_window_steps=9)
    buffer.insert(make_group(1, [[1], [2, 2], [1], [1, 0]]), 0)
    stats = buffer.sample(1, 4, 0).stats()
    self.assertEqual(stats["unique_completions"], 3)
    self.assertEqual(stats["completion_tokens"], 1.5)
    self.assertEqual(stats["stop_rate"], 0.25)

  def test_evicted_meanwhile(self):
    buffer = make_buffer(capacity=1)
    buffer.insert(make_group(1, [[1]]), 0)
    rows = buffer.sample(1, 1, 0).rows
    result = buffer.insert(make_group(2, [[2]]), 0)
    self.assertEqual(result.left_untrained, (1, 1, 1))
    # It was counted as evicted, and the row's new tenant is another.
    self.assertEqual(buffer.mark_trained(rows), (0, 0, 0))
    self.assertEqual(
        buffer.set_ref_logprobs(rows, np.ones((1, 1, 4), np.float32), 0), 0
    )
    self.assertEqual(buffer.sample(1, 1, 0).ref_versions.item(), -1)
    self.assertEqual(buffer.untrained(), (1, 1, 1))

  def test_reference_logprobs(self):
    buffer = make_buffer()
    buffer.insert(make_group(1, [[1, 2], [3]]), 0)
    draw = buffer.sample(1, 2, 0)
    values = -draw.completion_tokens.astype(np.float32) - 0.5
    self.assertEqual(buffer.set_ref_logprobs(draw.rows, values, 6), 2)
    again = buffer.sample(1, 2, 0)
    np.testing.assert_array_equal(again.ref_versions, [[6, 6]])
    past = np.arange(4) >= again.completion_lengths[..., None]
    expected = np.where(past, 0, -again.completion_tokens - 0.5)
    np.testing.assert_array_equal(again.ref_logprobs, expected)


class StateTest(parameterized.TestCase):

  def _filled(self, **changes) -> buffer_lib.ReplayBuffer:
    buffer = make_buffer(recent_fraction=0.5, capacity=12, **changes)
    for step in range(8):
      key = step * 3 % 5
      buffer.insert(make_group(key, distinct(step * 2, 3)), step)
      draw = buffer.sample(3, 2, step)
      buffer.mark_trained(draw.rows)
      if step % 2:
        values = np.full((3, 2, 4), -step, np.float32)
        buffer.set_ref_logprobs(draw.rows, values, step)
    return buffer

  @parameterized.parameters("uniform", "reward")
  def test_goes_on_draw_for_draw(self, selection):
    buffer = self._filled(selection=selection)
    other = make_buffer(
        recent_fraction=0.5, capacity=12, selection=selection, seed=99
    )
    state = buffer.get_state()
    # Numbers outside of arrays survive JSON, whatever their size.
    packed = checkpoint.pack_host_state(state)
    json.loads(packed.structure)
    other.set_state(state)
    other.check_valid()
    for step in range(8, 20):
      group = make_group(step % 6, distinct(step, 4))
      self.assertEqual(buffer.insert(group, step), other.insert(group, step))
      a, b = buffer.sample(4, 3, step), other.sample(4, 3, step)
      for name, value in vars(a).items():
        np.testing.assert_array_equal(value, getattr(b, name), err_msg=name)
      self.assertEqual(buffer.mark_trained(a.rows), other.mark_trained(b.rows))
      self.assertEqual(buffer.stats(), other.stats())
      other.check_valid()

  def test_state_is_compact(self):
    buffer = make_buffer(capacity=40_000, capacity_per_prompt=40_000)
    for step in range(3):
      buffer.insert(make_group(1, distinct(10 * step, 5)), step)
    rows = buffer.get_state()["store"]["rows"]
    self.assertLen(rows["tokens"], 15)
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

  def test_dedupe_that_is_turned_on(self):
    buffer = make_buffer(dedupe=False, recent_window_steps=9)
    other = make_buffer(capacity=3, recent_window_steps=9)
    buffer.insert(make_group(1, [[1], [2], [1]]), 0)
    other.set_state(buffer.get_state())
    other.check_valid()
    # Of the two copies the older one is evicted, the newer one replaced.
    other.insert(make_group(1, [[3]]), 0)
    other.check_valid()
    other.insert(make_group(1, [[1]]), 0)
    other.check_valid()
    self.assertEqual(first_tokens(other.sample(1, 3, 0)), {1, 2, 3})

  def test_empty_buffer(self):
    other = make_buffer()
    other.insert(make_group(1, [[1]]), 0)
    other.set_state(make_buffer().get_state())
    other.check_valid()
    self.assertEmpty(other)

  def test_smaller_capacity_is_reached_with_the_next_insert(self):
    buffer = self._filled()
    other = make_buffer(capacity=4)
    untrained = buffer.untrained()
    other.set_state(buffer.get_state())
    result = other.insert(make_group(9, [[1]]), 8)
    self.assertLen(other, 4)
    self.assertEqual(
        untrained + result.inserted - result.left_untrained, other.untrained()
    )
    other.check_valid()

  def test_refusals(self):
    state = self._filled().get_state()
    with self.assertRaisesRegex(ValueError, "max_prompt_tokens=1"):
      make_buffer(max_prompt_tokens=1).set_state(state)
    longer = make_buffer()
    longer.insert(make_group(1, [[1, 2, 3]]), 0)
    with self.assertRaisesRegex(ValueError, "max_completion_tokens=2"):
      make_buffer(max_completion_tokens=2).set_state(longer.get_state())


if __name__ == "__main__":
  absltest.main()
