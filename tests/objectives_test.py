# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every objective through the one path: corrections, norms, metrics."""

import dataclasses

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.losses import build
from tests import table_policy

K = table_policy.K
BETA = table_policy.BETA


class ObjectivesTest(parameterized.TestCase):

  def test_all_give_the_metrics_of_tb(self):
    batch = table_policy.make_batch(behavior_params=table_policy.make_params(3))
    names = {}
    for name in build.OBJECTIVES:
      config = table_policy.make_config(name=name, ratio_clip=0.2)
      loss, metrics, (grad, _) = table_policy.evaluate(
          config, table_policy.make_params(0), batch
      )
      chex.assert_tree_all_finite((loss, metrics, grad))
      self.assertGreater(jnp.abs(grad["table"]).max(), 1e-4, name)
      names[name] = set(metrics)
    for name, found in names.items():
      self.assertLessEqual(
          found - names["tb"], {"pair_margin", "pair_accuracy"}, name
      )
      self.assertLessEqual(names["tb"], found, name)

  def test_any_cut_into_micro_batches_gives_the_same_gradient(self):
    batch = table_policy.make_batch(behavior_params=table_policy.make_params(3))
    params = table_policy.make_params(0)
    for name in build.OBJECTIVES:
      config = table_policy.make_config(name=name, ratio_clip=0.2)
      run = lambda some, config=config: table_policy.evaluate(
          config, params, some
      )[2]
      parts = [
          run(jax.tree.map(lambda x, b=b: x[b : b + 1], batch))
          for b in range(table_policy.B)
      ]
      mean = jax.tree.map(lambda *x: sum(x) / len(x), *parts)
      with self.subTest(name):
        chex.assert_trees_all_close(run(batch), mean, rtol=1e-4, atol=1e-6)

  def test_the_pairs_metrics(self):
    batch = table_policy.make_batch()
    config = table_policy.make_config(name="online_dpo")
    ref = table_policy.make_params(9)
    # At the reference every margin is 0, and none is above it.
    _, metrics, _ = table_policy.evaluate(config, ref, batch)
    np.testing.assert_allclose(metrics["pair_margin"], 0.0, atol=1e-5)
    none = dataclasses.replace(batch, rewards=jnp.ones_like(batch.rewards))
    loss, metrics, (grad, _) = table_policy.evaluate(
        config, table_policy.make_params(0), none
    )
    self.assertEqual(loss, 0.0)
    self.assertEqual(metrics["equal_reward_groups"], 1.0)
    self.assertEqual(metrics["pair_accuracy"], 0.0)
    chex.assert_trees_all_equal(grad, jax.tree.map(jnp.zeros_like, grad))

  def test_proximal_rloo_is_the_clipped_surrogate_of_whole_completions(self):
    behavior = jax.tree.map(
        lambda a, b: a + b / 8,
        table_policy.make_params(0),
        table_policy.make_params(3),
    )
    params, batch = table_policy.make_params(0), table_policy.make_batch(
        behavior_params=behavior
    )
    mask = batch.completion_mask
    kl = ((batch.behavior_logprobs - batch.ref_logprobs) * mask).sum(axis=2)
    returns = batch.rewards - BETA * kl
    others = (returns.sum(axis=1, keepdims=True) - returns) / (K - 1)
    advantages = returns - others

    def surrogate(params):
      delta = (
          table_policy.token_logprobs(params, batch) - batch.behavior_logprobs
      )
      w = jnp.exp((delta * mask).sum(axis=2))
      held = jnp.clip(w, 0.8, 1.2)
      return jnp.maximum(-advantages * w, -advantages * held).mean()

    config = table_policy.make_config(name="proximal_rloo", ratio_clip=0.2)
    _, metrics, (grad, _) = table_policy.evaluate(config, params, batch)
    self.assertBetween(metrics["ratio_clip_share"], 0.05, 0.95)
    chex.assert_trees_all_close(
        grad, jax.grad(surrogate)(params), rtol=1e-4, atol=1e-6
    )

  def test_a_correction_of_one_s_own_choice(self):
    params, batch = table_policy.make_params(0), table_policy.make_batch(
        behavior_params=table_policy.make_params(3)
    )
    mask = batch.completion_mask
    run = lambda **loss: table_policy.evaluate(
        table_policy.make_config(**loss), params, batch
    )[2][0]
    config = dict(name="rloo", ratio_clip=0.2)
    chex.assert_trees_all_equal(
        run(correction="none", **config), run(name="rloo")
    )

    def truncated(params):
      logprobs = table_policy.token_logprobs(params, batch)
      w = jnp.minimum(jnp.exp(logprobs - batch.behavior_logprobs), 1.5)
      kl = ((batch.behavior_logprobs - batch.ref_logprobs) * mask).sum(axis=2)
      returns = batch.rewards - BETA * kl
      advantages = K / (K - 1) * (returns - returns.mean(axis=1, keepdims=True))
      w = jax.lax.stop_gradient(w)
      return -(advantages[:, :, None] * w * logprobs * mask).sum(axis=2).mean()

    chex.assert_trees_all_close(
        run(correction="truncate_token", ratio_cap=1.5, **config),
        jax.grad(truncated)(params),
        rtol=1e-4,
        atol=1e-6,
    )

  def test_length_norm_divides_by_the_tokens(self):
    batch = table_policy.make_batch(behavior_params=table_policy.make_params(3))
    _, _, (own, _) = table_policy.evaluate(
        table_policy.make_config(name="grpo"),
        table_policy.make_params(0),
        batch,
    )
    config = table_policy.make_config(name="grpo", length_norm="none")
    _, _, (summed, _) = table_policy.evaluate(
        config, table_policy.make_params(0), batch
    )
    config = table_policy.make_config(name="grpo", length_norm="tokens")
    _, _, (divided, _) = table_policy.evaluate(
        config, table_policy.make_params(0), batch
    )
    chex.assert_trees_all_equal(own, divided)
    difference = jnp.abs(own["table"] - summed["table"]).max()
    self.assertGreater(difference, 1e-2)


if __name__ == "__main__":
  absltest.main()
