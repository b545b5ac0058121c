# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The distribution that is sampled from, and draws from it."""

import functools

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.sampling import logits

_PROBS = np.array([0.1, 0.4, 0.2, 0.3], np.float32)


def _probs(logits_V, **settings) -> np.ndarray:
  settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **settings}
  out = logits.process(jnp.asarray(logits_V)[None], **settings)
  return np.exp(np.asarray(out[0], np.float64))


class KeepLikeliestTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(
      # All fit; the last place stays free.
      ({"top_k": 3}, 4, [1, 3, 2, -1], [4 / 9, 3 / 9, 2 / 9, 0]),
      # .4 + .3 + .2 reach .75, and two fit.
      ({"top_p": 0.75}, 2, [1, 3], [4 / 7, 3 / 7]),
      ({"min_p": 0.49}, 1, [1], [1.0]),
      # More places than tokens.
      ({"top_k": 1}, 6, [1, -1, -1, -1, -1, -1], [1, 0, 0, 0, 0, 0]),
  )
  def test_matches_known_numbers(self, settings, num_kept, ids, probs):
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **settings}

    @self.variant
    def run(logits_RxV):
      logprobs_RxV = logits.process(logits_RxV, **settings)
      return logits.keep_likeliest(logprobs_RxV, num_kept)

    logprobs_RxC, ids_RxC = run(jnp.log(_PROBS)[None])
    np.testing.assert_array_equal(ids_RxC, [ids])
    np.testing.assert_allclose(np.exp(logprobs_RxC), [probs], rtol=1e-5)

  def test_drops_ties_beyond_the_limit(self):
    logprobs_RxC, ids_RxC = logits.keep_likeliest(jnp.zeros((1, 4)), 2)
    self.assertLen(set(ids_RxC[0].tolist()), 2)
    np.testing.assert_allclose(logprobs_RxC, np.log(0.5) * np.ones((1, 2)))


class ProcessTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.named_parameters(
      ("all", {}, [0.1, 0.4, 0.2, 0.3]),
      ("hot", {"temperature": 2.0}, np.sqrt(_PROBS) / np.sqrt(_PROBS).sum()),
      ("greedy", {"temperature": 0.0}, [0, 1, 0, 0]),
      ("top_1", {"top_k": 1}, [0, 1, 0, 0]),
      ("top_3", {"top_k": 3}, [0, 4 / 9, 2 / 9, 3 / 9]),
      ("top_k_of_all", {"top_k": 4}, [0.1, 0.4, 0.2, 0.3]),
      ("top_k_past_all", {"top_k": 9}, [0.1, 0.4, 0.2, 0.3]),
      # The token that crosses top_p is kept.
      ("top_p", {"top_p": 0.5}, [0, 4 / 7, 0, 3 / 7]),
      ("top_p_first", {"top_p": 0.35}, [0, 1, 0, 0]),
      ("tiny_top_p", {"top_p": 1e-9}, [0, 1, 0, 0]),
      ("top_p_most", {"top_p": 0.95}, [0.1, 0.4, 0.2, 0.3]),
      # 4/9 < 0.5 among the three, so a second token is needed.
      ("top_k_then_top_p", {"top_k": 3, "top_p": 0.5}, [0, 4 / 7, 0, 3 / 7]),
      # 0.4 / 0.7 reaches 0.55 after top-k only: it is renormalized between.
      # 0.2 is half of the likeliest, 0.1 is less.
      ("min_p", {"min_p": 0.49}, [0, 4 / 9, 2 / 9, 3 / 9]),
      ("min_p_first", {"min_p": 0.99}, [0, 1, 0, 0]),
      ("min_p_most", {"min_p": 0.24}, [0.1, 0.4, 0.2, 0.3]),
      (
          "hot_min_p",
          {"temperature": 2.0, "min_p": 0.75},
          [0, 2 / (2 + 3**0.5), 0, 3**0.5 / (2 + 3**0.5)],
      ),
      ("renormalized", {"top_k": 2, "top_p": 0.55}, [0, 1, 0, 0]),
  )
  def test_matches_known_numbers(self, settings, expected):
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **settings}
    fn = self.variant(functools.partial(logits.process, **settings))
    # A constant added to the logits changes nothing.
    logits_2xV = jnp.stack([jnp.log(_PROBS), jnp.log(_PROBS) + 3.0])
    out_2xV = fn(logits_2xV)
    self.assertEqual(out_2xV.dtype, jnp.float32)
    np.testing.assert_allclose(np.exp(out_2xV), [expected] * 2, atol=1e-6)
    dropped = np.asarray(expected) == 0
    self.assertTrue(np.isneginf(np.asarray(out_2xV)[:, dropped]).all())

  def test_temperature_comes_before_top_p(self):
    # Squared and renormalized: [1, 16, 4, 9] / 30, and 16/30 < 0.6 < 25/30.
    out = _probs(np.log(_PROBS), temperature=0.5, top_p=0.6)
    np.testing.assert_allclose(out, [0, 16 / 25, 0, 9 / 25], atol=1e-6)

  def test_top_p_equals_sorting(self):
    rng = np.random.default_rng(0)
    logits_RxV = (rng.normal(size=(32, 500)) * 5).astype(np.float32)
    logits_RxV[:, 100:110] = logits_RxV[:, :1]
    logprobs_RxV = np.asarray(jax.nn.log_softmax(logits_RxV))
    for top_p in (1e-3, 0.3, 0.9, 0.999):
      found = logits.process(
          jnp.asarray(logits_RxV), temperature=1.0, top_k=0, top_p=top_p
      )
      for logprobs_V, kept_V in zip(logprobs_RxV, np.isfinite(found)):
        probs_V = np.exp(logprobs_V.astype(np.float64))
        likelier_V = np.array(
            [probs_V[logprobs_V > one].sum() for one in logprobs_V]
        )
        sure_V = np.abs(likelier_V - top_p) > 1e-5
        np.testing.assert_array_equal(
            kept_V[sure_V], (likelier_V < top_p)[sure_V]
        )

  @parameterized.product(top_k=(1, 3, 7, 8, 50), top_p=(1.0, 0.7))
  @pytest.mark.slow
  def test_top_k_equals_sorting(self, top_k, top_p):
    # Up to 7 blocks of 128 are searched alone; the last block is short.
    rng = np.random.default_rng(top_k)
    logits_RxV = rng.normal(size=(6, 3600)).astype(np.float32)
    logits_RxV[:3] = np.round(logits_RxV[:3] * 8) / 8  # Many tie.
    out_RxV = logits.process(
        jnp.asarray(logits_RxV), temperature=0.5, top_k=top_k, top_p=top_p
    )
    last_Rx1 = np.sort(logits_RxV)[:, -top_k, None]
    probs_RxV = np.exp(2 * logits_RxV.astype(np.float64))
    probs_RxV *= logits_RxV >= last_Rx1
    probs_RxV /= probs_RxV.sum(axis=1, keepdims=True)
    likelier_RxV = np.stack(
        [
            [probs_V[logits_V > one].sum() for one in logits_V]
            for logits_V, probs_V in zip(logits_RxV, probs_RxV)
        ]
    )
    probs_RxV *= likelier_RxV < top_p
    probs_RxV /= probs_RxV.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(np.exp(out_RxV), probs_RxV, atol=1e-6)

  def test_ties_are_kept_together(self):
    flat = np.log([0.2, 0.4, 0.2, 0.2])
    np.testing.assert_allclose(_probs(flat, top_k=2), [0.2, 0.4, 0.2, 0.2])
    np.testing.assert_allclose(_probs(flat, top_p=0.5), [0.2, 0.4, 0.2, 0.2])
    zeros = [0.0, -0.0, -100.0]
    np.testing.assert_allclose(_probs(zeros, top_p=0.4), [0.5, 0.5, 0.0])

  def test_greedy_takes_the_first_of_equals(self):
    np.testing.assert_array_equal(
        _probs([1.0, 2.0, 2.0], temperature=0.0), [0, 1, 0]
    )


class SampleTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  def test_inverts_the_distribution_function(self):
    # Steps at 0.125, 0.5 and 0.75: exact in float32.
    probs_V = np.array([0.125, 0.375, 0.25, 0.25], np.float32)
    uniform_R = np.array(
        [0.0, 0.12, 0.126, 0.49, 0.51, 0.74, 0.76, 1 - 2**-24], np.float32
    )
    logprobs_RxV = jnp.broadcast_to(jnp.log(probs_V), (8, 4))
    token_R, logprob_R = self.variant(logits.sample)(
        logprobs_RxV, jnp.asarray(uniform_R)
    )
    np.testing.assert_array_equal(token_R, [0, 0, 1, 1, 2, 2, 3, 3])
    np.testing.assert_array_equal(logprob_R, np.log(probs_V)[token_R])

  def test_impossible_tokens_are_never_drawn(self):
    # Everything possible lies between impossible tokens; sums of rounded
    # terms in a wide vocabulary neither grow evenly nor end at 1.
    rng = np.random.default_rng(0)
    for num_tokens in (3, 127, 128, 129, 1000):
      logits_RxV = rng.normal(size=(64, num_tokens)) * 4
      possible_RxV = rng.random((64, num_tokens)) < 0.3
      possible_RxV[:, 1] = True
      possible_RxV[:, [0, -1]] = False
      logprobs_RxV = jax.nn.log_softmax(
          jnp.where(possible_RxV, logits_RxV, -jnp.inf)
      )
      for uniform in (0.0, 2**-24, 0.5, 1 - 2**-24):
        token_R, logprob_R = jax.jit(logits.sample)(
            logprobs_RxV, jnp.full((64,), uniform)
        )
        self.assertTrue(possible_RxV[np.arange(64), token_R].all())
        self.assertTrue(np.isfinite(logprob_R).all())

  def test_blocks_of_a_wide_vocabulary_join(self):
    # Uniform over 1024 tokens: token v covers [v, v + 1) / 1024.
    tokens_R = np.array([0, 127, 128, 129, 511, 512, 1023])
    logprobs_RxV = jnp.full((7, 1024), -np.log(1024.0))
    out_R, _ = logits.sample(
        logprobs_RxV, jnp.asarray((tokens_R + 0.5) / 1024, jnp.float32)
    )
    np.testing.assert_array_equal(out_R, tokens_R)

  def test_frequencies_equal_the_probabilities(self):
    num_draws = 40_000
    uniform_R = (np.arange(num_draws) + 0.5) / num_draws
    logprobs_RxV = jnp.broadcast_to(jnp.log(_PROBS), (num_draws, 4))
    token_R, _ = logits.sample(logprobs_RxV, jnp.asarray(uniform_R))
    share_V = np.bincount(token_R, minlength=4) / num_draws
    # An even grid of numbers meets the distribution to within a grid step.
    np.testing.assert_allclose(share_V, _PROBS, atol=2 / num_draws)

  def test_frequencies_equal_the_probabilities_over_blocks(self):
    num_draws = 10_000
    uniform_R = (np.arange(num_draws) + 0.5) / num_draws
    # Two blocks and a short one; a fifth of the tokens is impossible.
    probs_V = np.random.default_rng(0).random(300).astype(np.float32)
    probs_V[::5] = 0
    probs_V /= probs_V.sum()
    token_R, logprob_R = jax.jit(logits.sample)(
        jnp.broadcast_to(jnp.log(probs_V), (num_draws, 300)),
        jnp.asarray(uniform_R, jnp.float32),
    )
    share_V = np.bincount(token_R, minlength=300) / num_draws
    np.testing.assert_allclose(share_V, probs_V, atol=2 / num_draws)
    np.testing.assert_allclose(np.exp(logprob_R), probs_V[token_R], rtol=1e-5)
