# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the loss of a config: inputs, mask, metrics."""

import dataclasses
import functools

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.losses import distillation
from tba_jax.losses import loss_metrics as metrics_lib
from tba_jax.losses import objective
from tba_jax.losses import objective_table
from tests.support import table_policy

B, K, T, V = table_policy.B, table_policy.K, table_policy.T, table_policy.V
BETA = table_policy.BETA
EOS = table_policy.EOS


class LossTest(parameterized.TestCase):

  def test_value_is_the_group_variance_at_the_temperature(self):
    params, batch = table_policy.make_params(0), table_policy.make_batch()
    loss, metrics, _ = table_policy.evaluate(
        table_policy.make_config(scale="paper"), params, batch
    )
    mask = batch.completion_mask
    rho = (
        (table_policy.token_logprobs(params, batch) - batch.ref_logprobs) * mask
    ).sum(2)
    residual = rho - batch.rewards / BETA
    log_z = -np.asarray(residual).mean(axis=1)
    np.testing.assert_allclose(loss, np.var(residual, axis=1).mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["kl"], rho.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["log_z_mean"], log_z.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["log_z_std"], log_z.std(), rtol=1e-3)
    np.testing.assert_allclose(
        metrics["residual_abs"],
        np.abs(residual + log_z[:, None]).mean(),
        rtol=1e-4,
    )

  @parameterized.parameters(0.0, 0.2)
  def test_masked_tokens_do_not_matter(self, ratio_clip):
    params = table_policy.make_params(0)
    batch = table_policy.make_batch(behavior_params=table_policy.make_params(3))
    outside = batch.completion_mask == 0
    self.assertGreater(outside.sum(), 3)
    changed = dataclasses.replace(
        batch,
        completion_tokens=jnp.where(outside, EOS, batch.completion_tokens),
        behavior_logprobs=jnp.where(outside, -7.0, batch.behavior_logprobs),
        ref_logprobs=jnp.where(outside, -jnp.inf, batch.ref_logprobs),
    )
    config = table_policy.make_config(ratio_clip=ratio_clip)
    chex.assert_trees_all_close(
        table_policy.evaluate(config, params, batch),
        table_policy.evaluate(config, params, changed),
        rtol=1e-6,
    )

  def test_the_clip_keeps_the_gradient_of_fresh_data_and_the_value(self):
    params, batch = table_policy.make_params(0), table_policy.make_batch()
    plain_loss, _, plain = table_policy.evaluate(
        table_policy.make_config(ratio_clip=0.0), params, batch
    )
    loss, metrics, clipped = table_policy.evaluate(
        table_policy.make_config(ratio_clip=0.2), params, batch
    )
    np.testing.assert_allclose(loss, plain_loss, rtol=1e-5)
    chex.assert_trees_all_close(clipped, plain, rtol=1e-4, atol=1e-6)
    self.assertEqual(metrics["ratio_clip_share"], 0.0)

  def test_the_clip_cuts_stale_data(self):
    params = table_policy.make_params(0)
    batch = table_policy.make_batch(behavior_params=table_policy.make_params(3))
    plain_loss, _, plain = table_policy.evaluate(
        table_policy.make_config(ratio_clip=0.0), params, batch
    )
    loss, metrics, clipped = table_policy.evaluate(
        table_policy.make_config(ratio_clip=0.2), params, batch
    )
    np.testing.assert_allclose(loss, plain_loss, rtol=1e-5)
    self.assertGreater(metrics["ratio_clip_share"], 0.1)
    difference = jnp.abs(plain[0]["table"] - clipped[0]["table"]).max()
    self.assertGreater(difference, 1e-2)

  @parameterized.parameters(0.0, 0.2)
  @pytest.mark.slow
  def test_learned_z_moves_by_its_own_gradient(self, ratio_clip):
    config = table_policy.make_config(
        name="tb_learned_z", scale="paper", ratio_clip=ratio_clip
    )
    params, batch = table_policy.make_params(0), table_policy.make_batch()
    log_z = {"log_z": jnp.array([0.5])}
    chex.assert_trees_all_equal(
        objective.make_loss_params(config), {"log_z": jnp.zeros(1)}
    )
    _, metrics, (grad, log_z_grad) = table_policy.evaluate(
        config, params, batch, log_z
    )
    rho = (
        (table_policy.token_logprobs(params, batch) - batch.ref_logprobs)
        * batch.completion_mask
    ).sum(axis=2)
    residual = 0.5 + rho - batch.rewards / BETA
    np.testing.assert_allclose(
        log_z_grad["log_z"], [2 * residual.mean()], rtol=1e-4
    )
    np.testing.assert_allclose(metrics["log_z_mean"], 0.5, rtol=1e-6)
    self.assertGreater(jnp.abs(grad["table"]).max(), 1e-3)

  @pytest.mark.slow
  def test_gradient_equals_finite_differences(self):
    with jax.enable_x64(True):
      config = table_policy.make_config(scale="unit")
      batch = jax.tree.map(jnp.asarray, table_policy.make_batch())
      direction = np.random.default_rng(5).normal(size=(V, T, V))
      start = np.random.default_rng(0).normal(size=(V, T, V))
      loss_fn = objective.make_loss_fn(config, table_policy.MODEL)

      def along(x):
        params = {"table": jnp.asarray(start) + x * direction}
        return loss_fn(params, {}, batch, BETA)[0]

      step = 1e-2
      # Log-probs are float32 by contract, so the step is coarse; the fourth
      # order rule makes up for it.
      slope = (
          8 * (along(step) - along(-step)) - along(2 * step) + along(-2 * step)
      ) / (12 * step)
      np.testing.assert_allclose(jax.grad(along)(0.0), slope, rtol=1e-3)

  def test_refuses_batch_without_groups(self):
    batch = dataclasses.replace(
        table_policy.make_batch(), rewards=jnp.zeros((B * K, 1))
    )
    with self.assertRaises(AssertionError):
      table_policy.evaluate(
          table_policy.make_config(), table_policy.make_params(), batch
      )


