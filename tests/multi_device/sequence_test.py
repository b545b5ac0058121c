# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism: the step of one device, in less memory per device."""

import dataclasses
import functools
from unittest import mock

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax import types
from tba_jax.learning import train_step
from tba_jax.losses import logprobs
from tba_jax.mesh import sharding
from tba_jax.models.kernels import kernels
from tba_jax.models.net import heads
from tba_jax.models.net import sequence
from tba_jax.models.net import transformer
from tba_jax.policy import lora
from tba_jax.policy import reference_policy
from tba_jax.system import hlo
from tests.support import cpu_devices
from tests.support import kernels_on_cpu
from tests.support import packed_gradients
from tests.support import rows
from tests.support import tiny_model

cpu_devices.make(8)

NUM_PROMPTS = 4
# Prompts of 5 tokens and completions of 6: neither divides by 4.
MESHES = {
    "one": dict(data=1, fsdp=1, sequence=1, tensor=1),
    "sequence": dict(data=1, fsdp=1, sequence=4, tensor=1),
    "mixed": dict(data=2, fsdp=1, sequence=2, tensor=2),
    "fsdp": dict(data=1, fsdp=4, sequence=2, tensor=1),
}
# Layers of alternating windows.
_LOCAL = dict(
    family="gemma3_text", sliding_window=3, global_layers=(False, True)
)
# Sinks, and experts with biases.
_OSS = dict(
    family="gpt_oss",
    sliding_window=3,
    global_layers=(False, True),
    num_experts=4,
    experts_per_token=2,
)
# Sums are added in another order.
TOLERANCE = dict(rtol=1e-3, atol=5e-5)


def setUpModule():
  cpu_devices.skip_without(8)


def make_config(mesh_name, **changes):
  config = tiny_model.make_config(**changes)
  config.mesh.update(MESHES[mesh_name])
  return config


def run_steps(mesh_name, num_steps=2, **changes):
  """Returns (params, metrics of each step) of a run."""
  config = make_config(mesh_name, **changes)
  model = transformer.make_model(
      tiny_model.make_model().config, remat=config.train.remat
  )
  value_model = None
  if config.loss.name == "ppo":
    value_model = heads.ScalarModel(heads.config_of(model.config))
  mesh = sharding.make_mesh(config.mesh)
  params = tiny_model.init_params(model)
  state = train_step.init_state(
      config, model, params, mesh, value_model=value_model
  )
  step_fn = train_step.make_train_step(
      config, model, mesh, value_model=value_model
  )
  metrics = []
  for step in range(num_steps):
    batch = tiny_model.make_batch(num_prompts=NUM_PROMPTS, seed=step)
    batch = sharding.shard_batch(batch, mesh)
    state, result = step_fn(state, batch)
    metrics.append(jax.device_get(result))
  return jax.device_get(state.params), metrics


one_device = functools.cache(functools.partial(run_steps, "one"))


class TrainStepTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("sequence", "sequence", {}),
      ("mixed", "mixed", dict(train__micro_batch_prompts=2)),
      (
          "fsdp",
          "fsdp",
          dict(train__remat="full"),
      ),
      ("values", "mixed", dict(loss__name="ppo", loss__ratio_clip=0.2)),
  )
  def test_equals_one_device(self, mesh_name, changes):
    loss = {k: v for k, v in changes.items() if k.startswith("loss")}
    params, metrics = run_steps(mesh_name, **changes)
    expected_params, expected = one_device(**loss)
    chex.assert_trees_all_close(metrics, expected, rtol=1e-3, atol=1e-5)
    chex.assert_trees_all_close(params, expected_params, **TOLERANCE)

  def test_reference_matches_one_device(self):
    config = make_config("sequence")
    model, mesh = tiny_model.make_model(), sharding.make_mesh(config.mesh)
    params = tiny_model.init_params(model)
    batch = tiny_model.make_batch(num_prompts=NUM_PROMPTS)
    make = lambda params, **kwargs: reference_policy.Reference(
        model, params, temperature=0.7, **kwargs
    )
    run = lambda ref, batch: ref.logprobs(
        batch.prompt_tokens,
        batch.prompt_mask,
        batch.completion_tokens,
        batch.completion_mask,
    )
    on_mesh = run(
        make(
            jax.device_put(params, sharding.replicated(mesh)),
            mesh=mesh,
        ),
        sharding.shard_batch(batch, mesh),
    )
    self.assertEqual(on_mesh.shape, batch.completion_tokens.shape)
    np.testing.assert_allclose(on_mesh, run(make(params), batch), atol=1e-5)


def _gradients(fn, params, batch, config=None):
  """Returns (value, gradient) of fn(params, batch), on a config's mesh."""
  if config is None:
    return jax.jit(jax.value_and_grad(fn))(params, batch)
  mesh = sharding.make_mesh(config.mesh)
  batch = sharding.shard_batch(batch, mesh)
  params = jax.device_put(params, sharding.replicated(mesh))
  fn = sequence.split_tokens(jax.value_and_grad(fn), mesh, *sharding.TOKEN_AXES)
  return jax.jit(fn)(params, batch)


