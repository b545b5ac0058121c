# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The sampler with scripted logits: frequencies, ends, refills, wrong input."""

import itertools

from absl.testing import parameterized
import jax
import numpy as np
import pytest

from tba_jax.sampling import decode
from tests.support import fakes
from tests.support import sampler_case


def _counting(model):
  """Wraps prefill, so that each call on the device is counted."""
  calls = []
  prefill = model.prefill

  def counted(params, tokens, mask):
    jax.debug.callback(lambda mask: calls.append(np.asarray(mask)), mask)
    return prefill(params, tokens, mask)

  model.prefill = counted
  return calls


class ScriptedDecodeTest(parameterized.TestCase):

  @parameterized.parameters(
      ({"temperature": 1.0},), ({"temperature": 0.6, "top_k": 2},)
  )
  @pytest.mark.slow
  def test_frequencies_are_those_of_the_enumerated_model(self, settings):
    V, T, prompt = 3, 3, [2, 0]
    model = fakes.FakeModel(V, 8)
    params = jax.tree.map(lambda x: 0.5 * x, model.init(jax.random.key(1)))
    sampler = sampler_case.make(
        model, max_completion_tokens=T, num_rows=512, seed=11, **settings
    )
    num_samples = 4096
    request = decode.Request(np.array(prompt), 0, 0, num_samples)
    found = sampler.sample(params, [request], version=0)[0]
    counts = {}
    for tokens, length in zip(found.tokens, found.lengths):
      key = tuple(tokens[:length].tolist())
      counts[key] = counts.get(key, 0) + 1
    expected = {}
    for completion in itertools.product(range(V), repeat=T):
      logprob, tokens = 0.0, list(prompt)
      for position, token in enumerate(completion):
        step_V = fakes.next_logprobs(params, tokens, settings["temperature"])
        if settings.get("top_k"):
          step_V[step_V < np.sort(step_V)[-settings["top_k"]]] = -np.inf
          step_V -= np.log(np.exp(step_V).sum())
        logprob += step_V[token]
        tokens.append(token)
        if token == 1:
          completion = completion[: position + 1]
          break
      # Continuations of a stopped completion are one and the same.
      expected[completion] = num_samples * np.exp(logprob)
    possible = {c: e for c, e in expected.items() if e > 0}
    self.assertAlmostEqual(sum(possible.values()), num_samples, delta=1e-2)
    self.assertEqual(set(counts) - set(possible), set())
    chi_square = sum(
        (counts.get(c, 0) - e) ** 2 / e for c, e in possible.items()
    )
    # Mean n, variance 2 n: five standard deviations above the mean.
    n = len(possible) - 1
    self.assertLess(chi_square, n + 5 * np.sqrt(2 * n))

  def test_logprobs_follow_the_whole_history(self):
    model = fakes.FakeModel(7, 8)
    params = model.init(jax.random.key(0))
    requests = [
        decode.Request(np.array(tokens), index, 0, 5)
        for index, tokens in enumerate([[2], [3, 4, 5], [6, 2], [5, 5, 5]])
    ]
    found = sampler_case.make(model).sample(params, requests, version=0)
    for request, completions in zip(requests, found):
      for tokens, length, logprobs in zip(
          completions.tokens, completions.lengths, completions.logprobs
      ):
        seen = list(request.prompt_tokens)
        for token, logprob in zip(tokens[:length], logprobs):
          expected_V = fakes.next_logprobs(params, seen, 1.0)
          self.assertAlmostEqual(logprob, expected_V[token], places=4)
          seen.append(token)

  @pytest.mark.slow
  def test_ends(self):
    model = fakes.FakeModel(4, 8)
    params = model.init(jax.random.key(0))
    zero = jax.tree.map(np.zeros_like, params)
    table = np.zeros((8, 4, 4), np.float32)
    # Token 2 is certain after a prompt of one 2, and 1 after the second 2.
    table[0, 2, 2] = table[1, 2, 1] = table[2, 3, 3] = 1e3
    table[1, 2, 1] = 3e3
    params = {"table": table, "bias": zero["bias"]}
    sampler = sampler_case.make(model)
    request = decode.Request(np.array([2]), 0, 0, 3)
    found = sampler.sample(params, [request], version=0)[0]
    np.testing.assert_array_equal(found.tokens, [[2, 1, 0, 0]] * 3)
    np.testing.assert_array_equal(found.lengths, [2] * 3)
    self.assertTrue(found.stopped.all())
    always = {"table": 0 * table, "bias": np.array([0, 0, 0, 1e3], np.float32)}
    found = sampler.sample(always, [request], version=0)[0]
    np.testing.assert_array_equal(found.tokens, [[3] * 4] * 3)
    np.testing.assert_array_equal(found.lengths, [4] * 3)
    self.assertFalse(found.stopped.any())
    # A stop token as the last that fits still stops.
    first = {"table": 0 * table, "bias": np.array([0, 1e3, 0, 0], np.float32)}
    short = sampler_case.make(model, max_completion_tokens=1)
    found = short.sample(first, [request], version=0)[0]
    np.testing.assert_array_equal(found.tokens, [[1]] * 3)
    self.assertTrue(found.stopped.all())
    # Any of several.
    others = sampler_case.make(model, stop_ids=[1, 3, 2])
    for params, token in ((always, 3), (first, 1)):
      found = others.sample(params, [request], version=0)[0]
      np.testing.assert_array_equal(found.tokens, [[token, 0, 0, 0]] * 3)
      self.assertTrue(found.stopped.all())
    # Without a stop token nothing stops.
    endless = sampler_case.make(model, stop_ids=())
    found = endless.sample(first, [request], version=0)[0]
    np.testing.assert_array_equal(found.tokens, [[1] * 4] * 3)
    self.assertFalse(found.stopped.any())

  @pytest.mark.slow
  def test_each_prompt_is_prefilled_once(self):
    model = fakes.FakeModel(7, 8)
    params = model.init(jax.random.key(0))
    calls = _counting(model)
    sampler = sampler_case.make(model, num_rows=32)  # Two prompts a prefill.
    lengths = [1, 2, 3, 2, 1]
    requests = [
        # 21 completions of 32 rows: prompts straddle refills.
        decode.Request(np.full(length, 2), index, 0, 21)
        for index, length in enumerate(lengths)
    ]
    sampler.sample(params, requests, version=0)
    jax.effects_barrier()
    self.assertLen(calls, 3)
    filled = [int(row.sum()) for mask in calls for row in mask]
    self.assertEqual(filled, lengths + [0])

  def test_results_keep_the_order_of_requests(self):
    model = fakes.FakeModel(9, 8)
    # A prompt is followed by its own token, for ever.
    table = np.zeros((8, 9, 9), np.float32)
    table[0] = 1e3 * np.eye(9)
    params = {"table": table, "bias": np.zeros(9, np.float32)}
    order = [5, 2, 8, 3, 7, 2, 6]
    requests = [
        decode.Request(np.array([token]), index, 0, 1 + index)
        for index, token in enumerate(order)
    ]
    found = sampler_case.make(model, num_rows=3).sample(
        params, requests, version=0
    )
    for index, (token, completions) in enumerate(zip(order, found)):
      np.testing.assert_array_equal(
          completions.tokens, np.full((1 + index, 4), token)
      )

  def test_samples_nothing_without_requests(self):
    model = fakes.FakeModel(4, 8)
    params = model.init(jax.random.key(0))
    self.assertEqual(sampler_case.make(model).sample(params, [], version=0), [])

  @parameterized.parameters(
      (dict(prompt_tokens=np.array([2] * 4)), r"max_prompt_tokens=3"),
      (dict(prompt_tokens=np.array([], int)), r"must be 1 to"),
      (dict(prompt_tokens=np.array([[2]])), r"shape \(1, 1\)"),
      (dict(prompt_tokens=np.array([2.0])), r"must be integers"),
      (dict(prompt_tokens=np.array([2, 4])), r"from 0 to 3"),
      (dict(prompt_tokens=np.array([-1])), r"from 0 to 3"),
      (dict(num_completions=0), r"num_completions=0: must be 1"),
      (dict(visit=-1), r"visit=-1"),
      (dict(first_sample=2**32), r"first_sample=4294967296|last sample"),
      (
          dict(first_sample=2**32 - 1, num_completions=2),
          r"last sample=4294967296",
      ),
  )
  def test_a_wrong_request_is_named(self, fields, message):
    model = fakes.FakeModel(4, 8)
    request = dict(
        prompt_tokens=np.array([2]), prompt_id=71, visit=0, num_completions=1
    )
    right = decode.Request(**{**request, "prompt_id": 70})
    wrong = decode.Request(**{**request, **fields})
    with self.assertRaisesRegex(ValueError, f"prompt 71: .*{message}"):
      sampler_case.make(model).sample({}, [right, wrong], version=0)

  def test_a_model_with_too_few_positions_is_refused(self):
    with self.assertRaisesRegex(ValueError, r"model\.max_positions=8 together"):
      sampler_case.make(fakes.FakeModel(4, 8), max_prompt_tokens=5)
