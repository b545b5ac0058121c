# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention, plain and in kernels: one result, many ways."""

import collections
import types
from unittest import mock

from absl import logging
from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
from jax._src import core
from jax._src.cudnn import fused_attention_stablehlo
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.models.kernels import kernels
from tba_jax.models.net import attention
from tba_jax.models.net import sequence
from tba_jax.models.net import transformer
from tests.support import kernels_on_cpu
from tests.support import tiny_model

# Lets cuDNN's attention be traced without it.
_CUDNN_VERSION = mock.patch.object(
    fused_attention_stablehlo, "check_cudnn_version", lambda: 91000
)


def _one_device(platform="cpu", **fields) -> sequence.Split:
  """Returns the split over one device, which may be said to be another."""
  device = types.SimpleNamespace(platform=platform, device_kind="T4", **fields)
  mesh = types.SimpleNamespace(
      devices=np.array([device]), size=1, shape={"sequence": 4}
  )
  return sequence.Split(mesh, (), (), ())


def _attend(name, window, prompt_mask, inputs, sinks=None):
  """Returns causal attention, by kernel or plain."""
  config = tiny_model.make_model().config
  with mock.patch.object(kernels, "choose", lambda *_: name):
    return kernels.attend_causal(
        config, _one_device(), *inputs, prompt_mask, window, sinks
    )


def _inputs(B, L, G, M, Dh):
  shapes = (B, L, G, M, Dh), (B, L, G, Dh), (B, L, G, Dh)
  keys = jax.random.split(jax.random.key(0), len(shapes))
  return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


def _value_and_gradient(name, window, mask_BxP, inputs):
  """Returns outputs and gradients; padding counts in neither."""
  real = mask_BxP[..., None, None, None]

  def loss(inputs):
    inputs, sinks = inputs
    out = _attend(name, window, mask_BxP, inputs, sinks)
    out = jnp.where(real, out, 0.0)
    return jnp.sum(jnp.sin(out)), out

  (_, out), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(inputs)
  return out, grads


class AttentionTest(parameterized.TestCase):

  @parameterized.parameters(
      # The way, G, M, window, whether heads have sinks, and an odd length.
      ("splash", 1, 1, 0),
      ("splash", 1, 3, 140, True),
      ("cudnn", 2, 2, 0),
      ("cudnn", 1, 3, 140),
      ("cudnn", 1, 3, 140, False, 179),
      ("blocks", 2, 2, 0),
      ("blocks", 1, 3, 140, True),
  )
  @pytest.mark.slow
  def test_equals_plain(self, way, G, M, window, has_sinks=False, P=180):
    sinks = jax.random.normal(jax.random.key(1), (G, M)) if has_sinks else None
    inputs = _inputs(2, P, G, M, 8), sinks
    mask_BxP = np.arange(P)[None] >= np.array([0, 19])[:, None]
    expected = _value_and_gradient("plain", window, mask_BxP, inputs)
    with (
        # Several blocks, of which the last is not full.
        mock.patch.object(attention, "BLOCK", 64),
        mock.patch.object(kernels, "BLOCK", 128),
        kernels_on_cpu.patch(way),
    ):
      name = "plain" if way == "blocks" else way
      found = _value_and_gradient(name, window, mask_BxP, inputs)
    chex.assert_trees_all_close(found, expected, atol=2e-5)

  def test_a_sink_is_one_more_key_without_a_value(self):
    q, k, v = _inputs(2, 12, 2, 3, 8)
    sinks = 2 * jax.random.normal(jax.random.key(1), (2, 3))
    mask = np.arange(12)[None] >= np.array([0, 5])[:, None]
    seen = attention.sees(jnp.arange(12), jnp.arange(12), 4)[None]
    seen = seen & mask[:, None]

    def explicit(q, k, v, sinks):
      scores = jnp.einsum("bqgmd,bsgd->bgmqs", q, k) / np.sqrt(8)
      scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
      last = jnp.broadcast_to(
          sinks[None, :, :, None, None], (*scores.shape[:-1], 1)
      )
      weights = jax.nn.softmax(jnp.concatenate([scores, last], -1))
      return jnp.einsum("bgmqs,bsgd->bqgmd", weights[..., :-1], v)

    def run(attend):
      loss = lambda *args: jnp.sum(jnp.sin(attend(*args)))
      return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(q, k, v, sinks)

    found = run(lambda q, k, v, sinks: attention.attend_self(
        q, k, v, seen, sinks
    ))  # fmt: skip
    chex.assert_trees_all_close(found, run(explicit), atol=1e-5)

  @parameterized.parameters(1, 127, 128, 129, 512, 640, 1100, 8191)
  def test_blocks_are_whole(self, length):
    size, padded = kernels.block_sizes(length)
    self.assertEqual((size % 128, padded % size), (0, 0))
    self.assertLessEqual(size, 512)
    self.assertBetween(padded - length, 0, max(127, 0.25 * length))

  def test_scores_of_long_sequences_are_not_held(self):

    def memory(S):
      shapes = jax.eval_shape(lambda: _inputs(1, S, 1, 1, 8))
      mask = np.ones((1, S), bool)
      loss = lambda inputs: _attend("plain", 0, mask, inputs).sum()
      compiled = jax.jit(jax.grad(loss)).lower(shapes).compile()
      return compiled.memory_analysis().temp_size_in_bytes

    with mock.patch.object(attention, "BLOCK", 64):
      self.assertLess(memory(2048), 2.5 * memory(1024))


