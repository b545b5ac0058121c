# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts padded to few lengths, chunks, bfloat16: the same completions."""

import functools

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.sampling import decode
from tests.support import sampler_case
from tests.support import tiny_model

_P, _T, _SEED = 8, 6, 3
# Distance of a uniform number from the next token's share of the distribution.
# Summing in another order moves it by about 1e-6.
_MARGIN = 1e-5


_sampler = functools.partial(
    sampler_case.make,
    max_prompt_tokens=_P,
    max_completion_tokens=_T,
    num_rows=16,
    chunk_steps=3,
    seed=_SEED,
)


def _requests() -> list[decode.Request]:
  """Returns prompts of all lengths, the buckets mixed."""
  rng = np.random.default_rng(0)
  return [
      decode.Request(rng.integers(2, tiny_model.VOCAB, 1 + 3 * n % _P), n, 0, 3)
      for n in range(_P)
  ]


def _margin(logits_V, token: int, ids: tuple[int, ...], position: int) -> float:
  """Returns how far the uniform number lies inside the token's share."""
  key = jax.random.key(_SEED, impl="threefry2x32")
  key = functools.reduce(jax.random.fold_in, (*ids, position), key)
  uniform = (int(jax.random.key_data(key)[0]) >> 8) * 2.0**-24
  probs_V = np.exp(np.asarray(logits_V, np.float64))
  ends_V = np.cumsum(probs_V) / probs_V.sum()
  start = ends_V[token - 1] if token else 0.0
  return min(uniform - start, ends_V[token] - uniform)


class BucketsTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.model = tiny_model.make_model(num_layers=1)
    # Larger than at init, so that distributions are far from uniform.
    cls.params = jax.tree.map(
        lambda x: 2 * np.asarray(x), tiny_model.init_params(cls.model)
    )
    cls.requests = _requests()
    cls.sampler = _sampler(cls.model, prompt_buckets=2)
    cls.found = cls.sampler.sample(cls.params, cls.requests, version=0)
    cls.forward = staticmethod(jax.jit(cls.model.logits))

  def logits(self, params, found) -> list[np.ndarray]:
    """Returns [S, T, V] of each request, by one full forward pass."""
    S = self.requests[0].num_completions
    rows = np.zeros((len(found) * S, _P + _T), np.int32)
    lengths = np.repeat([len(r.prompt_tokens) for r in self.requests], S)
    for row, length in enumerate(lengths):
      rows[row, :length] = self.requests[row // S].prompt_tokens
      rows[row, length : length + _T] = found[row // S].tokens[row % S]
    mask = np.arange(_P + _T) < lengths[:, None] + _T
    logits = np.asarray(self.forward(params, rows, mask))
    own = [logits[r, n - 1 : n - 1 + _T] for r, n in enumerate(lengths)]
    return [np.stack(own[i : i + S]) for i in range(0, len(own), S)]

  def assert_same(self, found, expected, **tolerance):
    for one, other in zip(found, expected, strict=True):
      np.testing.assert_array_equal(one.tokens, other.tokens)
      np.testing.assert_array_equal(one.stopped, other.stopped)
      np.testing.assert_allclose(one.logprobs, other.logprobs, **tolerance)

  def test_each_token_is_drawn_with_a_margin(self):
    margins = []
    logits = self.logits(self.params, self.found)
    for request, completions, own in zip(self.requests, self.found, logits):
      for sample, length in enumerate(completions.lengths):
        margins += [
            _margin(
                own[sample, t],
                completions.tokens[sample, t],
                (request.prompt_id, 0, sample),
                t,
            )
            for t in range(length)
        ]
    self.assertGreater(len(margins), 60)
    self.assertGreater(min(margins), _MARGIN)

  def test_one_bucket_and_other_chunks_give_the_same_tokens(self):
    sampler = _sampler(self.model, chunk_steps=1)
    found = sampler.sample(self.params, self.requests, version=0)
    self.assert_same(found, self.found, atol=1e-4)

  def test_has_the_same_bits_without_batch_mates(self):
    alone = [
        self.sampler.sample(self.params, [request], version=0)[0]
        for request in self.requests
    ]
    self.assert_same(alone, self.found, rtol=0)

  @pytest.mark.slow
  def test_bfloat16_is_near_float32(self):
    model = tiny_model.make_model(
        num_layers=1, compute_dtype="bfloat16", param_dtype="bfloat16"
    )
    # Params as at init, so that logits are small and their rounding is too.
    params = jax.tree.map(lambda x: (x / 2).astype(jnp.bfloat16), self.params)
    sampler = _sampler(model)
    found = sampler.sample(params, self.requests, version=0)
    alone = sampler.sample(params, self.requests[2:3], version=0)
    self.assert_same(alone, found[2:3], rtol=0)
    exact = jax.tree.map(lambda x: x.astype(np.float32), params)
    gaps = []
    for completions, logits in zip(found, self.logits(exact, found)):
      expected = np.take_along_axis(
          np.asarray(jax.nn.log_softmax(logits)),
          completions.tokens[..., None],
          axis=-1,
      )[..., 0]
      sampled = np.arange(_T) < completions.lengths[:, None]
      gaps.append(np.abs(completions.logprobs - expected)[sampled])
    gaps = np.concatenate(gaps)
    # Apart by what bfloat16 rounds, some 2^-8 of numbers near 1.
    self.assertBetween(gaps.max(), 1e-4, 0.05)
    self.assertLess(gaps.mean(), 0.01)
