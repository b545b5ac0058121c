# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Experts and their grouped products, on each platform's path."""

import functools
from unittest import mock

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.models.kernels import grouped_matmul
from tba_jax.models.net import experts
from tba_jax.models.net import quantized
from tests.models import hf_case

R, D, F = 24, 16, 8
# Rows of each run: none, in blocks, and rows of no run.
SIZES = np.array([0, 11, 1, 0, 9, 0])
RUN_OF_ROW = np.repeat(np.arange(len(SIZES)), SIZES)


def _arrays(*shapes):
  keys = jax.random.split(jax.random.key(0), len(shapes))
  return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes)]


def _plain(x, kernels):
  rows = jnp.einsum("rd,rfd->rf", x[: len(RUN_OF_ROW)], kernels[RUN_OF_ROW])
  return jnp.pad(rows, ((0, R - len(rows)), (0, 0)))


class GroupedTest(parameterized.TestCase):

  # A CPU has TPU's product, and interprets kernels.
  @parameterized.parameters("cpu", "gpu", "tpu")
  def test_products_and_gradients_are_those_of_each_row(self, platform):
    for name in ("tpu_sums", "gpu_products", "gpu_sums"):
      kernel = functools.partial(getattr(grouped_matmul, name), interpret=True)
      self.enter_context(mock.patch.object(grouped_matmul, name, kernel))
    x, kernels, weights = _arrays((R, D), (len(SIZES), F, D), (R, F))
    sizes = jnp.asarray(SIZES, jnp.int32)

    def own(x, kernels):
      out = grouped_matmul.product(platform, x, kernels, sizes)
      return jnp.sum(out * weights), out

    def plain(x, kernels):
      out = _plain(x, kernels)
      return jnp.sum(out * weights), out

    grad = lambda fn: jax.jit(jax.grad(fn, argnums=(0, 1), has_aux=True))
    expected, found = grad(plain)(x, kernels), grad(own)(x, kernels)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
      np.testing.assert_allclose(a, b, atol=1e-5)
    self.assertFalse(found[0][1][0].any())  # A run without rows.

  @parameterized.parameters(1, 2)
  def test_indivisible_gpu_tiles(self, axis):
    """Runs begin within a tile, and so do columns end."""
    self.enter_context(
        mock.patch.object(grouped_matmul, "GPU_TILE", (16, 16, 32))
    )
    R, E, F, D = 90, 5, 40, 50
    x, kernels, other = _arrays((R, (F, D)[axis - 1]), (E, F, D), (R, F))
    sizes = np.array([0, 37, 1, 0, 33])
    run = np.repeat(np.arange(E), sizes)
    found = grouped_matmul.gpu_products(
        x, kernels, jnp.asarray(sizes), axis, interpret=True
    )
    spec = ("rf,rfd->rd", "rd,rfd->rf")[axis - 1]
    expected = jnp.einsum(spec, x[: len(run)], kernels[run])
    np.testing.assert_allclose(found[: len(run)], expected, atol=1e-4)
    self.assertFalse(found[len(run) :].any())
    (inputs,) = _arrays((R, D))
    sums = grouped_matmul.gpu_sums(
        other, inputs, jnp.asarray(sizes), interpret=True
    )
    is_own = jax.nn.one_hot(run, E)
    expected = jnp.einsum(
        "re,rf,rd->efd", is_own, other[: len(run)], inputs[: len(run)]
    )
    np.testing.assert_allclose(sums, expected, atol=1e-4)

  def test_arrays_too_large_for_gpu_indices_are_refused(self):
    shape = jax.ShapeDtypeStruct
    with self.assertRaisesRegex(ValueError, "lower config.train.micro_batch"):
      jax.eval_shape(
          functools.partial(grouped_matmul.product, "gpu"),
          shape((2**20, 2**11), jnp.bfloat16),
          shape((4, 8, 2**11), jnp.bfloat16),
          shape((4,), jnp.int32),
      )


