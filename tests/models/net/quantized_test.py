# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Matrices of int8: errors, and log-probs of the model that sampled."""

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.losses import logprobs as logprobs_lib
from tba_jax.models.net import quantized
from tba_jax.sampling import decode
from tests.support import sampler_case
from tests.support import tiny_model

_SHAPES = (
    dict(),
    dict(tie_embeddings=True),
    dict(family="gpt2", num_kv_heads=4, tie_embeddings=True),
    dict(family="gpt_neox", num_kv_heads=4),
    dict(family="ministral3", query_growth=0.5, rope_original_positions=3),
    dict(family="olmo3", sliding_window=3),
    dict(family="smollm3", rotary_layers=(True, False)),
    tiny_model.STATES,
    dict(family="qwen3_moe", num_experts=4, experts_per_token=2),
    dict(family="gpt_oss", num_experts=4, experts_per_token=2),
    tiny_model.BOTH,
    tiny_model.LATENTS,
)
_EXPERTS = tuple(f"['mlp']['{name}']" for name in ("gate", "up", "down"))
_is_quantized = lambda x: isinstance(x, quantized.Quantized)


def _plain(params):
  """Returns params with floats in place of those that are quantized."""

  def plain(x):
    if not _is_quantized(x):
      return x
    num_in = x.values.ndim - x.scale.ndim
    scale = np.asarray(x.scale).reshape(*x.scale.shape, *[1] * num_in)
    if x.scale.shape != x.shape[: x.scale.ndim]:  # An expert's inputs.
      scale = np.asarray(x.scale)[:, None]
    return np.asarray(x.values, np.float32) * scale

  return jax.tree.map(plain, params, is_leaf=_is_quantized)


def _stacked(decode_params):
  """Returns the model's params from those of a decoder."""
  layers = _plain(decode_params.layers)
  blocks = {
      name: jax.tree.map(
          lambda *leaves: np.stack(leaves),
          *(layer[name] for layer in layers if name in layer),
      )
      for name in set().union(*layers)
  }
  return {**_plain(decode_params.others), "blocks": blocks}


def _far_from_uniform(model):
  return jax.tree.map(
      lambda x: 2.0 * x if x.ndim > 1 else x, tiny_model.init_params(model)
  )