class ModelTest(parameterized.TestCase):

  @parameterized.product(
      kernel=["splash", "cudnn"],
      shape=[
          dict(family="gemma3_text"),
          dict(family="gpt_oss", num_experts=4, experts_per_token=2),
      ],
  )
  @pytest.mark.slow
  def test_logprobs_equal_those_of_plain(self, kernel, shape):
    model = tiny_model.make_model(
        sliding_window=4, global_layers=(True, False), **shape
    )
    params, batch = tiny_model.init_params(model), tiny_model.make_batch()

    def loss(params):
      logits = model.completion_logits(
          params,
          batch.prompt_tokens,
          batch.prompt_mask,
          batch.completion_tokens,
      )
      values = model.logits(params, batch.prompt_tokens, batch.prompt_mask)
      return jnp.sum(jax.nn.log_softmax(logits)[..., 3]) + jnp.sum(
          jax.nn.log_softmax(values)[..., 3] * batch.prompt_mask
      )

    expected = jax.jit(jax.value_and_grad(loss))(params)
    chosen = mock.patch.object(kernels, "choose", lambda *_: kernel)
    here = mock.patch.object(sequence, "current_split", _one_device)
    with chosen, here, kernels_on_cpu.patch(kernel):
      found = jax.jit(jax.value_and_grad(loss))(params)
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-4)

  @parameterized.product(
      kernel=["splash", "cudnn"], remat=["none", "dots", "full"]
  )
  @pytest.mark.slow
  def test_dots_keeps_what_the_kernel_computed(self, kernel, remat):
    shape = dict(head_dim=8, compute_dtype="bfloat16")
    model = transformer.make_model(
        tiny_model.make_model(**shape).config, remat=remat
    )
    batch = tiny_model.make_batch()
    loss = lambda params: model.completion_logits(
        params,
        batch.prompt_tokens,
        batch.prompt_mask,
        batch.completion_tokens,
    ).sum()
    chosen = mock.patch.object(kernels, "choose", lambda *_: kernel)
    here = mock.patch.object(sequence, "current_split", _one_device)
    params = jax.eval_shape(model.init, jax.random.key(0))
    with chosen, here:
      jaxpr = jax.make_jaxpr(jax.grad(loss))(params)
    found = collections.Counter(_kernel_names(jaxpr.jaxpr))
    # Splash is called of own tokens and of prompts.
    num_calls, names = {
        "splash": (2, [f"splash_mha_{x}_" for x in ("fwd", "dq", "dkv")]),
        "cudnn": (
            1,
            [f"packed_rows_{x}" for x in ("forward", "queries", "keys")],
        ),
    }[kernel]
    count = lambda name: sum(n for k, n in found.items() if name in k)
    expected = [num_calls * (1 + (remat == "full")), num_calls, num_calls]
    self.assertEqual(list(map(count, names)), expected, found)


def _kernel_names(jaxpr):
  """Yields the name of each kernel whose results a jaxpr uses."""
  used = {id(x) for eqn in jaxpr.eqns for x in eqn.invars}
  used.update(map(id, jaxpr.outvars))
  for eqn in jaxpr.eqns:
    if used.isdisjoint(map(id, eqn.outvars)):
      continue
    if eqn.primitive.name == "pallas_call":
      yield eqn.params["name"]
    else:
      for inner in core.jaxprs_in_params(eqn.params):
        yield from _kernel_names(inner)


