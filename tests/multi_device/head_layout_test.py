# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Heads that the mesh does not divide: eight devices compute what one does."""

import dataclasses
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.mesh import sharding
from tba_jax.models import head_layout
from tba_jax.models.kernels import kernels
from tba_jax.models.net import attention
from tba_jax.models.net import sequence
from tba_jax.policy import lora
from tba_jax.sampling import decode
from tba_jax.sampling import requests
from tba_jax.system import hlo
from tests.support import cpu_devices
from tests.support import kernels_on_cpu
from tests.support import packed_gradients
from tests.support import rows
from tests.support import tiny_model

cpu_devices.make(8)

TENSOR = dict(data=1, fsdp=1, sequence=1, tensor=8)
FSDP = dict(data=1, fsdp=2, sequence=1, tensor=4)
SEQUENCE = dict(data=1, fsdp=1, sequence=4, tensor=2)
BOTH = dict(data=1, fsdp=1, sequence=2, tensor=4)
# Query and key-value heads of Qwen2.5 7B, .5B and 1.5B.
_7B = dict(family="qwen2", num_heads=28, num_kv_heads=4)
_HALF = dict(family="qwen2", num_heads=14, num_kv_heads=2)
_OVER = dict(family="qwen2", num_heads=12, num_kv_heads=2)
# Sinks and windows.
_OSS = dict(
    family="gpt_oss",
    num_heads=14,
    num_kv_heads=2,
    sliding_window=3,
    global_layers=(False, True),
    num_experts=8,
    experts_per_token=2,
)
_GATED = dict(tiny_model.STATES, num_heads=14, num_kv_heads=2)


def setUpModule():
  cpu_devices.skip_without(8)


def _model(changes):
  return tiny_model.make_model(**dict(head_dim=8) | changes)


def _mesh(sizes):
  config = tiny_model.make_config()
  config.mesh.update(sizes)
  return config, sharding.make_mesh(config.mesh)


class GradientsTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("28_4", TENSOR, _7B),
      ("14_2", FSDP, _HALF),
      ("32_4", TENSOR, dict(num_heads=32, num_kv_heads=4)),
      ("sinks_and_windows", TENSOR, _OSS),
      ("gates", TENSOR, _GATED),
      ("both_axes", BOTH, _7B),
  )
  def test_packed_rows_have_gradients_of_sequences_alone(
      self, mesh_sizes, changes
  ):
    config, mesh = _mesh(mesh_sizes)
    model = _model(changes)
    params = tiny_model.init_params(model)
    batch = packed_gradients.make_batch(has_turns=True)
    packed = rows.pack(
        batch,
        length=packed_gradients.ROW_LENGTH,
        shards=sharding.num_batch_shards(mesh),
        sequence=config.mesh.sequence,
    )
    places = sharding.param_shardings(mesh, model)
    actual = packed_gradients.of_rows(
        *(config, model, jax.device_put(params, places), packed),
        wrap=lambda fn: sequence.split_tokens(fn, mesh, *sharding.TOKEN_AXES),
    )
    expected = packed_gradients.of_sequences(config, model, params, batch)
    gap = packed_gradients.relative_gap(actual, expected)
    self.assertLess(gap, packed_gradients.TOLERANCE)

  @parameterized.named_parameters(
      ("splash", "splash", _7B),
      ("cudnn", "cudnn", _HALF),
      # 1.33 times the needed heads, which is logged.
      ("over_bound", "splash", _OVER),
      ("with_sinks", "splash", _OSS),
  )
  def test_kernels_of_all_tokens_equal_one_device(self, kernel, changes):
    G = changes["num_kv_heads"]
    M = changes["num_heads"] // G
    _, mesh = _mesh(SEQUENCE)
    parts = sequence.Split(mesh, *sharding.TOKEN_AXES)
    shapes = (2, 12, G, M, 8), (2, 12, G, 8), (2, 12, G, 8), (G, M)
    keys = jax.random.split(jax.random.key(0), 4)
    *inputs, sinks = map(jax.random.normal, keys, shapes)
    inputs.append(sinks if changes is _OSS else None)
    mask = np.arange(12)[None] >= np.array([0, 7])[:, None]

    def gradients(attend):
      def loss(inputs):
        q, k, v, sinks = inputs
        out = jnp.sin(attend(q, k, v, sinks))
        return jnp.sum(jnp.where(mask[..., None, None, None], out, 0.0))

      return jax.jit(jax.value_and_grad(loss))(inputs)

    expected = gradients(
        lambda q, k, v, sinks: attention.attend_causal(
            q, k, v, mask, 0, 1, sinks
        )
    )
    with kernels_on_cpu.patch(kernel):
      actual = gradients(
          lambda q, k, v, sinks: kernels.attend_last(
              kernel, parts, q, k, v, mask, 0, sinks
          )
      )
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=2e-5)

  def test_adapters_have_gradients_of_one_device(self):
    _, mesh = _mesh(FSDP)
    model = _model(_HALF)
    adapters = lora.make(dict(rank=2, alpha=4.0, targets="all"), model)
    base = tiny_model.init_params(model)
    factors = tiny_model.init_params(adapters)
    batch = tiny_model.make_batch(num_prompts=4)

    def total(factors, base):
      logits = model.completion_logits(
          adapters.attach(base, factors),
          *(batch.prompt_tokens, batch.prompt_mask, batch.completion_tokens),
      )
      return jnp.mean(jax.nn.log_softmax(logits)[..., 0])

    grad_fn = jax.value_and_grad(total)
    expected = jax.jit(grad_fn)(factors, base)
    split = sequence.split_tokens(grad_fn, mesh, *sharding.TOKEN_AXES)
    place = lambda x, of: jax.device_put(x, sharding.param_shardings(mesh, of))
    actual = jax.jit(split)(place(factors, adapters), place(base, model))
    chex.assert_trees_all_close(actual, expected, rtol=1e-3, atol=1e-6)


