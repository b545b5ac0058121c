# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Params are published in the dtypes of the setting, or without a loss."""

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.learning import published
from tests.support import base_config
from tests.support import tiny_model


class PublishedTest(parameterized.TestCase):

  @parameterized.parameters(
      # publish.dtype, compute dtype on a backend, rank -> matrices, vectors.
      ("bfloat16", "float32", 0, "bfloat16", "bfloat16"),
      ("", "bfloat16", 0, "float32", "float32"),
      ("auto", "bfloat16", 0, "bfloat16", "float32"),
      ("auto", "float32", 0, "float32", "float32"),
      # Adapters are merged in float32.
      ("auto", "bfloat16", 2, "float32", "float32"),
  )
  def test_publishes_floats_by_the_setting(
      self, dtype, compute, rank, matrices, vectors
  ):
    params = {
        "embed": jnp.ones((3, 2)) / 3,
        "norm": jnp.ones((3,)) / 3,
        "blocks": {"w": jnp.ones((2, 3, 4)), "norm": jnp.ones((2, 3))},
        "n": jnp.arange(2),
        "probe": {"logprobs": jnp.ones((2, 3)) / 3},
    }
    dtypes = published.published_dtypes(
        base_config.make(
            publish__dtype=dtype, model__compute_dtype=compute, lora__rank=rank
        )
    )
    copy = published.snapshot(params, dtypes=dtypes)
    self.assertEqual(
        {
            name: leaf.dtype.name
            for name, leaf in published.by_path(copy).items()
        },
        {
            "['blocks']['norm']": vectors,
            "['blocks']['w']": matrices,
            "['embed']": matrices,
            "['n']": "int32",
            "['norm']": vectors,
            "['probe']['logprobs']": "float32",
        },
    )

  def test_auto_keeps_sampler_precision(self):
    model = tiny_model.make_model(
        family="qwen2", compute_dtype="bfloat16", num_kv_heads=2
    )
    params = tiny_model.init_params(model)
    auto = published.published_dtypes(
        base_config.make(publish__dtype="auto", model__compute_dtype="auto"),
        backend="tpu",
    )
    copy = published.snapshot(params, dtypes=auto)
    size = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    self.assertLess(size(copy), 0.6 * size(params))
    tokens, mask = np.full((2, 5), 3), np.ones((2, 5), np.float32)
    for run in (
        lambda params: model.last_logits(params, tokens, mask),
        lambda params: model.decode_params(params, 8),
    ):
      chex.assert_trees_all_equal(run(copy), run(params))
