# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every way through a model computes the same."""

import dataclasses
import functools

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.models.net import transformer
from tests.models import hf_case
from tests.support import tiny_model

B, K, P, T, V = 3, 4, 7, 5, hf_case.VOCAB
_LENGTHS = np.array([7, 3, 1])
# float32 sums in another order; logits are near 1.
_VALUES = dict(atol=1e-5, rtol=0.0)


@functools.cache
def _make(**overrides):
  """Returns a model and random params; shared, so that it compiles once."""
  model = transformer.make_model(hf_case.make_config(**overrides))
  params = tiny_model.init_params(model)
  model = dataclasses.replace(
      model,
      logits=jax.jit(model.logits),
      completion_logits=jax.jit(model.completion_logits),
      prefill=jax.jit(model.prefill),
  )
  return model, params


def _relative(tree, reference):
  """Returns each leaf over the largest entry of its reference.

  Without rotary positions a key's bias changes nothing: its gradient is noise.
  """
  size = lambda r: jnp.maximum(jnp.max(jnp.abs(r)), 1.0)
  return jax.tree.map(lambda x, r: x / size(r), tree, reference)


def _tokens(seed=0):
  rng = np.random.default_rng(seed)
  prompt = rng.integers(2, V, (B, P), dtype=np.int32)
  mask = (np.arange(P)[None] >= P - _LENGTHS[:, None]).astype(np.float32)
  completion = rng.integers(2, V, (B, K, T), dtype=np.int32)
  return prompt, mask, completion


def _repeated(prompt, mask, completion):
  """Returns the K full sequences of each prompt and their mask [B * K, L]."""
  repeat = lambda x: np.repeat(x[:, None], K, axis=1)
  tokens = np.concatenate([repeat(prompt), completion], axis=-1)
  full_mask = np.concatenate(
      [repeat(mask), np.ones(completion.shape, np.float32)], axis=-1
  )
  return tokens.reshape(B * K, P + T), full_mask.reshape(B * K, P + T)


def _reference_logits(model, params, prompt, mask, completion):
  tokens, full_mask = _repeated(prompt, mask, completion)
  logits = model.logits(params, tokens, full_mask)
  return logits[:, P - 1 : -1].reshape(B, K, T, V)


class LogitsTest(parameterized.TestCase):

  def test_has_right_shapes_dtypes_and_stacked_layers(self):
    model, params = _make()
    prompt, mask, completion = _tokens()
    logits = model.completion_logits(params, prompt, mask, completion)
    chex.assert_shape(logits, (B, K, T, V))
    chex.assert_type(logits, jnp.float32)
    for leaf in jax.tree.leaves(params["blocks"]):
      self.assertEqual(leaf.shape[0], 2)
    for leaf, axes in zip(
        jax.tree.leaves(params),
        jax.tree.leaves(
            model.logical_axes, is_leaf=lambda x: isinstance(x, tuple)
        ),
        strict=True,
    ):
      self.assertLen(axes, leaf.ndim)

  def test_params_are_plain_dicts_of_arrays(self):
    _, params = _make()

    def check(node):
      if isinstance(node, dict):
        for key, child in node.items():
          self.assertIs(type(key), str)
          check(child)
      else:
        self.assertIsInstance(node, jax.Array)

    self.assertIs(type(params), dict)
    check(params)

  def test_init_is_a_function_of_the_key(self):
    init = jax.jit(_make()[0].init)
    first, again, second = (init(jax.random.key(i)) for i in (3, 3, 4))
    chex.assert_trees_all_equal(first, again)
    kernel = lambda p: p["blocks"]["mlp"]["up"]["kernel"]
    self.assertGreater(jnp.max(jnp.abs(kernel(first) - kernel(second))), 0.1)
    # Layers start different from each other.
    self.assertGreater(
        jnp.max(jnp.abs(kernel(first)[0] - kernel(first)[1])), 0.1
    )

  def test_padding_changes_no_logits(self):
    model, params = _make()
    prompt, _, _ = _tokens()
    alone = model.logits(params, prompt[:1, :4], np.ones((1, 4)))
    garbage = np.full((1, 3), 9, np.int32)
    pad = np.zeros((1, 3))
    left = model.logits(
        params,
        np.concatenate([garbage, prompt[:1, :4]], 1),
        np.concatenate([pad, np.ones((1, 4))], 1),
    )
    right = model.logits(
        params,
        np.concatenate([prompt[:1, :4], garbage], 1),
        np.concatenate([np.ones((1, 4)), pad], 1),
    )
    chex.assert_trees_all_close(left[:, 3:], alone, **_VALUES)
    chex.assert_trees_all_close(right[:, :4], alone, **_VALUES)
    self.assertTrue(jnp.all(jnp.isfinite(left)))

  def test_is_causal(self):
    model, params = _make()
    prompt, _, _ = _tokens()
    changed = prompt.copy()
    changed[:, 4] = (changed[:, 4] + 1) % V
    mask = np.ones((B, P))
    a, b = (model.logits(params, x, mask) for x in (prompt, changed))
    chex.assert_trees_all_close(a[:, :4], b[:, :4], **_VALUES)
    self.assertGreater(jnp.min(jnp.max(jnp.abs(a - b)[:, 4:], axis=-1)), 1e-3)

  def test_an_empty_row_is_finite_with_finite_gradients(self):
    model, params = _make()
    model = transformer.make_model(model.config)
    prompt, mask, completion = _tokens()
    mask[1] = 0.0

    def loss_fn(params):
      return model.completion_logits(params, prompt, mask, completion).sum()

    value, grads = jax.jit(jax.value_and_grad(loss_fn))(params)
    chex.assert_tree_all_finite((value, grads))