class CostTest(absltest.TestCase):

  def test_devices_share_attention(self):
    _, mesh = _mesh(TENSOR)
    model = _model(dict(_7B, width=32, head_dim=16, max_positions=512))
    tokens = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    batch = tokens(2, 128), tokens(2, 128), tokens(2, 2, 192)
    shapes = sharding.abstract_params(model, mesh)

    def compile_gradient():
      fn = lambda *args: jnp.sum(jnp.sin(model.completion_stream(*args)))
      split = sequence.split_tokens(jax.grad(fn), mesh, *sharding.TOKEN_AXES)
      compiled = jax.jit(split).lower(shapes, *batch).compile()
      flops = hlo.costs(compiled.as_text()).flops
      return flops, compiled.memory_analysis().temp_size_in_bytes

    flops, size = compile_gradient()
    with (
        mock.patch.object(head_layout, "spread", lambda config, _: config),
        mock.patch.object(head_layout, "MOST_OF_KERNELS", 0.0),
    ):
      flops_of_all, size_of_all = compile_gradient()
    # An eighth of 32 heads, instead of all 28.
    self.assertLess(flops / flops_of_all, 0.2)
    self.assertLess(size / size_of_all, 0.3)


class LayoutTest(parameterized.TestCase):

  @parameterized.parameters(
      (_7B, (32, 8)), (_HALF, (16, 8)), (dict(num_heads=16), (16, 8))
  )
  def test_devices_have_whole_heads(self, changes, heads):
    shape = head_layout.spread(_model(changes).config, 8)
    self.assertEqual((shape.num_heads, shape.num_kv_heads), heads)

  @parameterized.parameters(
      (_OVER, "12 query heads with 2 .* would be padded to 16"),
      (dict(num_heads=9, num_kv_heads=3), "9 query heads .* padded to 16"),
      (dict(tiny_model.LATENTS, num_heads=4), "4 .* cannot be copied"),
      (dict(family="olmo3"), "2 .* of olmo3 cannot be copied"),
      (dict(_HALF, head_dim=4), ".* 2 key-value heads nor head_dim 4"),
  )
  def test_other_heads_are_refused(self, changes, problem):
    _, mesh = _mesh(TENSOR)
    model = _model(dict(mlp_width=64) | changes)
    self.assertEqual(head_layout.spread(model.config, 8), model.config)
    with self.assertRaisesRegex(ValueError, f"tensor of size 8: {problem}"):
      sharding.param_shardings(mesh, model)


class DecodeTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("28_4", _7B, "", 4), ("14_2", _HALF, "int8", 2)
  )
  def test_samples_equal_one_device(self, changes, weights, cache_share):
    model = _model(changes)
    settings = decode.Settings(
        temperature=1.0, top_k=0, top_p=1.0, max_prompt_tokens=4,
        max_completion_tokens=8, num_rows=8, chunk_steps=4, stop_ids=(),
        pad_id=0, seed=0, weights=weights,
    )  # fmt: skip
    params = jax.device_get(tiny_model.init_params(model))
    _, mesh = _mesh(TENSOR)
    places = sharding.param_shardings(mesh, model)
    tokens = np.arange(24, dtype=np.int32).reshape(2, 12) % 16
    prompts = [
        requests.Request(row[:4], 4, i, num_completions=3, max_tokens=8)
        for i, row in enumerate(tokens)
    ]
    outs, cache_bytes = [], []
    # The second and third are converted on the host and on the devices.
    for own, places in (
        (params, None),
        (params, places),
        (jax.device_put(params, places), None),
    ):
      sampler = decode.JaxSampler(model, settings)
      own = sampler.put(own, places)
      logprobs = sampler.token_logprobs(own, tokens)
      sampled = sampler.sample(own, prompts, version=0)
      outs.append((logprobs, [dataclasses.asdict(x) for x in sampled]))
      cache = sampler.programs(own).abstract_state.cache
      cache_bytes.append(
          sum(
              np.prod(x.sharding.shard_shape(x.shape))
              for x in jax.tree.leaves(cache)
          )
      )
    one, *others = outs
    for other in others:
      np.testing.assert_allclose(other[0], one[0], atol=1e-5)
      chex.assert_trees_all_close(other[1], one[1], atol=1e-5)
    self.assertEqual(
        [cache_bytes[0] / n for n in cache_bytes[1:]], [cache_share] * 2
    )
