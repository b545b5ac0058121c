# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics of a batch by hand: perplexities, means over micro-batches."""

import dataclasses
import math
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.losses import loss_metrics as metrics_lib
from tests.support import table_policy


class PerplexityTest(absltest.TestCase):

  def make(self):
    """Prompts of 2 and 1 tokens, completions of 1 and 3."""
    batch = table_policy.make_batch()
    lengths = np.array([[1, 3]] * 2)
    mask = np.arange(table_policy.T) < lengths[:, :, None]
    two = lambda x: x[:, :2]
    return dataclasses.replace(
        batch,
        completion_tokens=two(batch.completion_tokens),
        completion_mask=jnp.asarray(mask, jnp.float32),
        behavior_logprobs=two(batch.behavior_logprobs),
        # Half a nat a token; behind the mask it is hidden.
        ref_logprobs=jnp.where(mask, -0.5, -jnp.inf),
        rewards=two(batch.rewards),
        staleness_steps=two(batch.staleness_steps),
    )

  def found(self, batch):
    logprobs = jnp.zeros(batch.completion_mask.shape)
    return metrics_lib.finish(metrics_lib.batch_totals(batch, logprobs))

  def test_is_of_a_token_and_diluted_by_the_prompt(self):
    metrics = self.found(self.make())
    np.testing.assert_allclose(
        metrics["ref_perplexity"], math.exp(0.5), rtol=1e-6
    )
    # exp(NLL / (prompt + completion - 1)): two prompts, two completions.
    expected = [0.5 / 2, 1.5 / 4, 0.5 / 1, 1.5 / 3]
    np.testing.assert_allclose(
        metrics["ref_perplexity_prompt_diluted"],
        np.exp(expected).mean(),
        rtol=1e-6,
    )

  def test_stays_finite_at_zero_reference_probability(self):
    batch = self.make()
    batch = dataclasses.replace(
        batch, ref_logprobs=jnp.full_like(batch.ref_logprobs, -jnp.inf)
    )
    for name in ("ref_perplexity", "ref_perplexity_prompt_diluted"):
      np.testing.assert_allclose(
          self.found(batch)[name], math.exp(20), rtol=1e-5
      )

  def test_a_completion_without_counted_tokens_is_certain(self):
    batch = self.make()
    batch = dataclasses.replace(
        batch, completion_mask=jnp.zeros_like(batch.completion_mask)
    )
    self.assertEqual(self.found(batch)["ref_perplexity"], 1.0)


class FinishTest(parameterized.TestCase):

  @parameterized.parameters(-2000.0, -63.0, -50.0, 0.0, 20.0, 39.0, 41.0, 300.0)
  def test_effective_share_does_not_depend_on_the_scale_of_ratios(self, nats):
    rng = np.random.default_rng(0)
    for spread in (0.0, 1.0, 5.0):
      log_ratios = nats + spread * rng.normal(size=(4, 8))
      weights = np.exp(log_ratios - nats)
      halves = [
          metrics_lib.ratio_totals(jnp.asarray(half, jnp.float32))
          for half in np.split(log_ratios, 2)
      ]
      out = metrics_lib.finish(jax.tree.map(jnp.add, *halves))
      np.testing.assert_allclose(
          out["effective_sample_share"],
          weights.sum() ** 2 / (weights.size * (weights**2).sum()),
          rtol=1e-3,
      )

  def test_means_spread_and_effective_share(self):
    values = jnp.array([1.0, 3.0])
    out = metrics_lib.finish(
        {
            **metrics_lib.ratio_totals(jnp.log(values)[None]),
            "log_z_from_center": metrics_lib.total(values - 2.5),
            "log_z_square": metrics_lib.total((values - 2.5) ** 2),
            "nothing": metrics_lib.total(values, 0 * values),
        }
    )
    np.testing.assert_allclose(out["ratio_mean"], 2.0, rtol=1e-6)
    # 4² / (2 · 10)
    np.testing.assert_allclose(out["effective_sample_share"], 0.8, rtol=1e-5)
    self.assertEqual(out["log_z_std"], 1.0)
    self.assertEqual(out["nothing"], 0.0)
    self.assertNotIn("log_z_square", out)

  def test_spread_of_large_numbers_near_each_other(self):
    """Squares of them alone differ by less than a float32's rounding."""
    values = jnp.asarray(
        np.random.default_rng(0).normal(1000.0, 0.05, 64), jnp.float32
    )
    center = metrics_lib.log_z_center(values * 1e-3, jnp.float32(1e-3))
    np.testing.assert_allclose(center, 1000.0, atol=0.05)
    mask = jnp.ones_like(values)
    out = metrics_lib.finish(
        {
            "log_z_from_center": metrics_lib.total(values - center),
            "log_z_square": metrics_lib.total((values - center) ** 2),
            **self.value_totals(values, values - 0.5 * (values - center), mask),
        }
    )
    np.testing.assert_allclose(out["log_z_std"], values.std(), rtol=1e-2)
    np.testing.assert_allclose(out["value_explained_variance"], 0.75, atol=1e-2)

  def value_totals(self, returns, values, mask):
    groups = mock.Mock(
        targets=mock.Mock(returns_BxKxT=returns),
        values_BxKxT=values,
        mask_BxKxT=mask,
    )
    return metrics_lib.value_totals(groups, {"value_clipped_BxKxT": 0 * mask})

  def test_values_without_weight_may_be_anything(self):
    value, weight = metrics_lib.total(
        jnp.array([jnp.nan, 2.0]), jnp.array([0.0, 3.0])
    )
    self.assertEqual((value, weight), (6.0, 3.0))
