# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The reference has the policy's numerics and its own params."""

import dataclasses
import types

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.config import settings
from tba_jax.learning import train_step
from tba_jax.learning import work_parts
from tba_jax.losses import loss_metrics as metrics_lib
from tba_jax.losses import objective
from tba_jax.mesh import sharding
from tba_jax.policy import reference_policy
from tests.support import rows
from tests.support import tiny_model


def logprobs_of(ref, batch, *ref_params):
  return ref.logprobs(
      batch.prompt_tokens,
      batch.prompt_mask,
      batch.completion_tokens,
      batch.completion_mask,
      *ref_params,
  )


class ReferenceTest(parameterized.TestCase):

  @parameterized.parameters(False, True)
  def test_parts_hold_less_and_change_only_rounding(self, are_equal):
    model = tiny_model.make_model()
    params = tiny_model.init_params(model)
    batch = tiny_model.make_batch(num_prompts=24, num_completions=4)
    if are_equal:  # Two distinct completions of each prompt.
      tokens = batch.completion_tokens
      tokens = np.concatenate([tokens[:, :2], tokens[:, 1::-1]], axis=1)
      batch = dataclasses.replace(batch, completion_tokens=tokens)
    fn = reference_policy.make_logprobs_fn(model, temperature=0.7)
    outs, temporaries = [], []
    for one in (batch, rows.pack(batch, 2)):
      args = (
          *(params, one.prompt_tokens, one.prompt_mask),
          *(one.completion_tokens, one.completion_mask, one.rows),
      )
      compiled = jax.jit(fn).lower(*args).compile()
      outs.append(compiled(*args))
      temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
    np.testing.assert_allclose(*outs, atol=1e-5)
    self.assertLess(temporaries[1], temporaries[0] / 2)

  def test_policy_and_reference_agree_at_the_start(self):
    config = tiny_model.make_config(sampling__temperature=0.7)
    model = tiny_model.make_model()
    params = tiny_model.init_params(model)
    ref = reference_policy.Reference(model, params, temperature=0.7)
    batch = tiny_model.make_batch()
    batch = dataclasses.replace(batch, ref_logprobs=logprobs_of(ref, batch))
    _, totals = jax.jit(objective.make_loss_fn(config, model))(
        params, {}, batch, jnp.float32(0.1)
    )
    metrics = metrics_lib.finish(totals)
    self.assertLess(abs(metrics["kl"]), 1e-5)
    # The residual at ρ = 0 is the centered reward.
    centered = batch.rewards - batch.rewards.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(
        metrics["residual_abs"], np.abs(centered).mean() / 0.1, rtol=1e-4
    )

  def test_is_the_masked_tempered_log_softmax(self):
    model = tiny_model.BIGRAM
    params = tiny_model.init_params(model)
    batch = tiny_model.make_batch()
    out = logprobs_of(
        reference_policy.Reference(model, params, temperature=0.5), batch
    )
    stream = model.completion_stream(
        params, batch.prompt_tokens, batch.prompt_mask, batch.completion_tokens
    )
    logits = model.unembed(params, stream)
    every = jax.nn.log_softmax(logits / 0.5)
    expected = np.take_along_axis(
        np.asarray(every), batch.completion_tokens[..., None], axis=-1
    )[..., 0]
    np.testing.assert_allclose(out, expected * batch.completion_mask, atol=1e-5)
    self.assertTrue((out[batch.completion_mask == 0] == 0).all())

  def test_survives_donation_of_the_policy(self):
    config = tiny_model.make_config()
    model = tiny_model.BIGRAM
    mesh = sharding.make_mesh(config.mesh)
    params = tiny_model.init_params(model)
    state = train_step.init_state(config, model, params, mesh)
    policy = types.SimpleNamespace(model=model, adapters=None, folder=None)
    ref = work_parts.make_reference(config, policy, state.params, mesh)
    batch = tiny_model.make_batch()
    before = logprobs_of(ref, batch)
    train_step.make_train_step(config, model, mesh)(state, batch)
    chex.assert_trees_all_equal(logprobs_of(ref, batch), before)

  def test_is_held_in_compute_dtype(self):
    config = tiny_model.make_config(
        model__compute_dtype="bfloat16", reference__role="trainer"
    )
    model = tiny_model.make_model(compute_dtype="bfloat16")
    params = tiny_model.init_params(model)
    policy = types.SimpleNamespace(model=model, adapters=None, folder=None)
    mesh = sharding.make_mesh(config.mesh)
    ref = work_parts.make_reference(config, policy, params, mesh)
    whole = reference_policy.Reference(model, params, temperature=1.0)
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    self.assertLess(size(ref.params), 0.6 * size(whole.params))
    batch = tiny_model.make_batch()
    chex.assert_trees_all_equal(
        logprobs_of(ref, batch), logprobs_of(whole, batch)
    )

  def test_a_moving_reference_uses_the_state(self):
    model, batch = tiny_model.BIGRAM, tiny_model.make_batch()
    first, second = (model.init(jax.random.PRNGKey(seed)) for seed in range(2))
    make = lambda params, every: reference_policy.Reference(
        model, params, temperature=1.0, every_steps=every
    )
    fixed, moving = make(first, 0), make(None, 4)
    chex.assert_trees_all_equal(
        logprobs_of(fixed, batch), logprobs_of(moving, batch, first)
    )
    self.assertFalse(
        (logprobs_of(fixed, batch) == logprobs_of(moving, batch, second)).all()
    )
    self.assertEqual((fixed.version(11), moving.version(11)), (0, 8))


class MovedTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.old = {"w": jnp.array([1.0, 2.0]), "b": jnp.array([4.0], jnp.bfloat16)}
    self.new = {"w": jnp.array([3.0, 0.0]), "b": jnp.array([8.0], jnp.bfloat16)}

  def config(self, **changes):
    config = settings.get_config().reference
    config.update(dict(every_steps=3, ema_decay=0.75) | changes)
    return config

  @parameterized.parameters(
      ("reset", [3.0, 0.0], 8.0), ("ema", [1.5, 1.5], 5.0)
  )
  def test_moves_at_every_third_step(self, mode, w, b):
    config = self.config(mode=mode)
    run = lambda step: reference_policy.moved(config, self.old, self.new, step)
    expected = {"w": jnp.array(w), "b": jnp.array([b], jnp.bfloat16)}
    for call in (run, jax.jit(run)):
      for step in range(1, 8):
        chex.assert_trees_all_equal(
            call(jnp.int32(step)), self.old if step % 3 else expected
        )