class CompletionLogitsTest(parameterized.TestCase):

  @parameterized.parameters(
      dict(tie_embeddings=True, num_kv_heads=1),
      *hf_case.FAMILIES,
  )
  @pytest.mark.slow
  def test_values_and_gradients_equal_full_sequences(self, **settings):
    model, params = _make(**settings)
    model = transformer.make_model(model.config)  # Uncompiled.
    prompt, mask, completion = _tokens()
    weight = jax.random.normal(jax.random.key(2), (B, K, T, V))

    def loss_fn(logits_fn):
      def fn(params):
        logits = logits_fn(params, prompt, mask, completion)
        return jnp.sum(jax.nn.log_softmax(logits) * weight), logits

      return fn

    grad = lambda fn: jax.jit(jax.value_and_grad(loss_fn(fn), has_aux=True))(
        params
    )
    reference_fn = lambda *args: _reference_logits(model, *args)
    (_, logits), grads = grad(model.completion_logits)
    (_, ref_logits), ref_grads = grad(reference_fn)
    chex.assert_trees_all_close(logits, ref_logits, **_VALUES)
    chex.assert_trees_all_close(
        _relative(grads, ref_grads), _relative(ref_grads, ref_grads), atol=1e-5
    )

  def test_rows_do_not_see_each_other(self):
    model, params = _make()
    prompt, mask, completion = _tokens()
    logits = model.completion_logits(params, prompt, mask, completion)
    changed = completion.copy()
    changed[0, 1] = (changed[0, 1] + 1) % V
    other = model.completion_logits(params, prompt, mask, changed)
    same = np.ones((B, K), bool)
    same[0, 1] = False
    chex.assert_trees_all_close(logits[same], other[same], **_VALUES)
    self.assertGreater(jnp.max(jnp.abs(logits - other)[0, 1]), 1e-3)

  def test_tokens_after_a_completion_change_nothing_before(self):
    model, params = _make()
    prompt, mask, completion = _tokens()
    padded = completion.copy()
    padded[..., 3:] = 0
    a, b = (
        model.completion_logits(params, prompt, mask, c)
        for c in (completion, padded)
    )
    # Entry 3 predicts token 3 from the tokens before it.
    chex.assert_trees_all_close(a[:, :, :4], b[:, :, :4], **_VALUES)

  def test_serves_completions_of_one_token(self):
    model, params = _make()
    prompt, mask, completion = _tokens()
    full = model.completion_logits(params, prompt, mask, completion)
    short = model.completion_logits(params, prompt, mask, completion[..., :1])
    chex.assert_trees_all_close(short, full[:, :, :1], **_VALUES)

  def test_bfloat16_compute_stays_close(self):
    model, params = _make()
    half = transformer.make_model(
        dataclasses.replace(model.config, compute_dtype="bfloat16")
    )
    prompt, mask, completion = _tokens()
    a = model.completion_logits(params, prompt, mask, completion)
    b = jax.jit(half.completion_logits)(params, prompt, mask, completion)
    chex.assert_type(b, jnp.float32)
    # bfloat16 has 8 bits: some percent of logits near 1, two layers deep.
    chex.assert_trees_all_close(a, b, atol=0.15)
    self.assertGreater(jnp.max(jnp.abs(a - b)), 0.0)


