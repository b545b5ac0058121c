# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""A searcher's reference gives what the trainer's gives."""

import logging
import types
from unittest import mock

from absl.testing import parameterized
import jax
import numpy as np
import pytest

from tba_jax.learning import batches
from tba_jax.learning import group_reference
from tba_jax.learning import packing
from tba_jax.policy import reference_policy
from tests.support import tiny_model

P, S, T = 3, 2, 5
STOP_ID = 1
TOKENIZER = types.SimpleNamespace(stop_ids=(STOP_ID,), stop_strings=())


def make_config(**changes):
  return tiny_model.make_config(
      sampling__temperature=0.7,
      sampling__max_prompt_tokens=P,
      sampling__max_completion_tokens=T,
      sampling__num_slots=2 * S,
      search__samples_per_prompt=S,
      search__prompts_per_round=8,
      **changes,
  )


def make_groups(count):
  """Returns prompts, tokens, lengths and masks.

  The first completion of each group stops; the second one's first token is an
  environment's.
  """
  rng = np.random.default_rng(0)
  prompts = [
      rng.integers(2, tiny_model.VOCAB, 1 + i % P).astype(np.int32)
      for i in range(count)
  ]
  tokens = rng.integers(2, tiny_model.VOCAB, (count, S, T)).astype(np.int32)
  lengths = rng.integers(2, T + 1, (count, S)).astype(np.int32)
  for group, ends in zip(tokens, lengths):
    group[0, ends[0] - 1] = STOP_ID
  masks = np.arange(T) < lengths[:, :, None]
  masks[:, 1, 0] = False
  return prompts, list(tokens), list(lengths), list(masks)


class GroupReferenceTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.model = tiny_model.make_model()
    self.params = tiny_model.init_params(self.model)

  def make(self, config):
    policy = types.SimpleNamespace(model=self.model, tokenizer=TOKENIZER)
    return group_reference.make_group_reference(
        config, policy, lambda: self.params, None
    )

  # Two prompts at a time: a part that is full, one that is not, several.
  # Passes are this short only here. Each two settings meet.
  @parameterized.parameters(
      (1, False, 512),
      (1, True, 1),
      (2, False, 512),
      (2, True, 1),
      (5, False, 1),
      (5, True, 512),
  )
  @pytest.mark.slow
  def test_equals_trainer_s_logprobs(
      self, count, include_stop_token, least_tokens
  ):
    self.enter_context(
        mock.patch.multiple(
            packing, _LEAST_TOKENS=least_tokens, _SHORT_LENGTH=8, _LENGTH=1
        )
    )
    top_k = 2 * (count == 2)  # With kept tokens, and without.
    config = make_config(
        reference__role="searcher",
        loss__include_stop_token=include_stop_token,
        sampling__top_k=top_k,
    )
    prompts, tokens, lengths, masks = make_groups(count)
    kept, others = [None] * count, {}
    if top_k:
      kept = [np.stack([x, (x + 1) % tiny_model.VOCAB], -1) for x in tokens]
      others["kept_BxKxTxC"] = np.stack(kept)
    ours = self.make(config)
    ours.warm_up()
    with jax.log_compiles(), self.assertNoLogs("jax", logging.WARNING):
      found = ours.start(prompts, tokens, lengths, masks, kept)()
    self.assertLen(found, count)
    whole = reference_policy.Reference(self.model, self.params, temperature=0.7)
    batch = batches.pad_sequences(
        [
            (prompt, [row[:n] for row, n in zip(group, ends)])
            for prompt, group, ends in zip(prompts, tokens, lengths)
        ],
        (count,),
        num_completions=S,
        max_prompt_tokens=P,
        max_completion_tokens=T,
    )
    mask = batches.completion_mask(
        batch.completion_tokens,
        np.stack(masks),
        None if include_stop_token else TOKENIZER,
    )
    expected = whole.logprobs(
        *(batch.prompt_tokens, batch.prompt_mask, batch.completion_tokens),
        mask,
        **others,
    )
    np.testing.assert_allclose(np.stack(found), expected, rtol=1e-5, atol=1e-6)
    self.assertTrue((np.stack(found)[mask > 0] < 0).all())
    self.assertTrue((np.stack(found)[mask == 0] == 0).all())
    self.assertTrue((np.stack(found)[~np.stack(masks)] == 0).all())

  def test_prompts_at_a_time_divide_over_the_mesh(self):
    config = make_config()
    self.assertEqual(group_reference.prompts_at_a_time(config), 2)
    config.search.mesh.data = 3
    self.assertEqual(group_reference.prompts_at_a_time(config), 3)
    config.sampling.num_slots = 100
    self.assertEqual(group_reference.prompts_at_a_time(config), 9)
    # Two passes over a round of 8, each of 4.
    config.search.mesh.data = 1
    config.sampling.num_slots = 6 * S
    self.assertEqual(group_reference.prompts_at_a_time(config), 4)
    config.sampling.num_slots = 1
    self.assertEqual(group_reference.prompts_at_a_time(config), 1)

  def test_passes_are_short_without_undrawable_groups(self):
    config = make_config(
        reference__role="searcher", replay__skip_equal_rewards=True
    )
    config.sampling.num_slots = 8 * S
    self.assertEqual(group_reference.prompts_at_a_time(config), 2)
    config.search.lockstep = True
    self.assertEqual(group_reference.prompts_at_a_time(config), 8)
