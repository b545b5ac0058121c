# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The sampler with the real model: log-probs, independence, compilations."""

import dataclasses
import functools
import logging
import pathlib
from unittest import mock

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax import types
from tba_jax.losses import logprobs as logprobs_lib
from tba_jax.sampling import decode
from tba_jax.sampling import logits as logits_lib
from tba_jax.sampling import samplers
from tba_jax.sampling import slots as slots_lib
from tests.support import sampler_case
from tests.support import tiny_model

_P, _T, _EOS, _PAD = 5, 7, 1, 0
# Completions of a prompt.
_MOST = 6
_VERSION = 4


_sampler = functools.partial(
    sampler_case.make,
    max_prompt_tokens=_P,
    max_completion_tokens=_T,
    chunk_steps=3,
    seed=3,
)


def _requests(num_prompts: int, seed: int = 0) -> list[decode.Request]:
  """Returns prompts of all lengths with 1 to `_MOST` completions each."""
  rng = np.random.default_rng(seed)
  return [
      decode.Request(
          prompt_tokens=rng.integers(2, tiny_model.VOCAB, 1 + index % _P),
          prompt_id=100 + index,
          visit=index % 2,
          num_completions=1 + (3 * index) % _MOST,
          first_sample=index % 3,
      )
      for index in range(num_prompts)
  ]


def _forward_logits(forward, params, request, tokens_SxT) -> jax.Array:
  """Returns logits [S, T, V] of completions by one full forward pass."""
  length = len(request.prompt_tokens)
  # Padded, so that one compilation is enough.
  completions = np.full((1, _MOST, _T), _PAD, np.int32)
  completions[0, : len(tokens_SxT)] = tokens_SxT
  tokens_1xP = np.full((1, _P), _PAD, np.int32)
  mask_1xP = np.zeros((1, _P), np.float32)
  tokens_1xP[0, -length:] = request.prompt_tokens
  mask_1xP[0, -length:] = 1
  logits = forward(params, tokens_1xP, mask_1xP, completions)
  return logits[0, : len(tokens_SxT)]


class DecodeTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.model = tiny_model.make_model()
    # Larger than at init, so that distributions are far from uniform.
    cls.params = jax.tree.map(
        lambda x: 2.0 * x, tiny_model.init_params(cls.model)
    )
    cls.forward = staticmethod(jax.jit(cls.model.completion_logits))
    cls.requests = _requests(9)
    cls.sampler = _sampler(cls.model)
    cls.found = cls.sampler.sample(cls.params, cls.requests, version=_VERSION)

  def assert_same(
      self,
      found: list[types.Completions],
      expected: list[types.Completions],
      *,
      bits: bool = True,
  ):
    self.assertEqual(len(found), len(expected))
    for one, other in zip(found, expected):
      np.testing.assert_array_equal(one.tokens, other.tokens)
      np.testing.assert_array_equal(one.lengths, other.lengths)
      np.testing.assert_array_equal(one.stopped, other.stopped)
      if bits:
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
      else:
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)

  def test_completions_have_their_form(self):
    # More completions than rows, so rows were refilled; all endings occurred.
    self.assertGreater(sum(r.num_completions for r in self.requests), 16)
    stopped = np.concatenate([f.stopped for f in self.found])
    lengths = np.concatenate([f.lengths for f in self.found])
    self.assertGreater(len(set(lengths.tolist())), 3)
    self.assertTrue(stopped.any() and not stopped.all())
    for request, found in zip(self.requests, self.found):
      S = request.num_completions
      self.assertEqual(found.tokens.shape, (S, _T))
      self.assertEqual(found.logprobs.shape, (S, _T))
      self.assertEqual(found.tokens.dtype, np.int32)
      self.assertEqual(found.logprobs.dtype, np.float32)
      np.testing.assert_array_equal(found.versions, [_VERSION] * S)
      np.testing.assert_array_equal(
          found.sampled_mask,
          np.arange(_T) < found.lengths[:, None],
          strict=True,
      )
      for tokens, length, logprobs, stopped in zip(
          found.tokens, found.lengths, found.logprobs, found.stopped
      ):
        # The stop token is the last counted one, and stands nowhere else.
        self.assertNotIn(_EOS, tokens[: length - 1])
        self.assertEqual(stopped, tokens[length - 1] == _EOS)
        self.assertTrue(stopped or length == _T)
        np.testing.assert_array_equal(tokens[length:], _PAD)
        np.testing.assert_array_equal(logprobs[length:], 0.0)

  @parameterized.parameters(
      ({},),
      ({"temperature": 0.7},),
      ({"temperature": 1.3, "top_k": 4},),
      ({"temperature": 1.1, "top_k": 9, "top_p": 0.8},),
  )
  @pytest.mark.slow
  def test_logprobs_are_those_of_a_full_forward(self, settings):
    sampler = _sampler(self.model, **settings)
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **settings}
    found = sampler.sample(self.params, self.requests[:6], version=0)
    for request, completions in zip(self.requests, found):
      logits_SxTxV = _forward_logits(
          self.forward, self.params, request, completions.tokens
      )
      S, T, V = logits_SxTxV.shape
      expected_SxTxV = logits_lib.process(
          logits_SxTxV.reshape(S * T, V), **settings
      ).reshape(S, T, V)
      expected_SxT = np.take_along_axis(
          np.asarray(expected_SxTxV), completions.tokens[..., None], axis=-1
      )[..., 0]
      mask_SxT = np.arange(T)[None] < completions.lengths[:, None]
      np.testing.assert_allclose(
          completions.logprobs[mask_SxT], expected_SxT[mask_SxT], atol=1e-4
      )

  def test_logprobs_are_the_trainers(self):
    request, found = self.requests[3], self.found[3]
    logits = _forward_logits(self.forward, self.params, request, found.tokens)
    trainer = logprobs_lib.token_logprobs(
        logits, jnp.asarray(found.tokens), temperature=1.0
    )
    mask = np.arange(_T)[None] < found.lengths[:, None]
    np.testing.assert_allclose(
        found.logprobs[mask], np.asarray(trainer)[mask], atol=1e-4
    )

  @pytest.mark.slow
  def test_greedy_is_the_argmax_of_a_full_forward(self):
    sampler = _sampler(self.model, temperature=0.0, stop_ids=())
    found = sampler.sample(self.params, self.requests[:4], version=0)
    for request, completions in zip(self.requests, found):
      logits = _forward_logits(
          self.forward, self.params, request, completions.tokens
      )
      np.testing.assert_array_equal(
          completions.tokens, np.argmax(logits, axis=-1)
      )
      np.testing.assert_array_equal(completions.logprobs, 0.0)
      np.testing.assert_array_equal(completions.lengths, _T)

  def test_has_the_same_bits_again(self):
    again = self.sampler.sample(self.params, self.requests, version=0)
    self.assert_same(again, self.found)

  def test_has_the_same_bits_without_batch_mates(self):
    alone = [
        self.sampler.sample(self.params, [request], version=0)[0]
        for request in self.requests
    ]
    self.assert_same(alone, self.found)

  def test_has_the_same_bits_in_another_order(self):
    turned = self.sampler.sample(self.params, self.requests[::-1], version=0)
    self.assert_same(turned[::-1], self.found)

  def test_has_the_same_bits_one_completion_at_a_time(self):
    request, found = self.requests[3], self.found[3]
    for sample in range(request.num_completions):
      part = decode.Request(
          request.prompt_tokens,
          request.prompt_id,
          request.visit,
          num_completions=1,
          first_sample=request.first_sample + sample,
      )
      one = self.sampler.sample(self.params, [part], version=0)[0]
      np.testing.assert_array_equal(one.tokens[0], found.tokens[sample])
      np.testing.assert_array_equal(one.logprobs[0], found.logprobs[sample])

  def test_reports_progress_within_a_long_completion(self):
    progress = mock.Mock()
    home = samplers.SamplerHome(pathlib.Path(), 0, mock.Mock(), progress)
    settings = dataclasses.replace(self.sampler.settings, chunk_steps=1)
    sampler = decode.make(None, self.model, settings, home)
    sampler.sample(
        self.params, self.requests[:1], version=0, newer=lambda: None
    )
    self.assertEqual(self.found[0].lengths.max(), _T)
    # The first token comes with the prompt.
    self.assertEqual(progress.call_count, _T - 1)

  @parameterized.parameters(1, 2, 100)
  @pytest.mark.slow
  def test_has_the_same_bits_with_other_chunks(self, chunk_steps):
    sampler = _sampler(self.model, chunk_steps=chunk_steps)
    found = sampler.sample(self.params, self.requests, version=0)
    self.assert_same(found, self.found)

  @parameterized.parameters(1, 5, 40)
  @pytest.mark.slow
  def test_has_the_same_tokens_with_another_number_of_slots(self, num_rows):
    sampler = _sampler(self.model, num_rows=num_rows)
    found = sampler.sample(self.params, self.requests, version=0)
    self.assert_same(found, self.found, bits=False)

  @pytest.mark.slow
  def test_same_bits_whatever_blocks_are_read(self):
    # Alone, a row starts in the first block; its mates, which started before,
    # make it read all blocks from its start.
    model = tiny_model.make_model(max_positions=128)
    make = lambda **changes: _sampler(
        model, max_completion_tokens=80, num_rows=3, stop_ids=(), **changes
    )
    requests = [decode.Request(np.array([3, 4 + i]), i, 0, 1) for i in range(5)]
    found = make(chunk_steps=17).sample(self.params, requests, version=0)
    alone = make()
    for request, expected in zip(requests, found):
      self.assert_same(
          alone.sample(self.params, [request], version=0), [expected]
      )

  def test_each_part_of_the_key_changes_the_completion(self):
    tokens = np.array([3, 4])
    sample = lambda sampler, *ids: sampler.sample(
        self.params, [decode.Request(tokens, *ids)], version=0
    )[0].logprobs.tobytes()
    other_seed = _sampler(self.model, seed=4)
    found = [
        sample(self.sampler, 0, 0, 1, 0),
        sample(self.sampler, 1, 0, 1, 0),
        sample(self.sampler, 0, 1, 1, 0),
        sample(self.sampler, 0, 0, 1, 1),
        sample(self.sampler, 2**32 - 1, 0, 1, 0),
        sample(other_seed, 0, 0, 1, 0),
    ]
    self.assertLen(set(found), len(found))

  def test_a_request_may_have_its_own_seed(self):
    tokens = np.array([3, 4])
    own = decode.Request(tokens, 7, 1, 2, seed=4)
    plain = decode.Request(tokens, 7, 1, 2)
    found = self.sampler.sample(self.params, [plain, own], version=0)
    other = _sampler(self.model, seed=4).sample(self.params, [plain], version=0)
    self.assert_same(found[1:], other)
    self.assertNotEqual(
        found[0].logprobs.tobytes(), found[1].logprobs.tobytes()
    )
    with self.assertRaisesRegex(ValueError, "prompt 7: seed=-1"):
      self.sampler.sample(
          self.params, [decode.Request(tokens, 7, 1, 2, seed=-1)], version=0
      )

  def test_compiles_nothing_after_warm_up(self):
    sampler = _sampler(
        self.model,
        prompt_buckets=3,
        stop_strings=["never"],
        text_fn=str,
        recompute_cache=True,
    )
    # Params may come from a program, the host or the wire.
    kinds = [
        self.params,
        jax.device_put(self.params, jax.devices()[0]),
        jax.tree.map(np.asarray, self.params),
    ]
    sampler.warm_up(kinds[0])
    with self.assertLogs("jax", logging.WARNING) as logs:
      jax.config.update("jax_log_compiles", True)
      try:
        jax.jit(lambda x: x + 1)(np.zeros(3))  # Log of a compilation.
        seen = len(logs.output)
        for params in kinds:
          for requests in (self.requests, self.requests[:1], []):
            sampler.sample(params, requests, version=0)
            newer = lambda params=sampler.put(params): (1, params)
            sampler.sample(params, requests, version=0, newer=newer)
      finally:
        jax.config.update("jax_log_compiles", False)
    self.assertGreater(seen, 0)
    self.assertEqual(logs.output[seen:], [])

  def test_each_program_is_traced_once(self):
    chex.clear_trace_counter()
    originals = {
        name: getattr(slots_lib, name)
        for name in ("refill", "decode_chunk", "collect")
    }
    self.addCleanup(
        lambda: [setattr(slots_lib, n, f) for n, f in originals.items()]
    )
    for name, function in originals.items():
      setattr(slots_lib, name, chex.assert_max_traces(function, n=1))
    sampler = _sampler(self.model)
    sampler.warm_up(self.params)
    found = sampler.sample(self.params, self.requests, version=0)
    self.assert_same(found, self.found)
