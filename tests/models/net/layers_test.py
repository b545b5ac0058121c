# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of models/net/layers.py: every form of a product is the plain one."""

import dataclasses

from absl.testing import parameterized
import chex
import jax
from jax.extend import core as jex_core
import jax.numpy as jnp
import pytest

from tba_jax.config import settings as settings_lib
from tba_jax.models import config
from tba_jax.models.net import products
from tba_jax.models.net import transformer
from tests.support import tiny_model

D, F = 6, 8


def _num_products(jaxpr):
  """Returns how many products without batch axes a jaxpr holds, all inside."""
  count = 0
  for equation in jaxpr.eqns:
    if equation.primitive.name == "dot_general":
      _, (batch_axes, _) = equation.params["dimension_numbers"]
      count += not batch_axes
    for inner in jex_core.jaxprs_in_params(equation.params):
      count += _num_products(inner)
  return count


class ProductTest(parameterized.TestCase):

  @parameterized.product(
      lead=((5,), (3, 5), (2, 3, 5)),
      dtypes=(
          (jnp.float32, None),
          (jnp.bfloat16, None),
          (jnp.bfloat16, jnp.float32),
      ),
  )
  @pytest.mark.slow
  def test_values_and_gradients_are_the_plain_products(self, lead, dtypes):
    dtype, out_dtype = dtypes
    keys = jax.random.split(jax.random.key(1), 3)
    x = jax.random.normal(keys[0], (*lead, D), dtype)
    kernel = jax.random.normal(keys[1], (F, D), dtype)
    grad = jax.random.normal(keys[2], (*lead, F), out_dtype or dtype)

    def plain(x, kernel):
      return jnp.einsum(
          "...d,fd->...f", x, kernel, preferred_element_type=out_dtype
      )

    ours = lambda x, kernel: products.product(x, kernel, out_dtype)
    out, backward = jax.vjp(ours, x, kernel)
    expected, expected_backward = jax.vjp(plain, x, kernel)
    # Sums of at most 30 products of numbers near 1, in another order.
    tolerance = 1e-5 if dtype == jnp.float32 else 0.1
    chex.assert_trees_all_close(out, expected, atol=tolerance)
    chex.assert_trees_all_equal_dtypes(out, expected)
    chex.assert_trees_all_close(
        backward(grad), expected_backward(grad), atol=tolerance
    )
    chex.assert_trees_all_equal_dtypes(backward(grad), (x, kernel))

  def test_a_model_computes_none_twice_for_its_gradient(self):
    settings = settings_lib.get_config().model
    settings.update(num_kv_heads=2, num_layers=2, width=32, mlp_width=48)
    model = transformer.make_model(
        config.ModelConfig.from_config(
            settings, 40, pad_id=0, bos_id=None, eos_id=1
        )
    )
    params = jax.eval_shape(model.init, jax.random.key(0))
    tokens_BxP, tokens_BxKxT = jnp.ones((2, 3), int), jnp.ones((2, 4, 5), int)
    stream = lambda params: jnp.sum(
        model.completion_stream(params, tokens_BxP, tokens_BxP, tokens_BxKxT)
        ** 2
    )
    jaxpr = jax.make_jaxpr(jax.grad(stream))(params)
    # A block of Llama has seven kernels, each with its product and the two
    # gradients of it. Attention's own, which may come again, have batch axes.
    self.assertEqual(_num_products(jaxpr.jaxpr), 7 * 3)


class HeadTest(parameterized.TestCase):

  @parameterized.parameters(
      {"tie_embeddings": True},
      {"tie_embeddings": False},
      {"num_labels": 3},
  )
  def test_logits_and_scores_are_not_rounded_to_bfloat16(self, **fields):
    shape = dataclasses.replace(
        tiny_model.make_model().config,
        compute_dtype="bfloat16",
        param_dtype="bfloat16",
        **fields,
    )
    model = transformer.make_model(shape, scalar=bool(shape.num_labels))
    params = tiny_model.init_params(model)
    stream = jax.random.normal(jax.random.key(0), (2, 3, 16), jnp.bfloat16)
    logits = model.unembed(params, stream)
    self.assertEqual(logits.dtype, jnp.float32)
    rounded = logits.astype(jnp.bfloat16).astype(jnp.float32)
    self.assertGreater(jnp.mean(logits != rounded), 0.5)
