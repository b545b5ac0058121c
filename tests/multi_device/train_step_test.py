# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The step on meshes of eight devices equals the step on one."""

import functools
from unittest import mock

from absl.testing import parameterized
import chex
import jax
import numpy as np

from tba_jax.learning import checkpoint
from tba_jax.learning import train_step
from tba_jax.losses import logprobs
from tba_jax.mesh import sharding
from tba_jax.policy import lora
from tba_jax.policy import reference_policy
from tests.support import cpu_devices
from tests.support import rows
from tests.support import tiny_model

cpu_devices.make(8)

NUM_PROMPTS = 8
MESHES = {
    "one": dict(data=1, fsdp=1, sequence=1, tensor=1),
    "data": dict(data=8, fsdp=1, sequence=1, tensor=1),
    "fsdp": dict(data=1, fsdp=8, sequence=1, tensor=1),
    "mixed": dict(data=2, fsdp=2, sequence=1, tensor=2),
    "sequence": dict(data=2, fsdp=1, sequence=4, tensor=1),
}


def setUpModule():
  cpu_devices.skip_without(8)


def make_run(mesh_name, micro_batch_prompts=NUM_PROMPTS):
  """Returns (config, model, mesh, state) on a mesh."""
  config = tiny_model.make_config()
  config.mesh.update(MESHES[mesh_name])
  config.train.micro_batch_prompts = micro_batch_prompts
  model = tiny_model.make_model()
  mesh = sharding.make_mesh(config.mesh)
  params = tiny_model.init_params(model)
  return config, model, mesh, train_step.init_state(config, model, params, mesh)


@functools.cache
def make_step(mesh_name, micro_batch_prompts=NUM_PROMPTS):
  """Returns the step of `make_run`, compiled once for all tests."""
  config, model, mesh, _ = make_run(mesh_name, micro_batch_prompts)
  return train_step.make_train_step(config, model, mesh)


def run_steps(mesh_name, num_steps=2, **settings):
  """Returns (state, metrics of the last step)."""
  config, _, mesh, state = make_run(mesh_name, **settings)
  step_fn = make_step(mesh_name, **settings)
  for step in range(num_steps):
    batch = tiny_model.make_batch(num_prompts=NUM_PROMPTS, seed=step)
    batch = sharding.shard_batch(batch, mesh)
    state, metrics = step_fn(state, batch)
  return state, metrics


class MultiDeviceTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.one_state, cls.one_metrics = jax.device_get(run_steps("one"))

  @parameterized.parameters(
      ("data", NUM_PROMPTS), ("fsdp", NUM_PROMPTS), ("mixed", 4)
  )
  def test_equals_one_device(self, mesh_name, micro_batch_prompts):
    state, metrics = run_steps(
        mesh_name, micro_batch_prompts=micro_batch_prompts
    )
    chex.assert_trees_all_close(
        jax.device_get(metrics), self.one_metrics, rtol=1e-3, atol=1e-5
    )
    chex.assert_trees_all_close(
        jax.device_get(state.params),
        self.one_state.params,
        rtol=1e-3,
        atol=5e-5,
    )

  @parameterized.parameters("fsdp", "mixed", "sequence")
  def test_bfloat16_equals_one_device(self, mesh_name):
    model = tiny_model.make_model(compute_dtype="bfloat16")
    result = []
    for axes in (MESHES["one"], MESHES[mesh_name]):
      config = tiny_model.make_config()
      config.mesh.update(axes)
      config.train.micro_batch_prompts = NUM_PROMPTS
      devices = sharding.make_mesh(config.mesh)
      params = tiny_model.init_params(model)
      state = train_step.init_state(config, model, params, devices)
      batch = tiny_model.make_batch(num_prompts=NUM_PROMPTS)
      batch = sharding.shard_batch(batch, devices)
      step_fn = train_step.make_train_step(config, model, devices)
      _, metrics = step_fn(state, batch)
      result.append([float(metrics[n]) for n in ("loss", "grad_norm")])
    # Sums of numbers of 8 bits, in another order.
    np.testing.assert_allclose(*result, rtol=0.02)

  def test_adapters_are_sharded_like_their_kernels(self):
    result = {}
    for name in ("one", "mixed"):
      config, model, mesh, _ = make_run(name)
      adapters = lora.make(dict(rank=2, alpha=4.0, targets="all"), model)
      base = jax.device_put(
          tiny_model.init_params(model),
          sharding.param_shardings(mesh, model),
      )
      start = jax.jit(adapters.init)(jax.random.PRNGKey(0))
      state = train_step.init_state(config, adapters, start, mesh)
      b = state.params["blocks"]["mlp"]["up"]["b"]
      self.assertEqual(b.sharding.is_fully_replicated, name == "one")
      step_fn = train_step.make_train_step(
          config, model, mesh, adapters=adapters, base=base
      )
      for step in range(2):
        batch = tiny_model.make_batch(num_prompts=NUM_PROMPTS, seed=step)
        batch = sharding.shard_batch(batch, mesh)
        state, metrics = step_fn(state, batch)
      whole = jax.jit(adapters.merge)(base, state.params)
      result[name] = jax.device_get((metrics, state.params, whole))
    chex.assert_trees_all_close(*result.values(), rtol=1e-3, atol=5e-5)

  def test_distributions_of_teacher_over_devices(self):
    teacher = tiny_model.make_model(width=32, num_heads=8, num_kv_heads=4)
    result = {}
    # Chunks of one token.
    with mock.patch.dict(logprobs.MAX_LOGITS, cpu=1):
      for name in ("one", "sequence"):
        config, model, mesh, state = make_run(name)
        config.loss.name = "gkd"
        step_fn = train_step.make_train_step(
            config,
            model,
            mesh,
            teacher=teacher,
            teacher_params=jax.device_put(
                tiny_model.init_params(teacher, seed=1),
                sharding.param_shardings(mesh, teacher),
            ),
        )
        batch = tiny_model.make_batch(num_prompts=NUM_PROMPTS)
        batch = sharding.shard_batch(batch, mesh)
        state, metrics = step_fn(state, batch)
        result[name] = jax.device_get((metrics, state.params))
    self.assertGreater(result["one"][0]["grad_norm"], 1e-2)
    chex.assert_trees_all_close(*result.values(), rtol=1e-3, atol=5e-5)

  def test_params_and_moments_are_sharded_alike(self):
    _, _, mesh, state = make_run("mixed")
    adam = next(
        s
        for s in jax.tree.leaves(
            state.opt_state, is_leaf=lambda x: hasattr(x, "mu")
        )
        if hasattr(s, "mu")
    )
    sharded = 0
    for param, mu, nu in zip(
        *map(jax.tree.leaves, (state.params, adam.mu, adam.nu)), strict=True
    ):
      self.assertEqual(mu.sharding, param.sharding)
      self.assertEqual(nu.sharding, param.sharding)
      sharded += not param.sharding.is_fully_replicated
    self.assertGreater(sharded, 5)
    self.assertEqual(state.step.sharding, sharding.replicated(mesh))

  @parameterized.parameters(0, 1)
  def test_packed_rows_over_devices_equal_one_device(self, micro_completions):
    batch = tiny_model.make_batch(num_prompts=6, num_completions=8)
    results = []
    for name in ("one", "data", "mixed", "fsdp"):  # Six prompts on eight.
      config, model, mesh, state = make_run(name)
      config.train.completions_per_prompt = 8
      config.train.prompts_per_batch = 6
      config.train.micro_batch_prompts = 1
      config.train.micro_batch_completions = micro_completions
      own = batch
      if name != "one":
        shards, sequence = sharding.num_batch_shards(mesh), config.mesh.sequence
        own = rows.pack(
            batch, 1, micro_completions, shards=shards, sequence=sequence
        )
        self.assertGreater(rows.num_micro_batches(own), name != "data")
      step_fn = train_step.make_train_step(config, model, mesh)
      state, metrics = step_fn(state, sharding.shard_batch(own, mesh))
      results.append(jax.device_get((state.params, metrics)))
    for found in results[1:]:
      chex.assert_trees_all_close(found, results[0], rtol=1e-3, atol=5e-5)

  def test_checkpoint_restores_onto_another_mesh(self):
    directory = self.create_tempdir().full_path
    state, _ = run_steps("mixed", num_steps=1, micro_batch_prompts=4)
    saver = checkpoint.Checkpointer(directory, keep=1)
    saver.save(1, state, {"cursor": 1}, wait=True)
    config, model, mesh, _ = make_run("fsdp")
    abstract = train_step.abstract_state(config, model, mesh)
    moved, host = saver.restore(abstract)
    saver.close()
    self.assertEqual(host["cursor"], 1)
    chex.assert_trees_all_equal(jax.device_get(moved), jax.device_get(state))
    for leaf, expected in zip(
        jax.tree.leaves(moved), jax.tree.leaves(abstract), strict=True
    ):
      self.assertEqual(leaf.sharding, expected.sharding)
    # Training continues there as here.
    batch = tiny_model.make_batch(num_prompts=NUM_PROMPTS, seed=1)
    moved, _ = make_step("fsdp")(moved, batch)
    chex.assert_trees_all_close(
        jax.device_get(moved.params),
        self.one_state.params,
        rtol=1e-3,
        atol=5e-5,
    )

  def test_reference_stays_sharded_and_agrees(self):
    config, model, mesh, state = make_run("mixed")
    batch = tiny_model.make_batch(num_prompts=NUM_PROMPTS)
    run = lambda params, batch: reference_policy.Reference(
        model, params, temperature=1.0
    ).logprobs(
        batch.prompt_tokens,
        batch.prompt_mask,
        batch.completion_tokens,
        batch.completion_mask,
    )
    on_mesh = run(state.params, sharding.shard_batch(batch, mesh))
    np.testing.assert_allclose(
        on_mesh, run(tiny_model.init_params(model), batch), atol=1e-5
    )
    self.assertLen(on_mesh.sharding.device_set, 8)