class FunctionsTest(parameterized.TestCase):

  @parameterized.parameters(
      (_LOCAL, 2**25),
      # A few positions' logits at a time.
      ({}, 4 * 3 * 4 * tiny_model.VOCAB),
      (dict(family="gpt2", num_kv_heads=4), 2**25),
      # Norms over heads that are on several devices.
      (dict(family="olmo3", sliding_window=3), 2**25),
      (dict(family="smollm3", rotary_layers=(True, False)), 2**25),
      (
          dict(
              family="ministral3", query_growth=0.5, rope_original_positions=3
          ),
          2**25,
      ),
      (dict(family="qwen3_moe", num_experts=4, experts_per_token=2), 2**25),
      (tiny_model.SPARSE, 2**25),
      (tiny_model.LATENTS, 2**25),
      (tiny_model.SHARED, 2**25),
      (tiny_model.SHARED, 2**25, "plain", "fsdp"),
      (tiny_model.BOTH, 2**25),
      # Each of four devices has a query head, with copies of the two of keys;
      # each of two has two.
      (_LOCAL, 2**25, "splash"),
      (_LOCAL, 2**25, "cudnn", "fsdp"),
      (_OSS, 2**25, "splash"),
      (_OSS, 2**25, "cudnn", "fsdp"),
  )
  def test_logprobs_have_gradients_of_one_device(
      self, changes, max_logits, kernel="plain", mesh_name="mixed"
  ):
    model = tiny_model.make_model(**changes)

    def mean(params, batch):
      chosen = lambda logits, tokens: jnp.take_along_axis(
          jax.nn.log_softmax(logits), tokens[..., None], -1
      )[..., 0]
      logprobs_BxKxT = logprobs.map_logits(
          model,
          params,
          batch.prompt_tokens,
          batch.prompt_mask,
          batch.completion_tokens,
          chosen,
          max_logits=max_logits,
      )
      return jnp.mean(logprobs_BxKxT * batch.completion_mask)

    params = tiny_model.init_params(model)
    batch = tiny_model.make_batch(num_prompts=NUM_PROMPTS)
    expected = _gradients(mean, params, batch)
    with (
        mock.patch.object(kernels, "choose", lambda *_: kernel),
        kernels_on_cpu.patch(kernel),
    ):
      actual = _gradients(mean, params, batch, make_config(mesh_name))
    chex.assert_trees_all_close(actual, expected, **TOLERANCE)

  @parameterized.parameters(
      ("sequence", {}),
      ("mixed", _LOCAL),
      ("fsdp", dict(family="qwen3_moe", num_experts=4, experts_per_token=2)),
      ("mixed", _OSS),
      ("fsdp", tiny_model.STATES),
      ("fsdp", tiny_model.SPARSE),
      ("mixed", tiny_model.LATENTS),
      ("sequence", tiny_model.SHARED),
      ("mixed", tiny_model.SHARED),
      ("mixed", tiny_model.BOTH),
  )
  def test_packed_rows_have_gradients_of_sequences_alone(
      self, mesh_name, changes
  ):
    config = make_config(mesh_name)
    mesh = sharding.make_mesh(config.mesh)
    model = tiny_model.make_model(**changes)
    params = tiny_model.init_params(model)
    batch = packed_gradients.make_batch(has_turns=True)
    packed = rows.pack(
        batch,
        length=packed_gradients.ROW_LENGTH,
        shards=sharding.num_batch_shards(mesh),
        sequence=config.mesh.sequence,
    )
    actual = packed_gradients.of_rows(
        *(config, model, params, packed),
        wrap=lambda fn: sequence.split_tokens(fn, mesh, *sharding.TOKEN_AXES),
    )
    expected = packed_gradients.of_sequences(config, model, params, batch)
    gap = packed_gradients.relative_gap(actual, expected)
    self.assertLess(gap, packed_gradients.TOLERANCE)

  def test_adapters_of_experts_have_gradients_of_one_device(self):
    model = tiny_model.make_model(
        family="qwen3_moe", num_experts=4, experts_per_token=2
    )
    adapters = lora.make(dict(rank=2, alpha=4.0, targets="all"), model)
    base = tiny_model.init_params(model)

    def mean(factors, batch):
      logprobs_BxKxT = logprobs.completion_logprobs(
          model,
          adapters.attach(base, factors),
          batch.prompt_tokens,
          batch.prompt_mask,
          batch.completion_tokens,
          temperature=1.0,
      )
      return jnp.mean(logprobs_BxKxT * batch.completion_mask)

    factors = tiny_model.init_params(adapters)
    batch = tiny_model.make_batch(num_prompts=NUM_PROMPTS)
    one = _gradients(mean, factors, batch)
    self.assertGreater(jnp.abs(one[1]["blocks"]["mlp"]["up"]["a"]).max(), 1e-4)
    chex.assert_trees_all_close(
        _gradients(mean, factors, batch, make_config("mixed")), one, **TOLERANCE
    )

  def test_rewards_have_gradients_of_one_device(self):
    shape = heads.config_of(tiny_model.make_model().config)
    model = heads.ScalarModel(shape)

    def total(params, batch):
      rewards_BxK = model.completion_rewards(
          params,
          batch.prompt_tokens,
          batch.prompt_mask,
          batch.completion_tokens,
          batch.completion_mask,
      )
      return jnp.sum(rewards_BxK * batch.rewards)

    params = tiny_model.init_params(model)
    batch = tiny_model.make_batch(num_prompts=NUM_PROMPTS)
    chex.assert_trees_all_close(
        _gradients(total, params, batch, make_config("sequence")),
        _gradients(total, params, batch),
        **TOLERANCE,
    )


