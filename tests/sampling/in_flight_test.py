# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Newer params between chunks: versions and log-probs of every token."""

import functools
import gc
import weakref

from absl.testing import parameterized
import jax
import numpy as np
import pytest

from tba_jax.models.net import transformer
from tba_jax.sampling import decode
from tests.models import hf_case
from tests.support import fakes
from tests.support import sampler_case
from tests.support import tiny_model

_V, _P, _T = 7, 3, 8
# Windows that end in the completion, in the prompt, and before both.
_WINDOWS = tuple(
    dict(family="mistral", sliding_window=size) for size in (1, 5, 9, 30)
)


_sampler = functools.partial(
    sampler_case.make, max_prompt_tokens=_P, max_completion_tokens=_T
)


def _every_chunk(params_of):
  """Returns a function that has version 1, 2, … from the second call on."""
  calls = iter(range(100))

  def newer():
    version = next(calls)
    return (version, params_of[version]) if version in params_of else None

  return newer


def _fake_logprobs(params_of, request, tokens, versions, *, recomputed):
  """Yields the log-probs of a completion, by a loop in NumPy.

  A token that was fed to the model stands in the cache with the table of the
  params that fed it, or, where caches are made again, of the newest.
  """
  table = lambda v: np.asarray(params_of[v]["table"], np.float64)
  fed = [versions[0]] * len(request.prompt_tokens)
  seen = list(request.prompt_tokens)
  for token, version in zip(tokens, versions):
    # The last token is fed by the params that draw the next one.
    fed += [version] * (len(seen) - len(fed))
    logits = np.asarray(params_of[version]["bias"], np.float64)
    for position, (old, fed_by) in enumerate(zip(seen, fed)):
      by = version if recomputed else fed_by
      logits = logits + table(by)[position, old]
    yield logits[token] - np.log(np.exp(logits).sum())
    seen.append(token)


class InFlightTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.model = fakes.FakeModel(_V, 12)
    cls.params_of = {
        version: jax.tree.map(
            lambda x: 0.5 * x, cls.model.init(jax.random.key(version))
        )
        for version in range(4)
    }
    cls.requests = [
        decode.Request(np.array(prompt), index, 0, 7)
        for index, prompt in enumerate([[2], [3, 4], [5, 2, 4]])
    ]

  @parameterized.parameters(False, True)
  def test_logprobs_belong_to_sampling_version(self, recompute_cache):
    sampler = _sampler(self.model, recompute_cache=recompute_cache)
    sampler.warm_up(self.params_of[0])
    found = sampler.sample(
        self.params_of[0],
        self.requests,
        version=0,
        newer=_every_chunk({v: p for v, p in self.params_of.items() if v}),
    )
    mixed, begun = 0, set()
    for request, completions in zip(self.requests, found):
      for sample, length in enumerate(completions.lengths):
        versions = completions.token_versions[sample]
        np.testing.assert_array_equal(versions[length:], -1)
        versions = versions[:length]
        # A chunk has two steps, and the first token comes before it.
        self.assertTrue((np.diff(versions) >= 0).all())
        changes = np.flatnonzero(np.diff(versions)) + 1
        self.assertTrue((changes % 2 == 1).all(), versions)
        self.assertEqual(completions.versions[sample], versions[0])
        mixed += len(changes) > 0
        begun.add(int(versions[0]))
        expected = _fake_logprobs(
            self.params_of,
            request,
            completions.tokens[sample, :length],
            versions,
            recomputed=recompute_cache,
        )
        np.testing.assert_allclose(
            completions.logprobs[sample, :length], [*expected], atol=1e-4
        )
    self.assertGreater(mixed, 5)
    self.assertGreater(len(begun), 2)

  def test_sampling_without_newer_params_does_not_change(self):
    sampler = _sampler(self.model, recompute_cache=True)
    plain, asked = (
        sampler.sample(self.params_of[0], self.requests, version=4, newer=newer)
        for newer in (None, lambda: None)
    )
    jax.tree.map(
        np.testing.assert_array_equal,
        [vars(completions) for completions in plain],
        [vars(completions) for completions in asked],
    )

  @parameterized.parameters(
      *((shape, 1) for shape in (*hf_case.FAMILIES, *_WINDOWS)),
      *((shape, 3) for shape in (*hf_case.KINDS, *_WINDOWS)),
  )
  @pytest.mark.slow
  def test_the_same_params_change_nothing(self, shape, prompt_buckets):
    # Prompts of all buckets, swapped in after each chunk. With one layer a key
    # does not depend on what its token sees.
    model = transformer.make_model(hf_case.make_config(**shape))
    rng = np.random.default_rng(0)
    requests = [
        decode.Request(rng.integers(2, hf_case.VOCAB, 1 + n), n, 0, 3)
        for n in range(12)
    ]
    sampler = _sampler(
        model,
        max_prompt_tokens=12,
        prompt_buckets=prompt_buckets,
        recompute_cache=True,
    )
    params = sampler.put(tiny_model.init_params(model))
    expected = sampler.sample(params, requests, version=0)
    swapped = sampler.sample(
        params, requests, version=0, newer=lambda: (0, params)
    )
    for before, after in zip(expected, swapped, strict=True):
      np.testing.assert_array_equal(after.tokens, before.tokens)
      # A cache of many tokens at once sums in another order. Log-probs lie
      # above -8, where a float32 is rounded by 2^-22: this is 16 roundings,
      # four times as many where a delta net normalizes sums that cancel.
      atol = 1.6e-5 if shape.get("delta_layers") else 4e-6
      np.testing.assert_allclose(after.logprobs, before.logprobs, atol=atol)
      self.assertGreater(before.logprobs.min(), -8)

  @parameterized.parameters(
      tiny_model.STATES,
      tiny_model.SPARSE,
      tiny_model.SHARED,
      dict(
          family="gpt_oss",
          sliding_window=3,
          global_layers=(False, True),
          num_experts=4,
          experts_per_token=2,
      ),
  )
  @pytest.mark.slow
  def test_newer_params_continue_with_kept_caches_and_states(self, **shape):
    model = tiny_model.make_model(**shape)
    params_of = [
        jax.tree.map(lambda x: 2 * x, tiny_model.init_params(model, seed))
        for seed in range(3)
    ]
    prompt, rows = np.array([5, 9, 4]), 5
    sampler = _sampler(model, stop_ids=())
    newer = _every_chunk({v: sampler.put(params_of[v]) for v in (1, 2)})
    (found,) = sampler.sample(
        params_of[0],
        [decode.Request(prompt, 0, 0, rows)],
        version=0,
        newer=newer,
    )
    versions = [0, 0, 0, 1, 1, 2, 2, 2]
    np.testing.assert_array_equal(found.token_versions, [versions] * rows)
    # Older tokens keep the keys, values and states that older params computed.
    decode_params = [model.decode_params(p, _P + _T) for p in params_of]
    logits, prompts = model.prefill(
        decode_params[0], prompt[None], np.ones((1, _P))
    )
    logits = np.repeat(logits, rows, axis=0)
    cache = model.init_cache(rows, (_P, _T))
    cache = model.fill_cache(cache, prompts, np.zeros(rows, np.int32))
    step, columns = jax.jit(model.decode_step), np.arange(_P + _T)
    for t, version in enumerate(versions):
      if t:
        fed = _P + t - 1
        seen = np.broadcast_to(columns <= fed, (rows, len(columns)))
        logits, cache = step(
            decode_params[version],
            found.tokens[:, t - 1],
            np.full(rows, fed, np.int32),
            cache,
            seen,
            np.int32(fed),
        )
      logprobs = np.asarray(jax.nn.log_softmax(logits))
      np.testing.assert_allclose(
          found.logprobs[:, t],
          logprobs[np.arange(rows), found.tokens[:, t]],
          atol=1e-5,
      )
    # The newest params alone give other ones.
    whole = np.concatenate([np.tile(prompt, (rows, 1)), found.tokens], axis=1)
    logits = model.logits(params_of[2], whole, np.ones(whole.shape))[:, -2]
    logprobs = np.asarray(jax.nn.log_softmax(logits))
    gap = found.logprobs[:, -1] - logprobs[np.arange(rows), whole[:, -1]]
    self.assertGreater(np.abs(gap).max(), 1e-2)

  def test_params_are_held_once(self):
    model = tiny_model.make_model(num_layers=1)
    sampler = _sampler(model, stop_ids=())
    host = jax.tree.map(np.asarray, tiny_model.init_params(model))
    versions, alive = [], []

    def put():
      params = sampler.put(host)
      versions.append(weakref.ref(params.others["head"]["kernel"]))
      return params

    def newer():
      alive.append(sum(ref() is not None for ref in versions))
      return len(versions), put()

    gc.collect()  # What earlier tests left.
    before = len(jax.live_arrays())
    prompt = decode.Request(np.array([5, 9]), 0, 0, 8)
    sampler.sample(put(), [prompt], version=0, newer=newer)
    self.assertEqual(alive, [1, 1, 1, 1])
    self.assertLen(jax.live_arrays(), before)

  def test_token_versions_are_those_of_the_real_model(self):
    model = tiny_model.make_model(num_layers=1)
    params_of = {
        version: jax.tree.map(
            lambda x: 2 * np.asarray(x),
            tiny_model.init_params(model, seed=version),
        )
        for version in range(3)
    }
    sampler = _sampler(model, recompute_cache=True, stop_ids=())
    newer = _every_chunk({v: sampler.put(params_of[v]) for v in (1, 2)})
    (found,) = sampler.sample(
        params_of[0],
        [decode.Request(np.array([5, 9]), 0, 0, 5)],
        version=0,
        newer=newer,
    )
    np.testing.assert_array_equal(
        found.token_versions, [[0, 0, 0, 1, 1, 2, 2, 2]] * 5
    )
    tokens = np.concatenate([np.full((5, 2), [5, 9]), found.tokens], axis=1)
    forward = jax.jit(model.logits)
    for version, params in params_of.items():
      logits = forward(params, tokens, np.ones(tokens.shape))[:, 1:-1]
      expected = np.take_along_axis(
          np.asarray(jax.nn.log_softmax(logits)), found.tokens[..., None], -1
      )[..., 0]
      drew = found.token_versions == version
      np.testing.assert_allclose(
          found.logprobs[drew], expected[drew], atol=1e-4
      )