class QuantizedTest(parameterized.TestCase):

  def test_known_numbers(self):
    kernel = jnp.array([[254.0, -3.0, 0.9, 1.1], [0.0, 0.0, 0.0, 0.0]])
    found = quantized.quantize(kernel, 1)
    np.testing.assert_array_equal(found.values, [[127, -2, 0, 1], [0] * 4])
    np.testing.assert_array_equal(found.scale, [2.0, 0.0])
    self.assertEqual(found.values.dtype, jnp.int8)
    chex.assert_trees_all_equal(jax.jit(quantized.quantize, static_argnums=1)(
        kernel, 1), found)  # fmt: skip

  @parameterized.parameters(1, 2)
  def test_rounding_is_off_by_half_a_scale(self, num_out):
    kernel = jax.random.normal(jax.random.key(0), (6, 8, 40), jnp.float32)
    # Channels differ a thousandfold.
    kernel *= 10.0 ** jnp.linspace(-2, 1, 6)[:, None, None]
    found = quantized.quantize(kernel, num_out)
    self.assertEqual(found.scale.shape, kernel.shape[:num_out])
    axes = tuple(range(num_out, 3))
    scale = np.expand_dims(np.asarray(found.scale), axes)
    np.testing.assert_allclose(
        scale, np.abs(kernel).max(axes, keepdims=True) / 127, rtol=1e-6
    )
    error = np.abs(_plain(found) - kernel)
    self.assertLessEqual((error / scale).max(), 0.5 + 1e-4)
    # It does round.
    self.assertGreater((error / scale).mean(), 0.2)

  def test_scales_of_inputs_are_per_expert(self):
    kernel = jax.random.normal(jax.random.key(0), (3, 5, 8), jnp.float32)
    found = quantized.quantize(kernel, quantized.OF_INPUTS)
    expected = np.abs(kernel).max(axis=1) / 127
    np.testing.assert_allclose(found.scale, expected, rtol=1e-6)
    error = np.abs(_plain(found) - kernel) / expected[:, None]
    self.assertLessEqual(error.max(), 0.5 + 1e-4)

  @parameterized.parameters(*_SHAPES)
  def test_all_matrices_of_a_step_are_rounded_and_nothing_else(self, **shape):
    model = tiny_model.make_model(**shape)
    cast = model.decode_params(tiny_model.init_params(model), 16)
    found = model.quantize(cast)
    is_held = jax.tree.map(_is_quantized, found, is_leaf=_is_quantized)
    for path, leaf in jax.tree_util.tree_leaves_with_path(is_held):
      name = jax.tree_util.keystr(path)
      is_table = "embed" in name and not model.config.tie_embeddings
      is_matrix = "kernel" in name or "embed" in name
      # Those of experts; decode steps use `kv_b` in other products.
      is_matrix |= name.endswith(_EXPERTS)
      is_matrix &= "kv_b" not in name
      self.assertEqual(leaf, is_matrix and not is_table, name)
    self.assertTrue(
        _is_quantized(found.others["embed"]["embedding"])
        if model.config.tie_embeddings
        else _is_quantized(found.others["head"]["kernel"])
    )

  @parameterized.parameters(*_SHAPES)
  @pytest.mark.slow
  def test_recorded_logprobs_are_those_of_the_rounded_model(self, **shape):
    model = tiny_model.make_model(**shape)
    params = _far_from_uniform(model)
    sampler = sampler_case.make(model, max_completion_tokens=8, weights="int8")
    held = sampler.put(params)
    rng = np.random.default_rng(0)
    requests = [
        decode.Request(rng.integers(2, tiny_model.VOCAB, 3), i, 0, 4)
        for i in range(4)
    ]
    found = sampler.sample(held, requests, version=0)
    sampled = np.stack([completions.logprobs for completions in found])
    lengths = np.stack([completions.lengths for completions in found])
    mask = np.arange(8) < lengths[..., None]
    logprobs = jax.jit(
        lambda params: logprobs_lib.completion_logprobs(
            model,
            params,
            np.stack([request.prompt_tokens for request in requests]),
            np.ones((4, 3), np.float32),
            np.stack([completions.tokens for completions in found]),
            temperature=1.0,
        )
    )
    gap = lambda params: np.abs(np.asarray(logprobs(params)) - sampled)[mask]
    self.assertLess(gap(_stacked(held)).max(), 1e-4)
    # They are not those of the trainer.
    self.assertGreater(gap(params).mean(), 1e-3)

  def test_host_and_devices_round_to_the_same_bits(self):
    model = tiny_model.make_model(compute_dtype="bfloat16", tie_embeddings=True)
    params = tiny_model.init_params(model)
    sampler = sampler_case.make(model, weights="int8")
    chex.assert_trees_all_equal(
        sampler.put(jax.device_get(params)), sampler.put(params)
    )
    # Params that are there in this form stay.
    held = sampler.put(params)
    self.assertIs(sampler.put(held), held)

  def test_newer_params_are_rounded_too(self):
    model = tiny_model.make_model()
    params = _far_from_uniform(model)
    newer_params = jax.tree.map(lambda x: 1.5 * x, params)
    sampler = sampler_case.make(
        model,
        max_completion_tokens=8,
        stop_ids=(),
        weights="int8",
        recompute_cache=True,
    )
    newer = iter([None, (1, sampler.put(newer_params))])
    request = decode.Request(np.array([2, 3, 4]), 0, 0, 8)
    (found,) = sampler.sample(
        params, [request], version=0, newer=lambda: next(newer, None)
    )
    whole = np.concatenate(
        [np.tile(request.prompt_tokens, (8, 1)), found.tokens], axis=1
    )
    for version, own in enumerate((params, newer_params)):
      expected = np.asarray(sampler.token_logprobs(own, whole))[:, 2:]
      is_own = np.asarray(found.token_versions) == version
      self.assertTrue(is_own.any())
      self.assertLess(np.abs(expected - found.logprobs)[is_own].max(), 1e-4)
