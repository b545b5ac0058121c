# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Routes of sampled tokens, from the sampler to the trainer's log-probs."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np
import pytest

from tba_jax import types
from tba_jax.learning import packing
from tba_jax.losses import logprobs
from tba_jax.losses import loss_metrics
from tba_jax.sampling import decode
from tests.support import sampler_case
from tests.support import tiny_model

P, T, K, N, A, E = 6, 24, 8, 4, 2, 16
PROMPTS = ((5, 7, 2), (3,), (9, 4, 8, 6, 2, 7), (2, 11))
make_model = functools.partial(
    tiny_model.make_model, family="qwen3_moe", num_experts=E,
    experts_per_token=A, num_layers=N,
)  # fmt: skip


def sample(compute_dtype, params, **changes):
  """Returns the completions of `PROMPTS`."""
  settings = dict(
      max_prompt_tokens=P, max_completion_tokens=T, num_rows=16,
      has_routes=True, stop_ids=(1,),
  ) | changes  # fmt: skip
  sampler = sampler_case.make(
      make_model(compute_dtype=compute_dtype), **settings
  )
  requests = [
      decode.Request(np.array(ids, np.int32), i, 0, num_completions=K)
      for i, ids in enumerate(PROMPTS)
  ]
  return sampler.sample(params, requests, version=0)


def make_inputs(completions):
  """Returns prompts with their mask, completions, and routes."""
  B = len(PROMPTS)
  tokens, mask = np.zeros((B, P), np.int32), np.zeros((B, P), np.float32)
  prompts = np.zeros((B, P, N, A), np.uint8)
  for b, ids in enumerate(PROMPTS):
    tokens[b, P - len(ids) :], mask[b, P - len(ids) :] = ids, 1
    prompts[b, P - len(ids) :] = completions[b].prompt_routes
  routes = types.Routes(prompts, np.stack([c.routes for c in completions]))
  return (tokens, mask, np.stack([c.tokens for c in completions])), routes


