# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""The reference has the policy's numerics and params of its own."""

import dataclasses

from absl.testing import absltest
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax import objective
from tba_jax import reference
from tba_jax import sharding
from tba_jax import train_step
from tests import tiny_model


def logprobs_of(ref, batch):
  return ref.logprobs(
      batch.prompt_tokens,
      batch.prompt_mask,
      batch.completion_tokens,
      batch.completion_mask,
  )


class ReferenceTest(absltest.TestCase):

  def test_policy_and_reference_agree_at_the_start(self):
    config = tiny_model.make_config(sampling__temperature=0.7)
    model = tiny_model.make_model()
    params = tiny_model.init_params(model)
    ref = reference.Reference(model, params, temperature=0.7)
    batch = tiny_model.make_batch()
    batch = dataclasses.replace(batch, ref_logprobs=logprobs_of(ref, batch))
    _, totals = jax.jit(objective.make_loss_fn(config, model))(
        params, {}, batch, jnp.float32(0.1)
    )
    metrics = objective.finish_metrics(totals)
    self.assertLess(abs(metrics["kl"]), 1e-5)
    # ρ = 0: what is left of the residual is the centered reward.
    centered = batch.rewards - batch.rewards.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(
        metrics["residual_abs"], np.abs(centered).mean() / 0.1, rtol=1e-4
    )

  def test_is_the_tempered_log_softmax_and_zero_behind_the_mask(self):
    model = tiny_model.BIGRAM
    params = tiny_model.init_params(model)
    batch = tiny_model.make_batch()
    out = logprobs_of(
        reference.Reference(model, params, temperature=0.5), batch
    )
    logits = model.completion_logits(
        params, batch.prompt_tokens, batch.prompt_mask, batch.completion_tokens
    )
    every = jax.nn.log_softmax(logits / 0.5)
    expected = np.take_along_axis(
        np.asarray(every), batch.completion_tokens[..., None], axis=-1
    )[..., 0]
    np.testing.assert_allclose(out, expected * batch.completion_mask, atol=1e-5)
    self.assertTrue((out[batch.completion_mask == 0] == 0).all())

  def test_outlives_the_donation_of_the_policy(self):
    config = tiny_model.make_config()
    model = tiny_model.BIGRAM
    mesh = sharding.make_mesh(config.mesh)
    params = tiny_model.init_params(model)
    state = train_step.init_state(config, model, params, mesh)
    ref = reference.Reference(model, state.params, temperature=1.0, version=3)
    batch = tiny_model.make_batch()
    before = logprobs_of(ref, batch)
    train_step.make_train_step(config, model, mesh)(state, batch)
    chex.assert_trees_all_equal(logprobs_of(ref, batch), before)
    self.assertEqual(ref.version, 3)

  def test_refuses_greedy_sampling(self):
    model = tiny_model.BIGRAM
    with self.assertRaisesRegex(ValueError, "sampling.temperature=0"):
      reference.Reference(model, {}, temperature=0.0)


if __name__ == "__main__":
  absltest.main()