def abstract_batch(B, K, P, T):
  arrays = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  tokens = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
  return types.Batch(
      prompt_tokens=tokens(B, P),
      prompt_mask=arrays(B, P),
      completion_tokens=tokens(B, K, T),
      completion_mask=arrays(B, K, T),
      behavior_logprobs=arrays(B, K, T),
      ref_logprobs=arrays(B, K, T),
      rewards=arrays(B, K),
      staleness_steps=arrays(B, K),
  )


class MemoryTest(parameterized.TestCase):

  @parameterized.parameters(1, 4)
  def test_fsdp_moves_weights_and_no_activations(self, num_chunks):
    B, K, P, T = 8, 2, 64, 64
    model = transformer.make_model(
        tiny_model.make_model(vocab_size=512, max_positions=256).config,
        remat="full",
    )
    config = make_config("one", train__micro_batch_prompts=B)
    config.mesh.fsdp = 8
    mesh = sharding.make_mesh(config.mesh)
    state = train_step.abstract_state(config, model, mesh)
    batch = abstract_batch(B, K, P, T)
    L = P + K * T  # A row a device.
    tokens = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    rows = types.Rows(tokens(B, 1, L), tokens(B, K, T))
    batch = dataclasses.replace(batch, rows=rows)
    with mock.patch.dict(logprobs.MAX_LOGITS, cpu=L // num_chunks * 512):
      step_fn = train_step.make_train_step(config, model, mesh)
      compiled = step_fn.lower(state, batch).compile()
    num_params = sum(x.size for x in jax.tree.leaves(state.params))
    text = compiled.as_text()
    # Chunks are bounded by a device's own share, here one prompt.
    self.assertRegex(text, rf"f32\[(1,)*{L // num_chunks},512\]")
    result = hlo.costs(text)
    # All in float32: a param is gathered for the forward and the backward pass,
    # unless moving its product is cheaper, and its gradient is reduced.
    self.assertLess(result.collective_bytes / num_params, 10.5)

  def test_activations_are_split(self):
    B, K, P, T = 2, 2, 64, 128
    batch = abstract_batch(B, K, P, T)
    bytes_of, text_of = {}, {}
    for name in ("one", "sequence"):
      config = make_config(name, train__micro_batch_prompts=B)
      model = tiny_model.make_model(width=24, max_positions=1024)
      mesh = sharding.make_mesh(config.mesh)
      state = train_step.abstract_state(config, model, mesh)
      step_fn = train_step.make_train_step(config, model, mesh)
      compiled = jax.jit(step_fn).lower(state, batch).compile()
      bytes_of[name] = compiled.memory_analysis().temp_size_in_bytes
      text_of[name] = compiled.as_text()
    # A quarter of it, beside the keys and values of one layer, and gradients.
    self.assertLess(bytes_of["sequence"], 0.5 * bytes_of["one"])
    # No device ever holds the stream of all tokens.
    whole = lambda L: rf"f32\[({B},{L}|{B * L}),24\]"
    self.assertRegex(text_of["one"], whole(P - 1 + K * T))
    self.assertNotRegex(text_of["sequence"], whole(P + K * T))

  def test_embeddings_of_layers_are_split(self):
    B, K, P, T = 2, 2, 64, 128
    batch = abstract_batch(B, K, P, T)
    model = tiny_model.make_model(
        **dict(tiny_model.SHARED, layer_input_width=10, max_positions=1024)
    )
    inputs = batch.prompt_tokens, batch.prompt_mask, batch.completion_tokens
    text_of = {}
    for name in ("one", "sequence"):
      mesh = sharding.make_mesh(make_config(name).mesh)
      run = sequence.split_tokens(
          model.completion_stream, mesh, *sharding.TOKEN_AXES
      )
      params = sharding.abstract_params(model, mesh)
      text_of[name] = jax.jit(run).lower(params, *inputs).compile().as_text()
    # All four layers together, or one.
    whole = lambda L: rf"f32\[(4,)?({B},{L}|{B * L}),((4,)?10|40)\]"
    self.assertRegex(text_of["one"], whole(P - 1 + K * T))
    self.assertNotRegex(text_of["sequence"], whole(P + K * T))