class ChooseTest(parameterized.TestCase):

  def _choose(self, name, parts, **changes):
    config = tiny_model.make_model(attention=name, **changes).config
    return kernels.choose(config, parts)

  @parameterized.parameters(
      ("tpu", {}, {}, "splash"),
      ("gpu", dict(compute_capability="9.0"), {}, "cudnn"),
      ("gpu", dict(compute_capability="9.0"), dict(head_dim=256), "cudnn"),
      ("gpu", dict(compute_capability="8.0"), dict(head_dim=256), "plain"),
      ("gpu", dict(compute_capability="8.0"), dict(head_dim=20), "plain"),
      ("gpu", dict(compute_capability="7.5"), {}, "plain"),
      ("gpu", dict(compute_capability="gfx942"), {}, "plain"),
      (
          "gpu",
          dict(compute_capability="9.0"),
          dict(compute_dtype="float32"),
          "plain",
      ),
      ("cpu", {}, {}, "plain"),
  )
  def test_auto_follows_the_platform(self, platform, device, model, expected):
    changes = {"compute_dtype": "bfloat16", "head_dim": 8, **model}
    parts = _one_device(platform, **device)
    with mock.patch.object(logging, "warning") as warn:
      self.assertEqual(self._choose("auto", parts, **changes), expected)
    kernels.tell_choice.cache_clear()
    # A plain kernel on an accelerator is told, once.
    told = platform == "gpu" and expected == "plain"
    self.assertEqual(warn.call_count, told)
    self.assertEqual(self._choose("plain", parts, **changes), "plain")

  def test_attention_without_a_mesh_is_plain(self):
    self.assertEqual(self._choose("splash", sequence.WHOLE), "plain")

  def test_wide_heads_of_global_layers_alone_are_plain(self):
    parts = _one_device("gpu", compute_capability="9.0")
    wide = dict(compute_dtype="bfloat16", head_dim=256, global_head_dim=512)
    model = tiny_model.SHARED | wide
    config = tiny_model.make_model(**model).config
    seen = []
    own = lambda name: lambda *args, **kwargs: seen.append(name)
    mask = np.ones((1, 2), bool)
    with (
        mock.patch.object(kernels, "attend_last", own("cudnn")),
        mock.patch.object(kernels.attention, "attend_causal", own("plain")),
        mock.patch.object(logging, "warning"),
    ):
      for head_dim in (256, 512):
        q, k = (jnp.zeros((1, 2, *heads, head_dim)) for heads in ((2, 2), (2,)))
        kernels.attend_causal(config, parts, q, k, k, mask, 0)
    kernels.tell_choice.cache_clear()
    self.assertEqual(seen, ["cudnn", "plain"])
    with self.assertRaisesRegex(ValueError, "up to 256, it is 512"):
      self._choose("cudnn", parts, **model)

  @parameterized.parameters(
      ("splash", "cpu", "'splash' needs a mesh of tpu, this one is of cpu"),
      ("cudnn", "tpu", "'cudnn' needs a mesh of gpu, this one is of tpu"),
  )
  def test_kernel_unsupported_by_mesh_is_refused(self, name, platform, words):
    with self.assertRaisesRegex(ValueError, words):
      self._choose(name, _one_device(platform))

  def test_too_few_heads_use_plain_attention_on_gpus(self):
    mesh = _one_device("gpu", compute_capability="9.0").mesh
    parts = sequence.Split(mesh, (), (), ("sequence",))  # 4 devices.
    model = dict(compute_dtype="bfloat16", head_dim=8)
    with mock.patch.object(logging, "warning"):
      found = [
          self._choose("auto", parts, num_heads=n, num_kv_heads=1, **model)
          for n in (1, 4)
      ]
    self.assertEqual(found, ["plain", "cudnn"])

  @parameterized.parameters(
      ("tpu", "splash", {}),
      ("gpu", "cudnn", dict(compute_capability="9.0")),
  )
  def test_split_tokens_split_heads(self, platform, kernel, device):
    mesh = _one_device(platform, **device).mesh
    parts = sequence.Split(mesh, (), ("sequence",), ())  # 4 devices.
    model = dict(compute_dtype="bfloat16", head_dim=8)
    with mock.patch.object(logging, "warning") as warn:
      found = [
          self._choose("auto", parts, num_heads=n, num_kv_heads=1, **model)
          for n in (4, 6, 1)
      ]
    kernels.tell_choice.cache_clear()
    self.assertEqual(found, [kernel, kernel, "plain"])
    self.assertRegex(
        warn.call_args_list[0].args[0], "1.33 times .* for 6 heads"
    )
    words = "needs fewer than 4 devices, .* for 1 heads with 1 of keys"
    with self.assertRaisesRegex(ValueError, words):
      self._choose(kernel, parts, num_heads=1, num_kv_heads=1, **model)


class CudnnTest(absltest.TestCase):

  def test_calls_of_cudnn_are_lowered_for_cuda(self):
    inputs = [x.astype(jnp.bfloat16) for x in _inputs(2, 40, 2, 2, 8)]
    mask = np.arange(40)[None] >= np.array([0, 9])[:, None]

    def loss(inputs):
      return _attend("cudnn", 5, mask, inputs).astype(jnp.float32).sum()

    with _CUDNN_VERSION:
      text = (
          jax.jit(jax.grad(loss))
          .trace(inputs)
          .lower(lowering_platforms=("cuda",))
          .as_text()
      )
    self.assertEqual(text.count("@__cudnn$fmhaSoftmax("), 1)
    self.assertEqual(text.count("@__cudnn$fmhaSoftmaxBackward("), 1)
    self.assertIn("sliding_window_length\\22: 5", text)
    # Neither a mask nor scores of [queries, keys].
    self.assertNotRegex(text, r"tensor<[0-9x]*40x40x")
