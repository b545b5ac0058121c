# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of reading logits a few positions at a time."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.losses import logprobs
from tests.support import tiny_model

B, K, P, T, V = 2, 3, 4, 7, tiny_model.VOCAB


def _inputs():
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.integers(2, V, shape), jnp.int32)
  mask = jnp.asarray([[0, 1, 1, 1], [1, 1, 1, 1]], jnp.float32)
  return draw(B, P), mask, draw(B, K, T)


def _read(logits, tokens):
  return {
      "logprobs": logprobs.token_logprobs(logits, tokens, temperature=0.7),
      "entropy": logprobs.entropy(logits, temperature=0.7),
  }


class MapLogitsTest(parameterized.TestCase):

  # One position at a time, a part of the last chunk empty, and all at once.
  @parameterized.parameters(1, B * K * V, 2 * B * K * V, 4 * B * K * V, 10**9)
  def test_any_number_of_logits_gives_the_same(self, max_logits):
    model = tiny_model.make_model()
    params = jax.jit(model.init)(jax.random.key(0))
    inputs = _inputs()
    logits = jax.jit(model.completion_logits)(params, *inputs)
    expected = _read(logits, inputs[-1])
    run = functools.partial(logprobs.map_logits, model, max_logits=max_logits)
    found = jax.jit(lambda params: run(params, *inputs, _read))(params)
    chex.assert_trees_all_close(found, expected, atol=1e-5)
    chex.assert_shape(jax.tree.leaves(found), (B, K, T))

  def test_gradients_are_those_of_all_at_once(self):
    model = tiny_model.make_model(tie_embeddings=True)
    params = jax.jit(model.init)(jax.random.key(0))
    weights = jnp.arange(B * K * T, dtype=jnp.float32).reshape(B, K, T)

    def loss(params, max_logits):
      out = logprobs.map_logits(
          model, params, *_inputs(), _read, max_logits=max_logits
      )
      return jnp.mean(weights * (out["logprobs"] + out["entropy"]))

    grad = jax.jit(jax.grad(loss), static_argnums=1)
    chex.assert_trees_all_close(
        grad(params, B * K * V), grad(params, 10**9), atol=1e-4, rtol=1e-4
    )

  def test_logits_of_all_tokens_are_never_held(self):
    model = tiny_model.make_model(vocab_size=32768)
    params = jax.eval_shape(model.init, jax.random.key(0))
    inputs = [jnp.ones((B, P), jnp.int32), jnp.ones((B, P))]
    tokens = jnp.ones((B, K, 128), jnp.int32)

    def loss(params, max_logits):
      out = logprobs.map_logits(
          model, params, *inputs, tokens, _read, max_logits=max_logits
      )
      return out["logprobs"].sum()

    def peak_bytes(max_logits):
      grad = jax.jit(jax.grad(loss), static_argnums=1)
      compiled = grad.lower(params, max_logits).compile()
      return compiled.memory_analysis().temp_size_in_bytes

    all_logits_bytes = B * K * 128 * 32768 * 4
    self.assertGreater(peak_bytes(10**9), all_logits_bytes)
    self.assertLess(peak_bytes(8 * B * K * 32768), all_logits_bytes / 2)


class CompletionLogprobsTest(absltest.TestCase):

  def test_equals_the_log_probs_of_the_logits(self):
    model, inputs = tiny_model.BIGRAM, _inputs()
    params = model.init(jax.random.key(1))
    found = logprobs.completion_logprobs(
        model, params, *inputs, temperature=0.5
    )
    logits = model.unembed(params, model.completion_stream(params, *inputs))
    expected = logprobs.token_logprobs(logits, inputs[-1], temperature=0.5)
    np.testing.assert_allclose(found, expected, rtol=1e-6)

  def test_refuses_a_temperature_of_zero(self):
    with self.assertRaisesRegex(ValueError, "temperature=0"):
      logprobs.completion_logprobs(
          tiny_model.BIGRAM,
          tiny_model.BIGRAM.init(jax.random.key(1)),
          *_inputs(),
          temperature=0.0,
      )


if __name__ == "__main__":
  absltest.main()