class MetricsTest(absltest.TestCase):

  def test_reads_the_batch(self):
    batch = dataclasses.replace(
        table_policy.make_batch(),
        rewards=jnp.array([[1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0]]),
    )
    _, metrics, _ = table_policy.evaluate(
        table_policy.make_config(), table_policy.make_params(0), batch
    )
    self.assertEqual(metrics["reward_mean"], 5 / 8)
    self.assertEqual(metrics["equal_reward_groups"], 0.5)

  def test_measures_the_ratio_and_the_distance(self):
    params, batch = table_policy.make_params(0), table_policy.make_batch(
        behavior_params=table_policy.make_params(3)
    )
    mask = batch.completion_mask
    logprobs = table_policy.token_logprobs(params, batch)
    w = jnp.exp(((logprobs - batch.behavior_logprobs) * mask).sum(axis=2))
    per_token = ((logprobs - batch.ref_logprobs) * mask).sum() / mask.sum()
    for name in ("tb", "rloo"):
      _, metrics, _ = table_policy.evaluate(
          table_policy.make_config(name=name), params, batch
      )
      np.testing.assert_allclose(
          metrics["effective_sample_share"],
          w.sum() ** 2 / (w.size * (w**2).sum()),
          rtol=1e-4,
      )
      np.testing.assert_allclose(metrics["ratio_mean"], w.mean(), rtol=1e-4)
      np.testing.assert_allclose(metrics["kl_per_token"], per_token, rtol=1e-4)
      rho = ((logprobs - batch.ref_logprobs) * mask).sum(axis=2)
      np.testing.assert_allclose(
          metrics["residual_variance"],
          np.var(rho - batch.rewards / BETA, axis=1).mean(),
          rtol=1e-4,
      )

  def test_entropy_is_a_mean_over_tokens_at_the_temperature(self):
    params, batch = table_policy.make_params(0), table_policy.make_batch()
    _, metrics, _ = table_policy.evaluate(
        table_policy.make_config(), params, batch
    )
    logits = table_policy.completion_logits(
        params, batch.prompt_tokens, None, batch.completion_tokens
    )
    logprobs = jax.nn.log_softmax(logits / 0.7)
    entropy = -(jnp.exp(logprobs) * logprobs).sum(axis=-1)
    mask = batch.completion_mask
    np.testing.assert_allclose(
        metrics["entropy"], (entropy * mask).sum() / mask.sum(), rtol=1e-5
    )

  def test_the_entropy_bonus_is_a_mean_over_completions(self):
    params, batch = table_policy.make_params(0), table_policy.make_batch()

    def mean_entropy(params):
      logits = table_policy.completion_logits(
          params, batch.prompt_tokens, None, batch.completion_tokens
      )
      logprobs = jax.nn.log_softmax(logits / 0.7)
      entropy = -(jnp.exp(logprobs) * logprobs).sum(axis=-1)
      mask = batch.completion_mask
      return ((entropy * mask).sum(axis=2) / mask.sum(axis=2)).mean()

    plain, _, plain_grad = table_policy.evaluate(
        table_policy.make_config(), params, batch
    )
    loss, _, grad = table_policy.evaluate(
        table_policy.make_config(entropy_weight=0.3), params, batch
    )
    value, slope = jax.value_and_grad(mean_entropy)(params)
    np.testing.assert_allclose(loss, plain - 0.3 * value, rtol=1e-5)
    expected = jax.tree.map(lambda a, b: a - 0.3 * b, plain_grad[0], slope)
    chex.assert_trees_all_close(grad[0], expected, rtol=1e-4, atol=1e-6)

  def test_logprob_gap_is_of_rows_without_staleness(self):
    batch = table_policy.make_batch()
    staleness = np.ones((B, K), np.float32)
    staleness[0, 1] = 0
    behavior = np.array(batch.behavior_logprobs)
    behavior[0, 1] += 0.5  # counted
    behavior[1, 2] -= 9.0  # stale: a ratio, not a disagreement
    batch = dataclasses.replace(
        batch, staleness_steps=staleness, behavior_logprobs=behavior
    )
    _, metrics, _ = table_policy.evaluate(
        table_policy.make_config(), table_policy.make_params(0), batch
    )
    np.testing.assert_allclose(metrics["logprob_gap"], 0.5, rtol=1e-5)
    self.assertEqual(metrics["on_policy_share"], 1 / 8)

  def test_logprob_gap_without_such_rows_is_zero(self):
    batch = dataclasses.replace(
        table_policy.make_batch(behavior_params=table_policy.make_params(3)),
        staleness_steps=jnp.ones((B, K)),
    )
    _, metrics, _ = table_policy.evaluate(
        table_policy.make_config(), table_policy.make_params(0), batch
    )
    self.assertEqual(metrics["logprob_gap"], 0.0)
    self.assertEqual(metrics["on_policy_share"], 0.0)