class ExpertsTest(parameterized.TestCase):

  @parameterized.parameters("qwen3_moe", "gpt_oss", "deepseek_v3")
  def test_few_tokens_get_the_same_of_all_products(self, family):
    """As accelerators compute them; of all experts, and of some."""
    shape = dict(family=family, num_experts=6, experts_per_token=3)
    if family == "deepseek_v3":
      shape = hf_case.DEEPSEEK | shape | dict(num_expert_groups=3)
    config = hf_case.make_config(**shape)
    E, D, F = 6, config.width, config.mlp_width
    x, *arrays = _arrays(
        (2, 5, D), (E, D), (E,), (E, F, D), (E, F, D), (E, D, F), (E, F),
        (E, F), (E, D)
    )  # fmt: skip
    router, kernels, biases = arrays[:2], arrays[2:5], arrays[5:]
    if family == "qwen3_moe":
      router, biases = (router[0], None), None
    elif family == "deepseek_v3":
      router, biases = (router[0], 0.2 * router[1]), None
    apply = jax.jit(
        functools.partial(experts._apply, config=config),
        static_argnames="platform",
    )
    of_all = functools.partial(
        apply, x, None, None, router, kernels, biases, first_expert=0
    )
    whole, chosen = of_all(platform="cpu")
    few, same = of_all(platform="gpu")
    np.testing.assert_allclose(few, whole, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(chosen, same, strict=True)
    for platform in ("cpu", "gpu"):
      of_some = functools.partial(apply, platform=platform)
      pair = lambda i: jax.tree.map(lambda k: k[i : i + 2], (kernels, biases))
      parts = [
          of_some(x, None, None, router, *pair(i), first_expert=i)[0]
          for i in range(0, E, 2)
      ]
      np.testing.assert_allclose(sum(parts), whole, rtol=1e-4, atol=1e-4)
      self.assertGreater(np.abs(parts[1]).max(), 1e-2)

  @parameterized.parameters("cpu", "gpu", "tpu")
  def test_int8_kernels_equal_their_floats(self, platform):
    kernel = functools.partial(grouped_matmul.gpu_products, interpret=True)
    self.enter_context(
        mock.patch.object(grouped_matmul, "gpu_products", kernel)
    )
    config = hf_case.make_config(
        family="gpt_oss", num_experts=6, experts_per_token=3
    )
    E, D, F = 6, config.width, config.mlp_width
    x, *arrays = _arrays(
        (2, 5, D), (E, D), (E,), (E, F, D), (E, F, D), (E, D, F), (E, F),
        (E, F), (E, D)
    )  # fmt: skip
    router, biases = arrays[:2], arrays[5:]
    outs = 2, 2, quantized.OF_INPUTS
    kernels = [*map(quantized.quantize, arrays[2:5], outs)]
    scales = [k.scale[..., None] for k in kernels[:2]]
    scales.append(kernels[2].scale[:, None])
    floats = [k.values * scale for k, scale in zip(kernels, scales)]
    run = functools.partial(
        experts._apply, x, None, None, router, config=config, first_expert=0
    )
    for few in (0, 100):  # Sorted tokens, and all of them.
      with mock.patch.object(experts, "_FEW", few):
        found, _ = run(kernels=kernels, biases=biases, platform=platform)
        expected, _ = run(kernels=floats, biases=biases, platform=platform)
        half = lambda i: jax.tree.map(lambda k: k[i : i + 3], (kernels, biases))
        parts = [
            run(**dict(zip(("kernels", "biases"), half(i))), first_expert=i,
                platform=platform)[0]
            for i in (0, 3)
        ]  # fmt: skip
      np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
      np.testing.assert_allclose(sum(parts), expected, rtol=1e-4, atol=1e-4)
    exact, _ = run(kernels=arrays[2:5], biases=biases, platform="cpu")
    error = np.abs(found - exact).max() / np.abs(exact).max()
    self.assertBetween(error, 1e-4, 0.05)

  @parameterized.product(
      num_expert_groups=[1, 2, 4], groups_per_token=[1, 2], norm_router=[0, 1]
  )
  def test_sigmoid_routes_are_those_of_a_loop_over_tokens(self, **changes):
    if changes["groups_per_token"] > changes["num_expert_groups"]:
      return
    changes["norm_router"] = bool(changes["norm_router"])
    shape = hf_case.DEEPSEEK | dict(experts_per_token=2) | changes
    config = hf_case.make_config(**shape)
    E, G = 8, config.num_expert_groups
    x, router, bias = _arrays((30, config.width), (E, config.width), (E,))
    bias *= 0.3
    weights, chosen = experts.route(x, 0.3 * router, config, bias_E=bias)
    scores = 1 / (1 + np.exp(-0.3 * np.asarray(x, float) @ router.T))
    counts = np.zeros(E)
    for token, own in enumerate(scores):
      biased = own + bias
      best = [sum(sorted(group)[-2:]) for group in biased.reshape(G, -1)]
      groups = np.argsort(best)[-config.groups_per_token :]
      among = [e for e in range(E) if e * G // E in groups]
      expected = sorted(among, key=lambda e: -biased[e])[:2]
      np.testing.assert_array_equal(chosen[token], expected)
      of_chosen = own[expected]
      if config.norm_router:
        of_chosen = of_chosen / of_chosen.sum()
      np.testing.assert_allclose(weights[token], 1.7 * of_chosen, rtol=1e-4)
      counts[expected] += 1
    self.assertGreater(np.count_nonzero(counts), 2)

  def test_given_routes_take_the_place_of_the_choice(self):
    """Weights stay the router's, those of the chosen experts."""
    config = hf_case.make_config(
        family="qwen3_moe", num_experts=6, experts_per_token=2
    )
    x, router = _arrays((7, config.width), (6, config.width))
    weights, chosen = experts.route(x, router, config)
    other = (np.asarray(chosen) + 1) % 6
    given, same = experts.route(x, router, config, other.astype(np.uint8))
    np.testing.assert_array_equal(same, other)
    probs = np.take_along_axis(jax.nn.softmax(x @ router.T), other, 1)
    expected = probs / probs.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(given, expected, rtol=1e-5)
    self.assertGreater(np.abs(given - weights).max(), 1e-2)
