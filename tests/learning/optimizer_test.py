# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""AdamW at written-out numbers; the clip; what is refused."""

from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np

from tba_jax.config import settings
from tba_jax.learning import optimizer


def make_optimizer_config(**changes):
  config = settings.get_config().optimizer
  config.update(changes)
  return config


class OptimizerTest(parameterized.TestCase):

  def make_update(self, grads, **changes):
    config = make_optimizer_config(
        learning_rate=0.1, schedule="constant", **changes
    )
    opt = optimizer.make_optimizer(config, 10, per_round_steps=0)
    params = jnp.array([2.0, -1.0])
    new, _ = opt.update(
        grads, opt.tx.init(params), params, opt.learning_rate(0)
    )
    return new - params, opt.learning_rate

  def test_first_update_is_the_learning_rate_in_the_sign_of_the_gradient(self):
    updates, learning_rate_fn = self.make_update(
        jnp.array([3.0, -4.0]), grad_clip_norm=0.0
    )
    np.testing.assert_allclose(updates, [-0.1, 0.1], rtol=1e-5)
    np.testing.assert_allclose(learning_rate_fn(0), 0.1)

  def test_weight_decay_is_decoupled(self):
    updates, _ = self.make_update(
        jnp.zeros(2), weight_decay=0.5, grad_clip_norm=1.0
    )
    np.testing.assert_allclose(updates, [-0.1, 0.05], rtol=1e-5)

  def test_weight_decay_leaves_the_bias_of_routing_alone(self):
    opt = optimizer.make_optimizer(
        make_optimizer_config(weight_decay=0.5), 10, per_round_steps=0
    )
    params = {"mlp": {"choice_bias": jnp.ones(2), "router": jnp.ones(2)}}
    grads = {"mlp": {"choice_bias": jnp.zeros(2), "router": jnp.zeros(2)}}
    rate = jnp.float32(0.1)
    new, _ = opt.update(grads, opt.tx.init(params), params, rate)
    np.testing.assert_array_equal(new["mlp"]["choice_bias"], np.ones(2))
    np.testing.assert_allclose(new["mlp"]["router"], 0.95 * np.ones(2))

  def test_clips_the_global_norm(self):
    # Adam hides a gradient's scale but for epsilon, so epsilon is made big:
    # the update is -0.1 g / (|g| + 1).
    big = dict(epsilon=1.0)
    clipped, _ = self.make_update(
        jnp.array([3.0, -4.0]), grad_clip_norm=1.0, **big
    )
    free, _ = self.make_update(
        jnp.array([3.0, -4.0]), grad_clip_norm=0.0, **big
    )
    np.testing.assert_allclose(
        clipped, [-0.1 * 0.6 / 1.6, 0.1 * 0.8 / 1.8], rtol=1e-5
    )
    np.testing.assert_allclose(free, [-0.1 * 3 / 4, 0.1 * 4 / 5], rtol=1e-5)