class SupervisedTest(absltest.TestCase):

  def test_is_the_mean_over_tokens_at_temperature_one(self):
    params, batch = table_policy.make_params(0), table_policy.make_batch()
    loss_fn = objective.make_supervised_loss_fn(table_policy.MODEL)
    loss, totals = loss_fn(params, {}, batch, jnp.float32(BETA))
    mask = batch.completion_mask
    logprobs = table_policy.token_logprobs(params, batch, temperature=1.0)
    np.testing.assert_allclose(
        loss, -(logprobs * mask).sum() / mask.sum(), rtol=1e-5
    )
    logits = table_policy.completion_logits(
        params, batch.prompt_tokens, None, batch.completion_tokens
    )
    right = (logits.argmax(-1) == batch.completion_tokens) * mask
    np.testing.assert_allclose(
        metrics_lib.finish(totals)["token_accuracy"],
        right.sum() / mask.sum(),
        rtol=1e-6,
    )
    empty = dataclasses.replace(batch, completion_mask=jnp.zeros_like(mask))
    self.assertEqual(loss_fn(params, {}, empty, jnp.float32(BETA))[0], 0.0)


class ReadTest(parameterized.TestCase):
  """The table of settings that only some objectives read."""

  def is_read(self, name, key, values):
    """Returns whether a value of a setting changes the loss or a gradient."""
    return any(
        not np.array_equal(x, y)
        for value in values
        for x, y in zip(self.leaves(name), self.leaves(name, key, value))
    )

  @staticmethod
  @functools.cache
  def leaves(name, *change):
    """Returns losses, metrics and gradients of an objective, as a flat list."""
    batch = table_policy.make_batch(behavior_params=table_policy.make_params(3))
    batch = dataclasses.replace(
        batch, rewards=jnp.array([[0.0, 1.0, 0.0, 2.0], [1.0] * K])
    )
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(-1, 1, (B, K, T))) for _ in range(5)]
    logprobs, token_values, *targets = arrays
    # Targets that were held, in place of those that are made here.
    names = ("advantages_BxKxT", "returns_BxKxT", "old_values_BxKxT")
    held = dict(zip(names, targets))
    from_file = {"baselines_Bx1": jnp.asarray(rng.normal(size=(B, 1)))}
    changes = {change[0]: change[1]} if change else {}
    config = table_policy.make_config(name=name, **changes)
    loss = objective.make_pure_loss(config)
    divergences = distillation.divergence(
        *rng.normal(size=(2, B, K, T, table_policy.V)),
        temperature=1.0,
        gkd_beta=config.loss.gkd_beta,
    )
    log_z = objective.make_loss_params(config)
    return jax.tree.leaves(
        [
            jax.value_and_grad(loss, argnums=(0, 4), has_aux=True)(
                logprobs,
                log_z,
                dataclasses.replace(batch, prepared=prepared | from_file),
                BETA,
                token_values,
                divergences,
            )
            for prepared in ({}, held)
        ]
    )

  @parameterized.parameters(
      ("scale", "paper"),
      ("anchor", "reference", "behavior"),
      ("baseline", "group", "mean"),
      ("baseline_shift", -0.3),
      ("length_norm", "none", "max_tokens"),
      ("ties", "first"),
      ("subtb_lambda", 0.3),
      ("gkd_beta", 0.3),
      ("value_clip", 0.01),
      ("value_weight", 0.5),
      ("gae_gamma", 0.5),
      ("gae_lambda", 0.5),
      ("whiten_advantages", False),
  )
  @pytest.mark.slow
  def test_table_lists_readers_of_setting(self, key, *values):
    readers = [
        n for n in objective_table.OBJECTIVES if self.is_read(n, key, values)
    ]
    self.assertCountEqual(readers, objective_table.readers()[key])

  def test_settings_name_the_readers_of_models_and_log_z(self):
    rows = objective_table.OBJECTIVES.items()
    readers = objective_table.readers()
    for key in ("value_init", "value_learning_rate"):
      self.assertCountEqual(
          readers[key], [n for n, row in rows if row.has_values]
      )
    self.assertCountEqual(
        readers["log_z_learning_rate"],
        [name for name, row in rows if row.learns_log_z],
    )
