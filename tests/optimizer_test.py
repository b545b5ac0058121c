# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Schedules at written-out steps; the clip; what is refused."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from configs import common
from tba_jax import optimizer


def make_loss_config(**changes):
  config = common.get_config().loss
  config.update(changes)
  return config


def make_optimizer_config(**changes):
  config = common.get_config().optimizer
  config.update(changes)
  return config


class LearningRateTest(parameterized.TestCase):

  @parameterized.parameters(
      ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
      ("linear", [0.5, 1.0, 1.0, 0.8, 0.6, 0.4]),
      # (1 + cos(π s/4)) / 2 of the way from 0.2 to 1.
      ("cosine", [0.5, 1.0, 1.0, 0.8828427, 0.6, 0.3171573]),
  )
  def test_values(self, name, expected):
    schedule = optimizer.make_schedule(
        name,
        learning_rate=1.0,
        learning_rate_final=0.2,
        warmup_steps=2,
        num_steps=6,
    )
    for run in (schedule, jax.jit(schedule)):
      np.testing.assert_allclose(
          [run(step) for step in range(6)], expected, rtol=1e-5
      )

  def test_ends_at_the_final_value_and_stays(self):
    for name in ("linear", "cosine"):
      schedule = optimizer.make_schedule(
          name,
          learning_rate=1.0,
          learning_rate_final=0.2,
          warmup_steps=0,
          num_steps=6,
      )
      np.testing.assert_allclose(schedule(0), 1.0)
      np.testing.assert_allclose([schedule(6), schedule(99)], 0.2, rtol=1e-5)

  @parameterized.parameters(
      (dict(schedule="step"), "optimizer.schedule='step'"),
      (dict(warmup_steps=10), "optimizer.warmup_steps=10"),
      (dict(warmup_steps=-1), "optimizer.warmup_steps=-1"),
      (dict(learning_rate=-1.0), "optimizer.learning_rate=-1.0"),
      (dict(b1=1.0), "optimizer.b1=1.0"),
      (dict(b2=-0.1), "optimizer.b2=-0.1"),
      (dict(epsilon=0.0), "optimizer.epsilon=0.0"),
      (dict(weight_decay=-0.1), "optimizer.weight_decay=-0.1"),
      (dict(grad_clip_norm=-1.0), "optimizer.grad_clip_norm=-1.0"),
  )
  def test_refuses_by_key(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      optimizer.make_optimizer(make_optimizer_config(**changes), 10)


class BetaTest(parameterized.TestCase):

  def test_summarization_values(self):
    schedule = optimizer.beta_schedule(
        make_loss_config(
            beta=1.0, beta_final=0.05, beta_decay_steps=128, beta_stop_steps=32
        )
    )
    # Updates 1, 31, 32 are the steps 0, 30, 31.
    for run in (schedule, jax.jit(schedule)):
      np.testing.assert_allclose(
          [run(0), run(30), run(31), run(255)],
          [1.0, 1 - 0.95 * 30 / 128, 0.05, 0.05],
          rtol=1e-6,
      )
    self.assertAlmostEqual(float(schedule(30)), 0.777, places=3)

  def test_math_values(self):
    schedule = optimizer.beta_schedule(
        make_loss_config(
            beta=0.014,
            beta_final=0.004,
            beta_decay_steps=500,
            beta_stop_steps=500,
        )
    )
    np.testing.assert_allclose(
        [schedule(0), schedule(250), schedule(498), schedule(499)],
        [0.014, 0.009, 0.014 - 0.01 * 498 / 500, 0.004],
        rtol=1e-5,
    )

  def test_no_decay_is_constant(self):
    schedule = optimizer.beta_schedule(
        make_loss_config(beta=0.3, beta_final=0.1, beta_decay_steps=0)
    )
    np.testing.assert_allclose([schedule(0), schedule(10**6)], 0.3)

  @parameterized.parameters(
      (dict(beta=0.0), "loss.beta=0.0"),
      (dict(beta_final=-1.0), "loss.beta_final=-1.0"),
      (dict(beta_decay_steps=-1), "loss.beta_decay_steps=-1"),
      (dict(beta_decay_steps=8, beta_stop_steps=0), "loss.beta_stop_steps=0"),
      (dict(beta_decay_steps=8, beta_stop_steps=9), "loss.beta_stop_steps=9"),
  )
  def test_refuses_by_key(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      optimizer.beta_schedule(make_loss_config(**changes))


class OptimizerTest(absltest.TestCase):

  def make_update(self, grads, **changes):
    config = make_optimizer_config(
        learning_rate=0.1, schedule="constant", **changes
    )
    tx, learning_rate_fn = optimizer.make_optimizer(config, 10)
    params = jnp.array([2.0, -1.0])
    updates, _ = tx.update(grads, tx.init(params), params)
    return updates, learning_rate_fn

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


if __name__ == "__main__":
  absltest.main()
