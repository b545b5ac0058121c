# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probs, entropy and KL estimators against numbers worked out by hand."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.learning import packing
from tba_jax.losses import logprobs
from tests.support import rows
from tests.support import table_policy
from tests.support import tiny_model

# softmax of these is [1/2, 1/4, 1/4].
_LOGITS = np.log([4.0, 2.0, 2.0]).astype(np.float32)


class TokenLogprobsTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  def test_matches_known_numbers(self):
    fn = self.variant(
        lambda logits, tokens: logprobs.token_logprobs(
            logits, tokens, temperature=1.0
        )
    )
    logits_BxKxTxV = jnp.broadcast_to(_LOGITS, (1, 2, 3, 3))
    tokens_BxKxT = jnp.array([[[0, 1, 2], [2, 2, 0]]])
    half, quarter = np.log(0.5), np.log(0.25)
    np.testing.assert_allclose(
        fn(logits_BxKxTxV, tokens_BxKxT),
        [[[half, quarter, quarter], [quarter, quarter, half]]],
        rtol=1e-6,
    )

  @chex.variants(with_jit=True, without_jit=True)
  def test_temperature_divides_the_logits(self):
    # exp(logits / 0.5) = [16, 4, 4].
    fn = self.variant(
        lambda logits, tokens: logprobs.token_logprobs(
            logits, tokens, temperature=0.5
        )
    )
    np.testing.assert_allclose(
        fn(jnp.asarray(_LOGITS)[None], jnp.array([0])),
        [np.log(16 / 24)],
        rtol=1e-6,
    )

  def test_computes_in_float32_whatever_the_logits(self):
    logits = jnp.array([[0.0, 0.01]], jnp.bfloat16)
    out = logprobs.token_logprobs(logits, jnp.array([0]), temperature=1.0)
    self.assertEqual(out.dtype, jnp.float32)
    difference = float(logits[0, 1])
    np.testing.assert_allclose(out, [-np.log1p(np.exp(difference))], rtol=1e-6)

  def test_gradient_is_one_hot_minus_softmax(self):
    gradient_1x3 = jax.grad(
        lambda logits: logprobs.token_logprobs(
            logits, jnp.array([1]), temperature=2.0
        ).sum()
    )(jnp.asarray(_LOGITS)[None])
    root = np.sqrt([4.0, 2.0, 2.0])
    expected = (np.array([0.0, 1.0, 0.0]) - root / root.sum()) / 2.0
    np.testing.assert_allclose(gradient_1x3[0], expected, atol=1e-6)

  def test_large_logits_stay_finite(self):
    logits = jnp.array([[1e4, 0.0]])
    out = logprobs.token_logprobs(logits, jnp.array([1]), temperature=1.0)
    np.testing.assert_allclose(out, [-1e4], rtol=1e-6)


class KeepOnlyTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  def test_matches_known_numbers(self):
    def run(logits, tokens, kept):
      logits = logprobs.keep_only(logits, tokens, kept)
      return (
          logprobs.token_logprobs(logits, tokens, temperature=1.0),
          logprobs.entropy(logits, temperature=1.0),
      )

    # Two tokens of [1/2, 1/4, 1/4]; the same, one repeated; only the sampled.
    found, entropy = self.variant(run)(
        jnp.broadcast_to(_LOGITS, (3, 3)),
        jnp.array([0, 1, 2]),
        jnp.array([[0, 1, -1], [1, 0, 0], [-1, -1, -1]]),
    )
    np.testing.assert_allclose(
        found, np.log([2 / 3, 1 / 3, 1.0]), rtol=1e-6, atol=1e-7
    )
    both = np.log(3) - 2 / 3 * np.log(2)
    np.testing.assert_allclose(entropy, [both, both, 0.0], rtol=1e-6)

  def test_gradient_goes_to_kept_tokens_alone(self):
    def total(logits):
      kept = jnp.array([[2, 0], [-1, -1]])
      tokens = jnp.array([0, 1])
      logits = logprobs.keep_only(logits, tokens, kept)
      values = logprobs.token_logprobs(logits, tokens, temperature=1.0)
      return (values + logprobs.entropy(logits, temperature=1.0)).sum()

    def of_two(pair):
      values = jax.nn.log_softmax(pair)
      return values[0] - (jnp.exp(values) * values).sum()

    gradient = jax.grad(total)(jnp.broadcast_to(_LOGITS, (2, 3)))
    pair = jax.grad(of_two)(jnp.asarray(_LOGITS[[0, 2]]))
    np.testing.assert_allclose(
        gradient, [[pair[0], 0, pair[1]], [0, 0, 0]], atol=1e-6
    )

  @parameterized.parameters(None, 1, 3 * table_policy.V)
  def test_rows_and_chunks_agree_with_the_padded_batch(self, max_logits):
    batch = table_policy.make_batch()
    rng = np.random.default_rng(0)
    V, shape = table_policy.V, batch.completion_mask.shape
    kept = jnp.asarray(rng.integers(-1, V, (*shape, 3)), jnp.int32)
    params = table_policy.make_params()
    logits = table_policy.completion_logits(
        params, batch.prompt_tokens, None, batch.completion_tokens
    )
    # -1 is none.
    is_kept = jax.nn.one_hot(kept, V).sum(axis=-2)
    is_kept += jax.nn.one_hot(batch.completion_tokens, V)
    logits = jnp.where(is_kept > 0, logits / 0.7, -jnp.inf)
    expected = jnp.take_along_axis(
        jax.nn.log_softmax(logits), batch.completion_tokens[..., None], -1
    )[..., 0]
    packed_rows = jax.tree.map(jnp.asarray, rows.pack(batch, 2).rows)
    read = lambda logits, tokens: logprobs.token_logprobs(
        logits, tokens, temperature=0.7
    )
    run = functools.partial(
        logprobs.map_logits,
        table_policy.MODEL,
        params,
        batch.prompt_tokens,
        batch.prompt_mask,
        batch.completion_tokens,
        read,
        max_logits=max_logits,
        kept_BxKxTxC=kept,
    )
    np.testing.assert_allclose(run(), expected, rtol=1e-5)
    found = logprobs.map_micro_batches(
        lambda indices: run(token_indices_RxL=indices),
        packed_rows,
        jnp.zeros(shape),
    )
    mask = batch.completion_mask
    np.testing.assert_allclose(found * mask, expected * mask, rtol=1e-5)


