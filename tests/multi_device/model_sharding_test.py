# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The model on eight devices computes what it computes on one.

Runs in a process of its own, for its XLA flag.
"""

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.config import settings as settings_lib
from tba_jax.mesh import sharding
from tba_jax.models import config
from tba_jax.models.net import transformer
from tests.support import cpu_devices
from tests.support import tiny_model

cpu_devices.make(8)

jax.config.update("jax_numpy_rank_promotion", "raise")

B, K, P, T, V = 8, 3, 6, 5, 32
MESH = {"data": 2, "fsdp": 2, "sequence": 1, "tensor": 2}
# Sums over the tensor axis are added in another order; values are near 1.
TOLERANCE = dict(atol=2e-5, rtol=2e-5)


def setUpModule():
  cpu_devices.skip_without(8)


def _model(**overrides) -> transformer.Model:
  if "family" in overrides:
    return tiny_model.make_model(vocab_size=V, **overrides)
  settings = settings_lib.get_config().model
  settings.update(num_kv_heads=2, mlp_width=96, **overrides)
  return transformer.make_model(
      config.ModelConfig.from_config(
          settings, V, pad_id=0, bos_id=None, eos_id=1
      )
  )


def _batch() -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  lengths = rng.integers(1, P + 1, (B, 1))
  return {
      "prompt": rng.integers(2, V, (B, P), dtype=np.int32),
      "mask": (np.arange(P)[None] >= P - lengths).astype(np.float32),
      "completion": rng.integers(2, V, (B, K, T), dtype=np.int32),
  }


def _completion_fn(model):
  return lambda params, batch: model.completion_logits(
      params, batch["prompt"], batch["mask"], batch["completion"]
  )


def _logits_fn(model):
  return lambda params, batch: model.logits(
      params, batch["prompt"], batch["mask"]
  )


class ModelShardingTest(parameterized.TestCase):

  @parameterized.parameters(
      (_completion_fn, {}),
      (_completion_fn, dict(tie_embeddings=True)),
      (_logits_fn, {}),
      (_completion_fn, tiny_model.SHARED),
  )
  def test_logits_and_gradients_equal_one_device(self, make_fn, changes):
    model = _model(**changes)
    params, batch = model.init(jax.random.key(0)), _batch()
    logits_fn = make_fn(model)
    weight = jax.random.normal(
        jax.random.key(1), jax.eval_shape(logits_fn, params, batch).shape
    )

    def loss_fn(params, batch):
      logits = logits_fn(params, batch)
      return jnp.mean(jax.nn.log_softmax(logits) * weight) * V, logits

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    expected = jax.jit(grad_fn)(params, batch)

    mesh = sharding.make_mesh(MESH)
    shardings = sharding.param_shardings(mesh, model)
    for place, leaf in zip(*map(jax.tree.leaves, (shardings, params))):
      # Norms of heads and factors of layers have few numbers.
      self.assertTrue(not place.is_fully_replicated or leaf.size <= 16, place)
    params = jax.device_put(params, shardings)
    batch = sharding.shard_batch(batch, mesh)
    (loss, logits), grads = jax.jit(grad_fn, out_shardings=(None, shardings))(
        params, batch
    )

    chex.assert_trees_all_close(((loss, logits), grads), expected, **TOLERANCE)

  def test_params_are_split_over_mesh(self):
    model = _model()
    mesh = sharding.make_mesh(MESH)
    shardings = sharding.param_shardings(mesh, model)
    params = jax.jit(model.init, out_shardings=shardings)(jax.random.key(0))
    q = params["blocks"]["attention"]["q"]["kernel"]
    self.assertEqual(q.shape, (3, 4, 16, 64))
    self.assertEqual(q.addressable_shards[0].data.shape, (3, 2, 16, 32))
    embedding = params["embed"]["embedding"]
    self.assertEqual(embedding.addressable_shards[0].data.shape, (16, 32))
    # The same numbers as on one device, on any mesh.
    chex.assert_trees_all_close(
        params, model.init(jax.random.key(0)), atol=1e-7
    )

  def test_embeddings_of_layers_are_split_over_mesh(self):
    model = _model(**tiny_model.SHARED)
    shardings = sharding.param_shardings(sharding.make_mesh(MESH), model)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    for name, leaf, whole, part in (
        ("layer_embed", "embedding", (32, 32), (16, 16)),
        ("layer_map", "kernel", (32, 16), (16, 16)),
    ):
      self.assertEqual(shapes[name][leaf].shape, whole)
      self.assertEqual(shardings[name][leaf].shard_shape(whole), part)

  def test_batch_keeps_completions_of_prompt_together(self):
    mesh = sharding.make_mesh(MESH)
    batch = sharding.shard_batch(_batch(), mesh)
    shapes = {s.data.shape for s in batch["completion"].addressable_shards}
    self.assertEqual(shapes, {(2, K, T)})

  @parameterized.parameters(
      dict(data=8, fsdp=1, sequence=1, tensor=1),
      dict(data=2, fsdp=1, sequence=2, tensor=2),
  )
  def test_batch_of_one_device_is_spread_over_all(self, **sizes):
    mesh = sharding.make_mesh(sizes)
    spread, batch = sharding.make_spread(mesh), _batch()
    actual, expected = spread(batch), sharding.shard_batch(batch, mesh)
    for name, array in actual.items():
      self.assertTrue(
          array.sharding.is_equivalent_to(expected[name].sharding, array.ndim)
      )
      self.assertEqual(array.dtype, expected[name].dtype)
    chex.assert_trees_all_equal(actual, expected)
    # Prompts that do not divide are on every device.
    five = spread({"x": np.ones((5, 2), np.float32)})["x"]
    self.assertTrue(five.is_fully_replicated)
    np.testing.assert_array_equal(five, 1.0)
