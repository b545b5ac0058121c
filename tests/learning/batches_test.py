# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Batches: masks, order, and reference log-probs computed once and cached."""

from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from tba_jax.learning import batches
from tba_jax.learning import device_work
from tba_jax.learning import learner
from tba_jax.mesh import cluster
from tests.support import base_config
from tests.support import fakes
from tests.transport.groups import fake_groups

_B, _K = 5, 2
_T = fake_groups.COMPLETION_TOKENS


class FakeReference:
  """A token's log-prob is -(last prompt token) - token / 10 - ref_params.

  counts: groups that rows of each call have.
  """

  def __init__(self):
    self.moves = False
    self.counts = []

  def version(self, step):
    return step // 4 * 4 if self.moves else 0

  def logprobs(
      self,
      prompt_tokens,
      prompt_mask,
      tokens,
      mask,
      shift=0.0,
      rows=None,
      kept=None,
  ):
    del kept
    is_here = np.ones(tokens.shape, bool)
    if rows is not None:
      is_here = np.asarray(rows.place_indices) < rows.token_indices.size
    self.counts.append(is_here.any(axis=(1, 2)).sum())
    last = np.asarray(prompt_tokens)[:, -1][:, None, None]
    values = -last - np.asarray(tokens) / 10 - shift
    return (values * np.asarray(mask) * is_here).astype(np.float32)


class LearnerTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.buffer = fake_groups.make_buffer()
    for i in range(_B):
      self.buffer.insert(
          fake_groups.make_group(i, [[20 + i, 0], [30 + i, 40, 41]], version=i),
          i,
      )
    self.reference = FakeReference()

  def make_maker(self, stop_ids=(), **changes):
    config = base_config.make(
        train__prompts_per_batch=_B,
        train__micro_batch_prompts=1,
        replay__recent_fraction=0.5,
        **changes,
    )
    self.state = mock.Mock(ref_params=0.0, learning_rate_scale=1.0)
    work = device_work.DeviceWork(
        config,
        state=self.state,
        train_step=None,
        reference=self.reference,
        merger=None,
        checkpointer=None,
        cluster=cluster.Cluster(),
    )
    tokenizer = mock.Mock(stop_ids=stop_ids, stop_strings=())
    return learner.Learner(config, tokenizer, self.buffer, work)

  def draw(self, num_prompts=_B, step=8):
    return self.buffer.sample(num_prompts, _K, step)

  def assert_right(self, batch, shift=0.0):
    """Every row has the reference's log-probs of its own tokens."""
    expected = FakeReference().logprobs(
        batch.prompt_tokens,
        batch.prompt_mask,
        batch.completion_tokens,
        batch.completion_mask,
        shift,
    )
    np.testing.assert_allclose(batch.ref_logprobs, expected, rtol=1e-6)

  def test_fields_belong_together(self):
    draw = self.draw()
    batch = self.make_maker().make(draw)
    by_tokens = {
        tuple(draw.completion_tokens[b, k]): (b, k)
        for b in range(_B)
        for k in range(_K)
    }
    for b in range(_B):
      for k in range(_K):
        i, j = by_tokens[tuple(np.asarray(batch.completion_tokens)[b, k])]
        np.testing.assert_array_equal(
            batch.prompt_tokens[b], draw.prompt_tokens[i]
        )
        np.testing.assert_array_equal(batch.prompt_mask[b], draw.prompt_mask[i])
        np.testing.assert_array_equal(
            batch.behavior_logprobs[b, k], draw.behavior_logprobs[i, j]
        )
        self.assertEqual(batch.rewards[b, k], draw.rewards[i, j])
        self.assertEqual(
            batch.staleness_steps[b, k], draw.staleness_steps[i, j]
        )
    self.assert_right(batch)

  def test_masks_cut_off_completions(self):
    """Of each group, the completion that begins with 20 to 29 has a stop."""
    for rule, cut_off in (("keep", 3), ("mask", 0)):
      batch = self.make_maker(loss__missing_stop=rule).make(self.draw())
      tokens = np.asarray(batch.completion_tokens)
      np.testing.assert_array_equal(
          np.asarray(batch.completion_mask).sum(axis=2),
          np.where(tokens[..., 0] < 30, 2, cut_off),
      )
      self.assertTrue(
          (np.asarray(batch.rewards)[tokens[..., 0] >= 30] == 1).all()
      )

  def test_computed_once_per_completion(self):
    maker = self.make_maker()
    maker.make(self.draw())
    maker.finish()
    draw = self.draw()
    self.assertTrue((draw.ref_versions == 0).all())
    batch = maker.make(draw)
    self.assertLen(self.reference.counts, 1)
    self.assert_right(batch)

  def test_only_the_missing_are_computed(self):
    maker = self.make_maker()
    maker.make(self.draw(3))
    maker.finish()
    self.reference.counts.clear()
    # The pool continues: two prompts lack log-probs, three have them.
    draw = self.draw()
    missing = (draw.ref_versions < 0).any(axis=1)
    self.assertEqual(missing.sum(), 2)
    batch = maker.make(draw)
    self.assertEqual(self.reference.counts, [2])
    self.assert_right(batch)
    # The others keep their own.
    maker.finish()
    self.reference.counts.clear()
    self.assert_right(maker.make(self.draw()))
    self.assertEmpty(self.reference.counts)

  def test_log_probs_of_another_reference_are_not_used(self):
    maker = self.make_maker()
    draw = self.draw()
    self.buffer.set_ref_logprobs(
        draw.ids, np.full((_B, _K, _T), 99, np.float32), 1
    )
    batch = maker.make(self.draw())
    self.assert_right(batch)
    self.assertLen(self.reference.counts, 1)
    maker.finish()
    self.assertTrue((self.draw().ref_versions == 0).all())

  def test_log_probs_of_before_a_move_are_not_used_after_it(self):
    """The draw of step 8 is made before the log-probs of step 7 are saved."""
    self.reference.moves = True
    maker = self.make_maker()
    self.state.ref_params = 0.5
    self.assert_right(maker.make(self.draw(step=7)), shift=0.5)
    self.state.ref_params = 0.25
    maker.finish()
    self.assertTrue((self.draw().ref_versions == 4).all())
    self.assert_right(maker.make(self.draw()), shift=0.25)
    maker.finish()
    self.assertTrue((self.draw().ref_versions == 8).all())
    self.assertLen(self.reference.counts, 2)
    # They are valid until the next move, and read from the buffer.
    self.assert_right(maker.make(self.draw(step=11)), shift=0.25)
    self.assertLen(self.reference.counts, 2)

  def test_one_stale_row_recomputes_its_prompt(self):
    maker = self.make_maker()
    maker.make(self.draw())
    maker.finish()
    draw = self.draw()
    self.buffer.set_ref_logprobs(
        draw.ids[0, :1], np.full((1, _T), 99, np.float32), 7
    )
    self.reference.counts.clear()
    batch = maker.make(self.draw())
    self.assertLen(self.reference.counts, 1)
    self.assert_right(batch)

  def test_nothing_is_saved_before_flush(self):
    maker = self.make_maker()
    maker.make(self.draw())
    self.assertTrue((self.draw().ref_versions < 0).all())
    maker.finish()
    draw = self.draw()
    self.assertTrue((draw.ref_versions == 0).all())
    expected = self.reference.logprobs(
        draw.prompt_tokens,
        draw.prompt_mask,
        draw.completion_tokens,
        draw.sampled_mask,
    )
    np.testing.assert_allclose(draw.ref_logprobs, expected, rtol=1e-6)
    # A second flush has nothing to save.
    with mock.patch.object(self.buffer, "set_ref_logprobs") as save:
      maker.finish()
    save.assert_not_called()

  @parameterized.parameters(True, False)
  def test_stop_tokens_count_by_config(self, counts):
    draw = self.draw()
    maker = self.make_maker(stop_ids={41}, loss__include_stop_token=counts)
    uncounted = draw.sampled_mask.sum() - np.sum(
        maker.make(draw).completion_mask
    )
    # One completion of each prompt ends with token 41.
    self.assertEqual(uncounted, 0 if counts else _B)


class CompletionMaskTest(absltest.TestCase):

  def test_stop_tokens_may_be_left_out(self):
    # Ended by a stop token, by the stop string "89", and cut off.
    tokens = np.array([[7, 8, 1, 0], [7, 8, 9, 0], [7, 8, 2, 8]])
    counted = np.array([[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1]])
    sampled = counted > 0
    mask = batches.completion_mask(tokens, sampled)
    np.testing.assert_array_equal(mask, counted)
    self.assertEqual(mask.dtype, np.float32)
    tokenizer = fakes.FakeTokenizer()
    counted[0, 2] = 0
    mask = batches.completion_mask(tokens, sampled, tokenizer)
    np.testing.assert_array_equal(mask, counted)
    tokenizer.stop_strings = ("89",)
    counted[1, 1:] = 0
    mask = batches.completion_mask(tokens, sampled, tokenizer)
    np.testing.assert_array_equal(mask, counted)
