# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sampling with layers that have a state or latents in place of a KV cache."""

from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np
import pytest

from tba_jax.sampling import decode
from tba_jax.sampling import requests as requests_lib
from tba_jax.sampling import sharing
from tba_jax.sampling import slots as slots_lib
from tests.support import sampler_case
from tests.support import scripted_turns
from tests.support import tiny_model


class StatesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.use(tiny_model.STATES)

  def use(self, shape):
    self.model = tiny_model.make_model(**shape)
    self.params = jax.tree.map(
        lambda x: 2 * x, tiny_model.init_params(self.model)
    )
    rng = np.random.default_rng(0)
    self.requests = [
        decode.Request(rng.integers(2, tiny_model.VOCAB, 1 + n), n, 0, count)
        for n, count in enumerate((4, 6, 1, 4, 9, 2))
    ]

  def make(self, **changes):
    settings = dict(
        max_prompt_tokens=6,
        max_completion_tokens=24,
        num_rows=16,
        prompt_buckets=2,
        stop_ids=(1, 2, 3),
    )
    return sampler_case.make(self.model, **(settings | changes))

  def check(self, sampler, found):
    """Log-probs agree with a forward pass over the whole completion."""
    count = 0
    for request, completions in zip(self.requests, found, strict=True):
      P = len(request.prompt_tokens)
      for k, length in enumerate(completions.lengths):
        tokens = np.concatenate(
            [request.prompt_tokens, completions.tokens[k, :length]]
        )
        tokens = np.pad(tokens, (0, 30 - len(tokens)))
        logprobs = sampler.token_logprobs(self.params, tokens[None])[0]
        mask = completions.sampled_mask[k, :length]
        np.testing.assert_allclose(
            np.asarray(logprobs)[P - 1 : P - 1 + length][mask],
            completions.logprobs[k, :length][mask],
            atol=2e-5,
        )
        count += 1
    self.assertEqual(count, sum(r.num_completions for r in self.requests))

  @parameterized.parameters(dict(parts=None), dict(parts=1))
  @pytest.mark.slow
  def test_rows_sharing_a_prompt_begin_with_its_state(self, parts):
    self.enter_context(mock.patch.object(sharing, "OWN_PROMPTS", ()))
    self.enter_context(
        mock.patch.object(slots_lib, "num_head_shards", lambda *_: parts)
    )
    sampler = self.make(most_rows_per_prompt=4)
    found = sampler.sample(self.params, self.requests, version=0)
    self.check(sampler, found)
    prompts, own, *_ = sampler.programs(self.params).abstract_state.cache
    self.assertLen(prompts["layers"][1]["v"], 4)
    self.assertEqual(own["layers"][0]["state"].shape, (16, 2, 4, 6))
    # Neither keys nor values, and one state a row.
    self.assertEqual(prompts["layers"][0], {})
    alone = [
        sampler.sample(self.params, [r], version=0)[0] for r in self.requests
    ]
    for one, other in zip(found, alone, strict=True):
      jax.tree.map(np.testing.assert_array_equal, vars(one), vars(other))

  @parameterized.parameters(
      dict(delay=0),
      dict(delay=50),
      dict(delay=3, num_waiting=20),
      dict(delay=3, longest=7, num_waiting=20),
      dict(delay=0, shape=tiny_model.LATENTS),
      dict(delay=3, longest=7, num_waiting=20, shape=tiny_model.LATENTS),
  )
  @pytest.mark.slow
  def test_turns_go_on_from_the_state_they_ended_in(
      self, delay, longest=2, shape=tiny_model.STATES, **changes
  ):
    self.use(shape)
    self.enter_context(mock.patch.object(requests_lib, "FEED_LENGTHS", (3, 5)))
    self.enter_context(mock.patch.object(requests_lib, "FEWEST_FED", 3))
    turns = scripted_turns.Scripted(delay, longest)
    sampler = self.make(has_turns=True, **changes)
    found = sampler.sample(self.params, self.requests, version=0, turns=turns)
    self.check(sampler, found)
    self.assertGreater(
        sum((~c.sampled_mask[k, :n]).sum()
            for c in found for k, n in enumerate(c.lengths)), 20
    )  # fmt: skip

  def test_stop_strings_within_turns_are_refused(self):
    with self.assertRaisesRegex(ValueError, "sampling.stop_strings=.*must be"):
      self.make(has_turns=True, stop_strings=("a",), text_fn=str)
    self.make(stop_strings=("a",), text_fn=str)


if __name__ == "__main__":
  absltest.main()