@pytest.mark.slow
class RoutesTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.model = make_model()
    cls.params = tiny_model.init_params(cls.model)
    cls.coarse = sample("bfloat16", cls.params)
    cls.logprobs = staticmethod(
        jax.jit(
            functools.partial(
                logprobs.completion_logprobs, cls.model, temperature=1.0
            )
        )
    )

  def gaps(self, completions, with_routes, rows=None):
    """Returns |log-prob of the trainer - of the sampler| of sampled tokens."""
    inputs, routes = make_inputs(completions)
    logprobs_BxKxT = self.logprobs(
        self.params,
        *inputs,
        rows=rows,
        routes=routes if with_routes else None,
    )
    sampled = np.stack([c.sampled_mask for c in completions])
    behavior = np.stack([c.logprobs for c in completions])
    return np.abs(np.asarray(logprobs_BxKxT) - behavior)[sampled]

  def test_logprobs_of_another_dtype_agree_with_routes_alone(self):
    without, with_them = (self.gaps(self.coarse, r) for r in (False, True))
    self.assertLess(with_them.max(), 0.1)
    self.assertGreater(without.max(), 0.3)

  def test_routes_are_the_trainers_own_choice_in_its_dtype(self):
    completions = sample("float32", self.params)
    inputs, routes = make_inputs(completions)
    _, chosen = jax.jit(self.model.stream_and_routes)(self.params, *inputs)
    first = np.asarray(chosen)[:, :, 0]
    np.testing.assert_array_equal(
        first, np.broadcast_to(routes.prompts[:, None, -1], first.shape)
    )
    for b, c in enumerate(completions):
      for k, length in enumerate(c.lengths):
        own, recorded = chosen[b, k, 1:length], c.routes[k, : length - 1]
        np.testing.assert_array_equal(own, recorded)
        self.assertFalse(c.routes[k, length - 1 :].any())
    self.assertGreater(len(np.unique(routes.completions)), 2)
    self.assertLess(self.gaps(completions, True).max(), 1e-4)

  # Bytes do not hold the numbers of 300 experts.
  @parameterized.parameters((E, np.uint8), (300, np.uint16))
  def test_layers_without_experts_have_no_routes(self, num_experts, dtype):
    model = tiny_model.make_model(
        **dict(
            tiny_model.SPARSE,
            num_experts=num_experts,
            num_layers=4,
            delta_layers=(True, False) * 2,
            dense_layers=(True, False) * 2,
        )
    )
    params = tiny_model.init_params(model)
    sampler = sampler_case.make(
        model, max_prompt_tokens=P, max_completion_tokens=T, num_rows=16,
        has_routes=True, stop_ids=(1,),
    )  # fmt: skip
    prompt = decode.Request(np.array(PROMPTS[0], np.int32), 0, 0, K)
    (found,) = sampler.sample(params, [prompt], version=0)
    recorded = found.routes.view(dtype)
    self.assertEqual(recorded.shape[2:], (2, A))
    self.assertEqual(recorded.max() > 255, num_experts > 256)
    tokens, length = np.zeros((1, P), np.int32), len(PROMPTS[0])
    tokens[0, P - length :] = PROMPTS[0]
    mask = (np.arange(P) >= P - length).astype(np.float32)[None]
    stream = jax.jit(model.stream_and_routes)
    inputs = params, tokens, mask, found.tokens[None]
    _, chosen = stream(*inputs)
    for k, length in enumerate(found.lengths):
      np.testing.assert_array_equal(
          chosen[0, k, 1:length], recorded[k, : length - 1]
      )
    # Others give another stream, each in its layer.
    prompts = np.zeros((1, P, 2, A), dtype) + np.arange(A, dtype=dtype)
    others = (recorded[None] + 1) % dtype(num_experts)
    routes = types.Routes(prompts.view(np.uint8), others.view(np.uint8))
    _, given = stream(*inputs, routes=routes)
    for k, length in enumerate(found.lengths):
      np.testing.assert_array_equal(
          given[0, k, 1:length], others[0, k, : length - 1]
      )

  @parameterized.parameters(
      dict(num_rows=4),
      dict(chunk_steps=5, prompt_buckets=2),
      dict(num_rows=16, most_rows_per_prompt=K),
  )
  def test_routes_depend_on_no_other_row(self, **changes):
    for a, b in zip(sample("bfloat16", self.params, **changes), self.coarse):
      np.testing.assert_array_equal(a.tokens, b.tokens)
      np.testing.assert_array_equal(a.routes, b.routes)
      np.testing.assert_array_equal(a.prompt_routes, b.prompt_routes)

  def test_packed_rows_have_the_routes_of_their_completions(self):
    (tokens, prompt_mask, completions), _ = make_inputs(self.coarse)
    mask = np.stack([c.sampled_mask for c in self.coarse]).astype(np.float32)
    whole = self.gaps(self.coarse, True)
    B, T = len(PROMPTS), completions.shape[2]
    for micro_prompts in (1, B):
      shapes = packing.Packing((B, K, tokens.shape[1], T), micro_prompts)
      rows = packing.pack(shapes, prompt_mask, completions, mask)
      found = self.gaps(self.coarse, True, rows)
      np.testing.assert_allclose(found, whole, atol=1e-5)


class ExpertTotalsTest(absltest.TestCase):

  def test_load_is_of_the_busiest_expert_and_none_is_of_those_left_out(self):
    # Layer 0: experts 0, 0, 1; layer 1: all 2. The last token is not counted.
    routes = np.array([[0, 2], [0, 2], [1, 2], [3, 3]], np.uint8)
    mask = np.array([1, 1, 1, 0], np.float32)
    totals = loss_metrics.expert_totals(
        routes.reshape(1, 2, 2, 2, 1), mask.reshape(1, 2, 2), 4
    )
    twice = jax.tree.map(lambda x: 2 * x, totals)  # Sum of two micro-batches.
    for found in (loss_metrics.finish(totals), loss_metrics.finish(twice)):
      self.assertAlmostEqual(float(found.pop("expert_load_max")), 4.0)
      # Experts 2 and 3 of layer 0, and 0, 1 and 3 of layer 1, of all 8.
      self.assertAlmostEqual(float(found.pop("expert_idle_share")), 5 / 8)
      self.assertEqual(found, {})