class EntropyTest(chex.TestCase):

  @chex.variants(with_jit=True, without_jit=True)
  def test_entropy_matches_known_numbers(self):
    fn = self.variant(lambda x: logprobs.entropy(x, temperature=1.0))
    logits = jnp.stack(
        [
            jnp.asarray(_LOGITS),
            jnp.zeros(3),
            jnp.array([0.0, -jnp.inf, -jnp.inf]),
        ]
    )
    expected = [1.5 * np.log(2), np.log(3), 0.0]
    np.testing.assert_allclose(fn(logits), expected, atol=1e-6)

  def test_entropy_has_a_gradient_beside_impossible_tokens(self):
    gradient = jax.grad(lambda x: logprobs.entropy(x, temperature=1.0))(
        jnp.array([1.0, 0.0, -jnp.inf])
    )
    self.assertTrue(np.isfinite(gradient).all())
    self.assertLess(gradient[0], 0)


# Logits a few positions at a time.

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
  @pytest.mark.slow
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

  @parameterized.parameters(
      dict(max_logits=10**9),
      dict(max_logits=B * V),
      dict(max_logits=10**9, sliding_window=3, family="mistral"),
  )
  @pytest.mark.slow
  def test_skipped_tokens_leave_others_unchanged(self, max_logits, **shape):
    model = tiny_model.make_model(**shape)
    params = jax.jit(model.init)(jax.random.key(0))
    inputs = _inputs()
    rng = np.random.default_rng(0)
    mask_BxKxT = np.arange(T) < rng.integers(0, T + 1, (B, K, 1))
    mask_BxKxT[0] = True
    mask_BxKxT[1, 0] = False
    shapes = packing.Packing((B, K, P, T), B)
    rows = packing.pack(shapes, inputs[1], np.asarray(inputs[2]), mask_BxKxT)
    weights = jnp.asarray(mask_BxKxT * rng.normal(size=(B, K, T)))

    def loss(params, rows):
      run = lambda token_indices_RxL: logprobs.map_logits(
          *(model, params, *inputs, _read),
          token_indices_RxL=token_indices_RxL,
          max_logits=max_logits,
      )
      if rows is None:
        out = run(None)
      else:
        names = "logprobs", "entropy"
        zeros = {name: jnp.zeros((B, K, T)) for name in names}
        out = logprobs.map_micro_batches(run, rows, zeros)
      return jnp.sum(weights * (out["logprobs"] + out["entropy"])), out

    grad = jax.jit(jax.grad(loss, has_aux=True))
    expected, expected_out = grad(params, None)
    found, out = grad(params, jax.tree.map(jnp.asarray, rows))
    for name, values in out.items():
      np.testing.assert_allclose(
          values, expected_out[name] * mask_BxKxT, atol=1e-5, err_msg=name
      )
    chex.assert_trees_all_close(found, expected, atol=1e-4, rtol=1e-4)

  def test_the_head_gradient_is_summed_in_float32(self):
    # Each of 1,024 chunks adds 1; a bfloat16 sum would stay at 256.
    length = 1024

    class OneModel:

      def completion_stream(self, params, *inputs):
        return jnp.ones((1, 1, length, 1), jnp.bfloat16)

      def unembed(self, params, stream):
        return stream @ params["head"]

    def total(params):
      tokens = jnp.zeros((1, 1, length), jnp.int32)
      read = lambda logits, tokens: logits[..., 0].astype(jnp.float32)
      return jnp.sum(
          logprobs.map_logits(
              OneModel(), params, tokens[0], tokens[0], tokens, read,
              max_logits=1,
          )
      )  # fmt: skip

    params = {"head": jnp.ones((1, 1), jnp.bfloat16)}
    grad = jax.jit(jax.grad(total))(params)
    self.assertEqual(grad["head"].dtype, jnp.bfloat16)
    self.assertEqual(float(grad["head"][0, 0]), length)

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
