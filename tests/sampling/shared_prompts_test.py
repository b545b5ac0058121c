# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows that share the KV cache of their prompt, as on accelerators."""

import dataclasses
from unittest import mock

from absl.testing import parameterized
import jax
import numpy as np
import pytest

from tba_jax.sampling import decode
from tba_jax.sampling import requests as requests_lib
from tba_jax.sampling import sharing
from tba_jax.sampling import slots as slots_lib
from tests.support import sampler_case
from tests.support import tiny_model

# Completions of each prompt: fewer than share it, as many, and more.
_LATENTS = dict(tiny_model.LATENTS, dense_layers=())
_COUNTS = (4, 6, 1, 4, 9, 2)


class SharedPromptsTest(parameterized.TestCase):

  def make(self, model, rows_per_prompt, parts=None, **changes):
    """Returns a sampler whose cache has the layout of a TPU, given `parts`."""
    changes = dict(max_prompt_tokens=6, max_completion_tokens=9) | changes
    sampler = sampler_case.make(
        model, num_rows=16, most_rows_per_prompt=rows_per_prompt, **changes
    )
    for patch in (
        mock.patch.object(sharing, "OWN_PROMPTS", ()),
        mock.patch.object(slots_lib, "num_head_shards", lambda *_: parts),
    ):
      patch.start()
      self.addCleanup(patch.stop)
    return sampler

  def make_requests(self):
    rng = np.random.default_rng(0)
    return [
        decode.Request(rng.integers(2, tiny_model.VOCAB, 1 + n), n, 0, count)
        for n, count in enumerate(_COUNTS)
    ]

  @parameterized.parameters(
      {},
      dict(parts=1),
      dict(parts=2, family="mistral", sliding_window=5),
      dict(recompute_cache=True),
      dict(family="gpt_oss", num_experts=4, experts_per_token=2),
      _LATENTS,
      dict(_LATENTS, parts=1, recompute_cache=True),
      tiny_model.SHARED,
      dict(tiny_model.SHARED, parts=1, recompute_cache=True),
  )
  @pytest.mark.slow
  def test_completions_are_those_of_rows_with_their_own_prompt(
      self, parts=None, recompute_cache=False, **shape
  ):
    model = tiny_model.make_model(**{"num_layers": 1, **shape})
    params = jax.tree.map(lambda x: 2 * x, tiny_model.init_params(model))
    newer = jax.tree.map(lambda x: 3 * x, tiny_model.init_params(model, 1))
    requests = self.make_requests()
    if recompute_cache:
      # All start at once, so that the newer params come at the same token.
      requests = [
          dataclasses.replace(r, num_completions=4) for r in requests[:4]
      ]
    found = {}
    for shared in (1, 4):
      sampler = self.make(model, shared, parts, recompute_cache=recompute_cache)
      versions = iter([None, (1, sampler.put(newer))])
      found[shared] = sampler.sample(
          sampler.put(params),
          requests,
          version=0,
          newer=(lambda v=versions: next(v, None)) if recompute_cache else None,
      )
      programs = sampler.programs(sampler.put(params))
      prompts, own, *_ = programs.abstract_state.cache
      self.assertLen(prompts["layers"][0]["v"], 16 // shared)
      self.assertLen(own["layers"][0]["v"], 16)
    for one, other in zip(found[1], found[4], strict=True):
      np.testing.assert_array_equal(one.tokens, other.tokens)
      np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)

  @parameterized.parameters(None, 1)
  def test_no_bit_depends_on_other_completions(self, parts):
    model = tiny_model.make_model(num_layers=1)
    params = jax.tree.map(lambda x: 2 * x, tiny_model.init_params(model))
    sampler = self.make(model, 4, parts)
    requests = self.make_requests()
    found = sampler.sample(params, requests, version=0)
    others = sampler.sample(params, requests[::-1], version=0)[::-1]
    alone = [sampler.sample(params, [r], version=0)[0] for r in requests]
    for one, *same in zip(found, others, alone, strict=True):
      for other in same:
        jax.tree.map(np.testing.assert_array_equal, vars(one), vars(other))

  def test_prompt_takes_only_entirely_free_rows(self):
    settings = sampler_case.make_settings(num_rows=6)
    requests = self.make_requests()[:3]
    slots = requests_lib.Slots(dict(enumerate(requests)), settings, 3)
    slots.enqueue(range(3))
    refill = lambda: slots.refill({0: 0, 1: 1, 2: 2})[0].tolist()
    # Four of the first, three together and one with two idle rows.
    self.assertEqual(refill(), [0, 0, 0, 0, -1, -1])
    self.assertFalse(slots.can_refill)
    slots.release([0, 1])
    self.assertFalse(slots.can_refill)
    slots.release([2])
    self.assertTrue(slots.can_refill)
    self.assertEqual(refill(), [1, 1, 1, -1, -1, -1])
    self.assertEqual(slots.owners[3], (0, 3))