class DecodeTest(parameterized.TestCase):

  @parameterized.parameters(
      dict(tie_embeddings=True),
      *hf_case.FAMILIES,
      # The layouts of accelerators.
      dict(num_parts=1),
      dict(num_parts=2, num_kv_heads=4),
      dict(family="gpt_oss", num_parts=1, num_experts=4, experts_per_token=2),
      dict(hf_case.DEEPSEEK, num_parts=1),
      dict(hf_case.GEMMA4, num_parts=1),
      dict(hf_case.GEMMA4, num_parts=2),
  )
  @pytest.mark.slow
  def test_decoding_equals_full_sequences(self, num_parts=None, **settings):
    """Rows have their own positions and columns; rings begin in the middle."""
    model, params = _make(**settings)
    prompt, mask, completion = _tokens()
    expected = np.asarray(
        _reference_logits(model, params, prompt, mask, completion)
    ).reshape(B * K, T, V)
    decode_params = model.decode_params(params, P + T)
    logits_BxV, prompt_cache = model.prefill(decode_params, prompt, mask)
    chex.assert_trees_all_close(
        logits_BxV, expected.reshape(B, K, T, V)[:, 0, 0], **_VALUES
    )

    rows = np.repeat(np.arange(B), K)
    # Old content must not matter: rows are reused.
    cache = jax.tree.map(
        lambda leaf: leaf + 100, model.init_cache(B * K, (P, T + 1), num_parts)
    )
    cache = model.fill_cache(cache, prompt_cache, rows)
    cache_mask = np.concatenate([mask[rows], np.zeros((B * K, T + 1))], axis=1)
    tokens = completion.reshape(B * K, T)
    step = jax.jit(chex.assert_max_traces(model.decode_step, 1))
    chex.clear_trace_counter()
    for t in range(T - 1):
      columns_R = P + (t + 4 + np.arange(B * K)) % (T + 1)
      cache_mask[np.arange(B * K), columns_R] = 1.0
      logits, cache = step(
          decode_params,
          tokens[:, t],
          _LENGTHS[rows] + t,
          cache,
          cache_mask,
          columns_R.astype(np.int32),
      )
      chex.assert_trees_all_close(logits, expected[:, t + 1], **_VALUES)

  @parameterized.parameters(
      dict(family="gemma3_text", sliding_window=3),
      dict(num_parts=2, num_kv_heads=4),
      dict(family="gpt_oss", num_parts=1, num_experts=4, experts_per_token=2),
      hf_case.DEEPSEEK,
      dict(hf_case.DEEPSEEK, num_parts=1),
      hf_case.GEMMA4,
      dict(hf_case.GEMMA4, num_parts=2),
  )
  @pytest.mark.slow
  def test_tokens_fed_at_once_are_those_of_steps(
      self, num_parts=None, **settings
  ):
    model, params = _make(**settings)
    prompt, mask, completion = _tokens()
    decode_params = model.decode_params(params, P + T)
    _, prompt_cache = model.prefill(decode_params, prompt, mask)
    rows = np.repeat(np.arange(B), K)
    # Two blocks of a row's own; old content must not matter.
    cache = jax.tree.map(
        lambda leaf: leaf + 100,
        model.init_cache(B * K, (P, 2, T - 2), num_parts),
    )
    cache = model.fill_cache(cache, prompt_cache, rows)
    tokens = completion.reshape(B * K, T)
    columns = np.broadcast_to(np.arange(T), (B * K, T))
    seen = lambda last: np.concatenate(
        [mask[rows] > 0, columns <= last[:, None]], axis=1
    )
    # Rows feed T - 2 tokens or one less; the last entry is padding.
    counts = T - 2 - np.arange(B * K) % 2
    num_fed = T - 1
    cache = jax.jit(model.feed)(
        decode_params,
        tokens[:, :num_fed],
        _LENGTHS[rows][:, None] + columns[:, :num_fed],
        cache,
        np.stack([seen(np.full(B * K, t)) for t in range(num_fed)], axis=1),
        np.where(
            columns[:, :num_fed] < counts[:, None],
            P + columns[:, :num_fed],
            P + T,
        ),
    )
    logits, _ = jax.jit(model.decode_step)(
        decode_params,
        tokens[np.arange(B * K), counts],
        _LENGTHS[rows] + counts,
        cache,
        seen(counts),
        P + counts,
    )
    expected = np.asarray(
        _reference_logits(model, params, prompt, mask, completion)
    ).reshape(B * K, T, V)
    chex.assert_trees_all_close(
        logits, expected[np.arange(B * K), counts + 1], **_VALUES
    )

  @parameterized.parameters({}, dict(family="gpt2", num_kv_heads=4))
  def test_matrices_are_cast_once_for_all_steps(self, **settings):
    model = tiny_model.make_model(compute_dtype="bfloat16", **settings)
    params = tiny_model.init_params(model)
    cast = model.decode_params(params, 16)
    for leaf in jax.tree.leaves((cast.layers, cast.others)):
      dtype = jnp.bfloat16 if leaf.ndim > 1 else jnp.float32
      self.assertEqual(leaf.dtype, dtype, leaf.shape)
    self.assertNotIn("blocks", cast.others)
    as_they_are = dataclasses.replace(
        cast,
        layers=[
            jax.tree.map(lambda x, n=n: x[n], params["blocks"])
            for n in range(2)
        ],
        others={k: v for k, v in params.items() if k != "blocks"},
    )
    step = jax.jit(model.decode_step)
    inputs = (
        np.arange(3),
        np.full(3, 5, np.int32),
        model.init_cache(3, (4, 8)),
        np.ones((3, 12), bool),
        np.int32(5),
    )
    chex.assert_trees_all_equal(step(cast, *inputs), step(as_they_are, *inputs))

  @parameterized.parameters(
      # Keys and values of a row, from those of a prompt [P, G, Dh].
      (None, {"k_last": (1, 2, 0), "v": (1, 0, 2)}, lambda x: x),
      (1, {"k": (0, 1, 2), "v": (0, 1, 2)}, lambda x: x.reshape(1, P, -1)),
  )
  def test_a_row_without_a_prompt_keeps_its_cache(self, parts, axes, merge):
    model, params = _make()
    prompt, mask, _ = _tokens()
    _, prompt_cache = model.prefill(
        model.decode_params(params, P), prompt, mask
    )
    cache = jax.tree.map(
        lambda leaf: leaf + 5.0, model.init_cache(3, (P, T), parts)
    )
    first, own = model.fill_cache(cache, prompt_cache, np.array([2, -1, 0]))
    for n, layer in enumerate(first["layers"]):
      self.assertEqual(set(layer), set(axes))
      for name, leaf in layer.items():
        expected = np.full(leaf.shape, 5.0, np.float32)
        for row, slot in ((0, 2), (2, 0)):
          of_prompt = np.asarray(prompt_cache["layers"][n][name[0]][slot])
          expected[row] = merge(of_prompt.transpose(axes[name]))
        np.testing.assert_array_equal(leaf, expected)
    chex.assert_trees_all_equal(own, cache[1])
